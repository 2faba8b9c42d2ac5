"""Lines of every family to points by step, events and a status."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dschat_tui.logs.follow import Batch
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.parse import LogParser
from dschat_tui.logs.records import LINES_PER_MARK
from engine.log import write


def batch(lines: Sequence[str], first_byte: int = 0) -> Batch:
    offsets, at = [], first_byte
    for line in lines:
        offsets.append(at)
        at += len(line.encode("utf-8", "replace")) + 1
    return Batch(list(lines), offsets)


def model_of(*lines: str, pieces: int = 1) -> LogModel:
    """The model of a log that comes in some pieces."""
    parser, model = LogParser(), LogModel()
    whole = batch(lines)
    size = -(-len(lines) // pieces) or 1
    for start in range(0, len(lines), size):
        part = slice(start, start + size)
        model.apply(parser.read(Batch(whole.lines[part], whole.offsets[part])))
    model.apply(parser.finish())
    return model


def values(model: LogModel, name: str) -> list[tuple[float, float]]:
    """Step and value of each point, of a short series."""
    return [(column.step, column.mean) for column in model.series[name].columns(512)]


def ppo_2023(epoch: int, step: int, reward: float) -> list[str]:
    return [
        f"Epoch: {epoch} | Step: {step} | PPO Epoch: 1 | Actor Loss: 0.1 | Critic Loss: 0.2 | "
        "Unsupervised Loss: 0.0",
        "End-to-End => Latency: 4.00s, TFLOPs: 28.43, Samples/sec: 4.20, Time/seq 0.24s, "
        "Batch Size: 16, Total Seq. Length: 512",
        "Generation => Latency: 3.00s, Per-token Latency 11.94 ms, TFLOPs: 7.16, "
        "BW: -1.00 GB/sec, Answer Seq. Length: 256",
        "Training   => Latency: 0.75s, TFLOPs: 115.09",
        "Actor Model Parameters => 1.429 B, Critic Model Parameters => 0.331 B",
        f"Average reward score: {reward} | EMA reward score: {reward / 2}",
        "-" * 85,
    ]


def test_steps_of_the_original_count_on_over_epochs() -> None:
    lines = [line for e in (0, 1) for s in (0, 1, 2) for line in ppo_2023(e, s, 10.0 * e + s)]
    model = model_of(*lines)
    assert values(model, "reward") == [(0, 0), (1, 1), (2, 2), (3, 10), (4, 11), (5, 12)]
    assert model.status.done == 6
    assert values(model, "other_s")[0] == (0, 0.25)


def test_the_last_step_of_a_finished_log_is_not_lost() -> None:
    assert values(model_of(*ppo_2023(0, 0, 1.5)), "reward") == [(0, 1.5)]


def test_times_told_after_the_step_was_given_are_of_that_step() -> None:
    lines = []
    for step in range(3):
        if step:
            lines.append(
                "|E2E latency=3.00s |Gather latency=0.00s (0.00%) |Generate time=1.50s (50.00%) "
                "|Training time=1.00s (33.33%) |Others=0.50 (16.67%)|CurSamplesPerSec=5.27 "
                "|AvgSamplesPerSec=5.19"
            )
        lines += [
            f"epoch: 0|step: {step}|ppo_ep: 1|act_loss: 0.1|cri_loss: 0.2|unsuper_loss: 0.0",
            f"average reward score: {step}",
            "-" * 85,
            "some line between",
        ]
    model = model_of(*lines)
    assert values(model, "e2e_s") == [(0, 3.0), (1, 3.0)]
    assert [step for step, _ in values(model, "reward")] == [0, 1, 2]


def test_micro_batches_are_counted_where_the_log_has_no_steps() -> None:
    line = (
        "Model Parameters: 1.429 B, Latency: 0.50s, TFLOPs: 77.31, Samples/sec: 32.00, "
        "Time/seq 0.03s, Batch Size: 16, Sequence Length: 512"
    )
    model = model_of(
        "***** Running training *****",
        "***** Evaluating perplexity, Epoch 0/1 *****",
        "ppl: 20.0, loss: 3.0",
        "Beginning of Epoch 1/1, Total Micro Batches 4",
        *[line] * 4,
        "***** Evaluating perplexity, Epoch 1/1 *****",
        "ppl: 10.0, loss: 2.3",
    )
    assert [step for step, _ in values(model, "tflops")] == [0, 1, 2, 3]
    assert values(model, "tokens_per_s")[0] == (0, 16 * 512 / 0.5)
    assert values(model, "ppl") == [(0, 20.0), (4, 10.0)]
    assert (model.status.step, model.status.done, model.status.total) == ("sft", 4, 4)


def test_the_loss_of_each_rank_belongs_to_one_step() -> None:
    model = model_of(
        *(
            f"Epoch: 0, Step: {step}, Rank: {rank}, loss = {step + rank}"
            for step in range(2)
            for rank in range(2)
        )
    )
    assert [step for step, _ in values(model, "loss")] == [0, 0, 1, 1]
    assert model.series["loss"].maximum == 2


def own_step(step: int, loss: float) -> list[str]:
    return [
        write.step_loss(0, step, 0, loss + 1),
        write.throughput(0.001, 0.5, 0.01, 32.0, 16, 20),
        write.metrics(step, {"loss": loss, "gradient_norm": 1.0, "total_steps": 10}),
    ]


def test_our_own_lines_of_one_step_agree_on_the_step() -> None:
    model = model_of(
        write.note("dtype fp32"),
        write.running_training(),
        *(line for step in range(3) for line in own_step(step, 3.0 - step)),
        pieces=5,
    )
    assert values(model, "loss") == [(0, 3.0), (1, 2.0), (2, 1.0)]
    assert [step for step, _ in values(model, "tflops")] == [0, 1, 2]
    assert (model.status.done, model.status.total) == (3, 10)
    assert "total_steps" not in model.series


def test_operations_that_are_not_known_draw_no_line_and_are_no_alarm() -> None:
    unknown = write.throughput(0.001, 0.5, math.nan, 32.0, 16, 20)
    model = model_of(
        write.note("dtype fp32"),
        *(unknown if "TFLOPs" in line else line for line in own_step(0, 3.0)),
    )
    assert "tflops" not in model.series
    assert values(model, "loss") == [(0, 3.0)]
    assert "not_finite" not in [event.kind for event in model.events]


def test_a_resumed_run_tells_its_steps_again() -> None:
    before = [line for step in range(6) for line in own_step(step, 100.0)]
    after = [line for step in range(4, 8) for line in own_step(step, 1.0)]
    lines = [write.note("x"), write.running_training(), *before]
    for pieces in (1, 7):
        model = model_of(*lines, write.running_training(), *after, pieces=pieces)
        assert values(model, "loss") == [(s, 100.0 if s < 4 else 1.0) for s in range(8)]


def test_a_step_that_goes_back_without_a_new_start_is_no_step() -> None:
    lines = [line for step in range(3) for line in ppo_2023(0, step, 1.0)]
    model = model_of(*lines, *ppo_2023(0, 1, 99.0))
    assert model.series["reward"].maximum == 1.0


def test_nan_is_kept_and_told_once_with_its_step() -> None:
    lines = [write.metrics(s, {"kl": math.nan if s > 1 else 0.1}) for s in range(5)]
    model = model_of(*lines)
    assert model.series["kl"].nonfinite == 3
    told = [event for event in model.events if event.kind == "not_finite"]
    assert len(told) == 1
    assert "step 2" in told[0].text


def test_an_evaluation_without_rows_is_an_event_and_no_point() -> None:
    for what, result, told in (
        ("perplexity", write.perplexity(None, None), "perplexity not measured"),
        ("reward", write.reward_scores(None, None, None), "accuracy not measured"),
        ("rewards", write.dpo_scores(None, None, None), "accuracy not measured"),
    ):
        model = model_of(write.evaluating(what, 0, 1), result)
        assert [event.text for event in model.events] == [f"before training: {told}"]
        assert all(len(series) == 0 for series in model.series.values())
    # the original's DPO tells no accuracy, and rewards all the same
    model = model_of(write.evaluating("rewards", 0, 1), write.dpo_scores(1, 0, 0.3))
    assert list(model.events) == []


def test_events_lead_to_their_lines() -> None:
    lines = [
        write.phase("tokenising", 5),
        write.phase("tokenising", 10),
        write.warning("the critic's learning rate is high"),
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 2, reducing to 1",
        write.step_finished("/runs/a/model"),
    ]
    model = model_of(*lines)
    text = "\n".join(lines).encode()
    warning = next(event for event in model.events if event.kind == "warning")
    assert text[warning.offset :].startswith(b"Warning => the critic")
    assert [event.kind for event in model.events].count("phase") == 1
    assert model.status.counters["overflow"] == 1
    assert model.status.model == "/runs/a/model"


def test_every_64th_line_is_marked_however_the_lines_come() -> None:
    lines = [f"line {number}" for number in range(300)]
    expected = batch(lines).offsets[::LINES_PER_MARK]
    for pieces in (1, 7, 300):
        model = model_of(*lines, pieces=pieces)
        assert list(model.marks) == expected
        assert model.status.lines == 300


def test_a_restarted_log_forgets_what_was_before() -> None:
    parser, model = LogParser(), LogModel()
    model.apply(parser.read(batch(ppo_2023(0, 0, 1.0))))
    new = batch(own_step(0, 5.0))
    model.apply(parser.read(Batch(new.lines, new.offsets, restarted=True)))
    assert "reward" not in model.series
    assert model.status.lines == 3


FRAGMENTS = st.sampled_from(
    [
        *ppo_2023(0, 3, 1.0),
        *own_step(2, 1.0),
        write.running_training(8),
        "Metrics => step: 99999999999, kl: nan, x: inf",
        "Metrics => step: 0, kl: 1e999",
        "ppl: NA, loss: nan",
        "Iter 5: c_scores: nan, r_scores: 1, diff: 0, acc: 0.5",
    ]
)


BLOCK_BEGINS = (
    "Epoch: 0 | Step: 3 | PPO Epoch: 1 | Actor Loss: 0.1 | Critic Loss: 0.2 | "
    "Unsupervised Loss: 0.0"
)


@example([BLOCK_BEGINS, "Metrics => step: 2, kl: 1", BLOCK_BEGINS, "Metrics => step: 9, kl: 1"], 1)
@example(["Metrics => step: 9, kl: 1", "Metrics => step: 0, kl: 1"], 1)
@settings(max_examples=60, deadline=None)
@given(st.lists(FRAGMENTS | st.text(max_size=80), max_size=40), st.integers(1, 6))
def test_no_text_raises_and_steps_never_go_back(lines: list[str], pieces: int) -> None:
    flat = [line.replace("\n", " ") for line in lines]
    model = model_of(*flat, pieces=pieces)
    for series in model.series.values():
        steps = [column.step for column in series.columns(512)]
        assert steps == sorted(steps)
