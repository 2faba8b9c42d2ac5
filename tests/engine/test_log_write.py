"""What we write into training.log is read back, and written whole."""

from __future__ import annotations

import errno
import io
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_entries import ppo_step
from log_lines import (
    COMMAND,
    DASHES,
    LOSSES,
    SPEED,
    read,
)

from engine.log import write
from engine.log.entries import (
    DPOEvaluation,
    PairStep,
    PerplexityEvaluation,
    RewardEvaluation,
    SFTStep,
    TrainingSpeed,
)
from engine.log.read import LogReader

# ours


def test_round_trip_of_every_line() -> None:
    lines_and_records: list[tuple[str, dict[str, Any] | None]] = [
        (write.running_training(), None),
        (write.beginning_of_epoch(1, 2, 30), None),
        (write.evaluating("perplexity", 0, 2), None),
        (
            write.perplexity(math.inf, 0.1),
            {"kind": "eval", "epoch": 0, "ppl": math.inf, "loss": 0.1},
        ),
        (
            write.step_loss(0, 1, 2, 1e-08),
            {"kind": "loss", "epoch": 0, "step": 1, "rank": 2, "loss": 1e-08},
        ),
        (
            write.throughput(None, 0.25, 1.5, 8.0, 2, 64),
            {
                "kind": "throughput",
                "index": 0,
                "latency_s": 0.25,
                "tflops": 1.5,
                "samples_per_s": 8.0,
                "batch_size": 2,
                "sequence_length": 64,
            },
        ),
        (
            write.throughput(0.5, 0.25, math.nan, 8.0, 2, 64),
            {
                "kind": "throughput",
                "index": 1,
                "latency_s": 0.25,
                "tflops": None,
                "samples_per_s": 8.0,
                "batch_size": 2,
                "sequence_length": 64,
            },
        ),
        (
            write.optimizer_step(20, 3, [1e-05, 5e-4], [(0.9, 0.95), (0.9, 0.95)]),
            {"kind": "optimizer", "engine": "actor", "step": 20, "skipped": 3, "lr": [1e-05, 5e-4]},
        ),
        (write.evaluating("reward", 1, 2), None),
        (
            write.reward_scores(1.25, -0.5, 0.75),
            {
                "kind": "reward_eval",
                "epoch": 1,
                "chosen": 1.25,
                "rejected": -0.5,
                "accuracy": 0.75,
            },
        ),
        (
            write.reward_scores_at(5, 1.25, -0.5, 0.75),
            {
                "kind": "reward_eval",
                "epoch": 1,
                "step": 5,
                "chosen": 1.25,
                "rejected": -0.5,
                "accuracy": 0.75,
            },
        ),
        (
            write.epoch_loss(1, 2, 0.5),
            {"kind": "loss", "epoch": 1, "step": None, "rank": None, "loss": 0.5},
        ),
        (write.evaluating("rewards", 1, 2), None),
        (
            write.dpo_scores(1.5, -1.5, 0.5),
            {
                "kind": "reward_eval",
                "epoch": 1,
                "chosen": 1.5,
                "rejected": -1.5,
                "loss": 0.5,
                "accuracy": None,
            },
        ),
        (write.saving_model(), None),
        (
            write.metrics(7, {"kl": -0.5, "answer_length": 12, "eos_share": None}),
            {"kind": "metrics", "step": 7, "kl": -0.5, "answer_length": 12, "eos_share": None},
        ),
        (
            write.phase("loading models"),
            {"kind": "phase", "name": "loading models", "percent": None},
        ),
        (write.phase("tokenising", 34), {"kind": "phase", "name": "tokenising", "percent": 34}),
        (write.note("a => b: 100 %"), {"kind": "note", "text": "a => b: 100 %"}),
        (write.warning("two\nlines"), {"kind": "warning", "text": r"two\nlines"}),
        (write.step_finished("run/model"), {"kind": "finished", "model": "run/model"}),
    ]
    reader = LogReader()
    for line, expected in lines_and_records:
        assert list(reader.feed(line)) == ([] if expected is None else [expected]), line


def test_round_trip_of_a_ppo_step() -> None:
    step = ppo_step(critic_loss=math.nan, bandwidth_gb_s=239.5, actor_parameters_b=1.429)
    (record,) = read(*step.block())["records"]
    assert math.isnan(record.pop("critic_loss"))
    written = {**vars(step), **vars(step.speed), "unsupervised_loss": 0.0}
    shared = set(record) & set(written)
    assert {name: record[name] for name in shared} == {name: written[name] for name in shared}
    assert set(vars(step.speed)) <= shared
    assert (record["samples_per_s"], record["time_per_sequence_s"]) == (4.0, 0.25)
    unknown = ("tflops", "generate_tflops", "train_tflops", "bandwidth_gb_s")
    lines = ppo_step(**dict.fromkeys(unknown, math.nan)).block()
    assert not any("nan" in line for line in lines)
    (record,) = read(*lines)["records"]
    assert {record[name] for name in unknown} == {None}
    # a block that is there at once is read at once
    reader = LogReader()
    assert [*reader.feed_all(lines), *reader.finish()] == [record]


STEPS = {
    "sft": SFTStep(
        step=7,
        speed=TrainingSpeed(parameters=10**9, seconds=0.5, flops=1e12, rows=4, width=64),
        loss=2.5,
        learning_rate=1e-5,
        gradient_norm=None,
        tokens_per_s=512.0,
        trained_token_share=0.5,
        total_steps=100,
    ),
    "pairs": PairStep(
        step=7,
        speed=TrainingSpeed(parameters=10**9, seconds=0.5, flops=1e12, rows=4, width=64),
        loss=0.5,
        accuracy=0.75,
        margin=1.5,
        chosen=1.0,
        rejected=-0.5,
        learning_rate=1e-5,
        gradient_norm=1.0,
        tokens_per_s=512.0,
        total_steps=100,
    ),
    "ppo": ppo_step(step=7, unsupervised_loss=2.0, more={"baseline": 0.5}),
    "ppo without a critic": ppo_step(step=7, critic_loss=None, unsupervised_loss=2.0),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_log_says_of_a_step_what_metrics_jsonl_says(name: str) -> None:
    """Each line reads back to the numbers of the record, in the record's order."""
    entry = STEPS[name]
    speed, metrics = read(*entry.lines())["records"]
    recorded = entry.record()
    assert metrics == recorded
    assert list(metrics) == list(recorded)
    assert recorded["kind"] == "metrics"
    for shared in set(speed) & set(recorded) - {"kind"}:
        assert speed[shared] == recorded[shared], shared


def test_a_step_without_a_critic_has_none_of_its_quantities() -> None:
    step = ppo_step(critic_loss=None)
    gone = set(ppo_step().record()) - set(step.record())
    assert gone == {
        "critic_loss",
        "critic_gradient_norm",
        "critic_learning_rate",
        "value_clip_fraction",
        "explained_variance",
    }
    block, _ = read(*step.lines())["records"]
    assert (block["critic_loss"], block["critic_parameters_b"]) == (None, None)
    assert block["actor_loss"] == step.actor_loss


EVALUATIONS = {
    "perplexity": PerplexityEvaluation(step=9, epoch=1, epochs=2, ppl=8.5, loss=2.125),
    "reward": RewardEvaluation(9, 1, 2, False, 0.5, 1.5, -0.5, 0.75, 8),
    "reward in an epoch": RewardEvaluation(9, 1, 2, True, 0.5, 1.5, -0.5, 0.75, 8),
    "rewards": DPOEvaluation(9, 1, 2, False, 0.5, 1.5, -0.5, 0.75, 8),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_log_says_of_an_evaluation_what_metrics_jsonl_says(name: str) -> None:
    entry = EVALUATIONS[name]
    recorded = entry.record()
    before = write.beginning_of_epoch(1, 2, 10)
    found, *more = read(before, *entry.lines())["records"]
    assert {**recorded, **{n: x for n, x in found.items() if x is not None}} == recorded
    assert [record["eval_accuracy"] for record in more] == [0.75] * (name == "rewards")


@given(
    st.dictionaries(
        st.from_regex("[a-z][a-z0-9_]{0,9}(/[A-Za-z0-9_.-]{1,9}){0,2}", fullmatch=True).filter(
            lambda name: name not in ("kind", "step", "offset")
        ),
        st.floats(allow_nan=False) | st.integers(-(10**12), 10**12),
        max_size=5,
    )
)
def test_metrics_are_read_back_to_six_digits(values: dict[str, float]) -> None:
    (record,) = LogReader().feed(write.metrics(3, values))
    assert list(record) == ["kind", "step", *values]
    for name, value in values.items():
        assert record[name] == (value if isinstance(value, int) else pytest.approx(value, 1e-5))


def test_metric_that_would_not_be_read_back_is_refused() -> None:
    for name in ("Actor Loss", "kl,", "kind", "step", ""):
        with pytest.raises(ValueError, match="metric"):
            write.metrics(1, {name: 1.0})


def test_records_carry_the_offset_of_their_first_line() -> None:
    reader = LogReader()
    lines = [LOSSES.format(step=0), SPEED[0], "average reward score: 1.0", DASHES, "Note => x"]
    offset, found = 0, []
    for line in lines:
        found += reader.feed(line, offset)
        offset += len(line) + 1
    assert [(r["kind"], r["offset"]) for r in found] == [("ppo", 0), ("note", offset - 10)]


def test_what_a_progress_display_needs() -> None:
    reader = LogReader()
    reader.feed(f"{COMMAND} --module engine.steps.rlhf --config run.yaml")
    assert reader.step == "ppo"
    reader.feed(write.beginning_of_epoch(1, 3, 250, generation=True))
    assert (reader.epochs, reader.batches_per_epoch) == (3, 250)


def test_lines_of_writers_at_the_same_time_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "training.log"

    def write_notes(rank: int) -> None:
        with path.open("a") as stream:
            for step in range(200):
                write.write_line(stream, write.note(f"{rank} {step} " + "x" * 5000))

    threads = [threading.Thread(target=write_notes, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 800
    assert {len(line.split(" ")[-1]) for line in lines} == {5000}


def test_write_line_keeps_order_with_print_and_takes_any_stream(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        print("first", file=stream)
        write.write_line(stream, "second\nhalf \ud800")
        print("third", file=stream)
    assert (tmp_path / "log").read_text().splitlines() == ["first", r"second\nhalf ?", "third"]
    memory = io.StringIO()
    write.write_line(memory, "line")
    assert memory.getvalue() == "line\n"


def test_a_full_disk_delays_a_line_and_loses_none_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    # As a file system does it: half the line fits, then nothing, then there is room again.
    outcomes = iter([5, OSError(errno.ENOSPC, "full"), OSError(errno.ENOSPC, "full")])
    real_write = os.write

    def write_partly(descriptor: int, content: bytes) -> int:
        outcome = next(outcomes, len(content))
        if isinstance(outcome, OSError):
            raise outcome
        return real_write(descriptor, content[:outcome])

    monkeypatch.setattr(write, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(write.os, "write", write_partly)
    with (tmp_path / "log").open("w") as stream:
        write.write_line(stream, write.note("written once"))
    assert (tmp_path / "log").read_text() == "Note => written once\n"
