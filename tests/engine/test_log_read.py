"""Reading training.log: every family of logs, whole documents, and any bytes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_lines import (
    DASHES,
    LOSSES,
    OOM,
    OPTIMIZER,
    RATES,
    SPEED,
    STAMP,
    TIMER,
    exits,
    failure,
    launched,
    read,
    read_bytes,
)

from engine.log import documents, write
from engine.log.read import LogReader

# families


def test_ppo_of_april_2023() -> None:
    document = read(
        "epoch: 0|step: 3|ppo_ep: 1|act_loss: 0.25|cri_loss: 1e-08|unsuper_loss: 0.0",
        "average reward score: -1.5",
        DASHES,
        TIMER.format(e2e="3.03") + RATES,
    )
    assert document["step"] == "ppo"
    assert document["records"] == [
        {
            "kind": "ppo",
            "epoch": 0,
            "step": 3,
            "ppo_epoch": 1,
            "actor_loss": 0.25,
            "critic_loss": 1e-08,
            "unsupervised_loss": 0.0,
            "reward": -1.5,
            "reward_ema": None,
            "e2e_s": 3.03,
            "generate_s": 1.37,
            "train_s": 1.44,
            "tflops": None,
            "gather_s": 0.25,
            "others_s": 0.23,
            "samples_per_s": 5.27,
            "average_samples_per_s": 5.19,
        }
    ]


def test_ppo_of_august_2023_and_with_ema() -> None:
    document = read(
        "***** Running training (total_iters=1548) *****",
        "Beginning of Epoch 1/1, Total Generation Batches 1548",
        LOSSES.format(step=7),
        *SPEED,
        "average reward score: 2.5",
        DASHES,
        LOSSES.format(step=8),
        *SPEED,
        "Average reward score: 3.0078125 | EMA reward score: 2.972019692554085",
        DASHES,
    )
    august, november = document["records"]
    assert august == {
        "kind": "ppo",
        "epoch": 0,
        "step": 7,
        "ppo_epoch": 1,
        "actor_loss": -0.25,
        "critic_loss": 0.5,
        "unsupervised_loss": 0.0,
        "reward": 2.5,
        "reward_ema": None,
        "e2e_s": 3.81,
        "tflops": 28.43,
        "samples_per_s": 4.20,
        "time_per_sequence_s": 0.24,
        "batch_size": 16,
        "sequence_length": 512,
        "generate_s": 3.06,
        "per_token_ms": 11.94,
        "generate_tflops": 7.16,
        "bandwidth_gb_s": 239.38,
        "answer_length_limit": 256,
        "train_s": 0.75,
        "train_tflops": 115.09,
        "actor_parameters_b": 1.429,
        "critic_parameters_b": 0.331,
    }
    assert november["step"] == 8
    assert november["reward"] == 3.0078125
    assert november["reward_ema"] == 2.972019692554085


def test_what_bf16_and_unknown_models_do_not_print() -> None:
    document = read(
        LOSSES.format(step=0).replace("-0.25", "nan").replace("0.5", "inf"),
        SPEED[1].replace("239.38", "-1.00"),
        SPEED[3].replace("1.429 B", "NA"),
        "Average reward score: -inf | EMA reward score: nan",
        DASHES,
    )
    (record,) = document["records"]
    assert math.isnan(record["actor_loss"])
    assert record["critic_loss"] == math.inf
    assert record["reward"] == -math.inf
    assert math.isnan(record["reward_ema"])
    assert record["bandwidth_gb_s"] is None
    assert record["actor_parameters_b"] is None
    assert record["critic_parameters_b"] == 0.331


def test_hybrid_timer_belongs_to_the_step_before() -> None:
    def block(step: int) -> list[str]:
        return [LOSSES.format(step=step), "average reward score: 1.0", DASHES]

    document = read(
        TIMER.format(e2e="9.99"),  # orphan: the log's beginning is gone
        *block(0),
        TIMER.format(e2e="1.00"),
        TIMER.format(e2e="1.50"),  # a second generation of the same step
        *block(1),
        "some text in between",
        TIMER.format(e2e="2.00"),
        *block(2),
    )
    assert [record["step"] for record in document["records"]] == [0, 1, 2]
    assert [record["e2e_s"] for record in document["records"]] == [1.0, 2.0, None]


def test_hybrid_timer_beside_the_times_of_the_script() -> None:
    document = read(
        LOSSES.format(step=0), *SPEED, "average reward score: 1.0", DASHES, TIMER.format(e2e="3.03")
    )
    (record,) = document["records"]
    assert (record["e2e_s"], record["hybrid_e2e_s"]) == (3.81, 3.03)
    assert (record["generate_s"], record["hybrid_generate_s"]) == (3.06, 1.37)


def test_ppo_record_is_given_with_the_line_after_its_block() -> None:
    reader = LogReader()
    lines = [LOSSES.format(step=0), *SPEED, "average reward score: 1.0", DASHES]
    assert [record for line in lines for record in reader.feed(line)] == []
    given = reader.feed(TIMER.format(e2e="3.03"))
    assert [(record["step"], record["hybrid_e2e_s"]) for record in given] == [(0, 3.03)]
    assert list(reader.finish()) == []


def test_ppo_step_without_end_is_given_as_far_as_it_went() -> None:
    document = read(LOSSES.format(step=0), SPEED[0], LOSSES.format(step=1), SPEED[0][:40])
    assert [(r["step"], r["reward"], r["e2e_s"]) for r in document["records"]] == [
        (0, None, 3.81),
        (1, None, None),
    ]


def test_sft() -> None:
    throughput = (
        "Model Parameters: 1.429 B, Latency: 0.60s, TFLOPs: 77.31, Samples/sec: 26.60, "
        "Time/seq 0.04s, Batch Size: 16, Sequence Length: 512"
    )
    document = read(
        "***** Running training *****",
        "***** Evaluating perplexity, Epoch 0/2 *****",
        "ppl: 4937.25, loss: 8.5",
        "Beginning of Epoch 1/2, Total Micro Batches 100",
        "Epoch: 0, Step: 3, Rank: 0, loss = 2.5",
        "Epoch: 0, Step: 3, Rank: 1, loss = nan",
        throughput,
        throughput.replace("1.429 B", "NA"),
        "***** Evaluating perplexity, Epoch 1/2 *****",
        "ppl: inf",
    )
    assert document["step"] == "sft"
    sizes = {"samples_per_s": 26.6, "batch_size": 16, "sequence_length": 512}
    assert document["records"][0] == {"kind": "eval", "epoch": 0, "ppl": 4937.25, "loss": 8.5}
    assert document["records"][1] == {
        "kind": "loss",
        "epoch": 0,
        "step": 3,
        "rank": 0,
        "loss": 2.5,
    }
    assert document["records"][2]["rank"] == 1
    assert math.isnan(document["records"][2]["loss"])
    assert document["records"][3:5] == [
        {"kind": "throughput", "index": index, "latency_s": 0.6, "tflops": 77.31, **sizes}
        for index in (0, 1)
    ]
    assert document["records"][5] == {"kind": "eval", "epoch": 1, "ppl": math.inf, "loss": None}


def test_reward_model_new_and_old() -> None:
    document = read(
        "***** Evaluating reward, Epoch 0/1 *****",
        "chosen_last_scores (higher is better) : 2.5, acc (higher is better) : 0.5",
        "Beginning of Epoch 1/1, Total Micro Batches 50",
        "Iter 40: c_scores: 1.5, r_scores: -0.5, diff: 2.0, acc: 0.75",
        "Epoch 1/1 with loss 0.6502279072578002",
        "***** Evaluating reward, Epoch 1/1 *****",
        "chosen_last_scores (higher is better) : -0.25, rejected_last_scores (lower is better) : "
        "-0.75, acc (higher is better) : 0.6387499570846558",
    )
    assert document["step"] == "reward"
    assert document["records"] == [
        {"kind": "reward_eval", "epoch": 0, "chosen": 2.5, "rejected": None, "accuracy": 0.5},
        {
            "kind": "reward_eval",
            "epoch": 1,
            "step": 40,
            "chosen": 1.5,
            "rejected": -0.5,
            "accuracy": 0.75,
        },
        {"kind": "loss", "epoch": 1, "step": None, "rank": None, "loss": 0.6502279072578002},
        {
            "kind": "reward_eval",
            "epoch": 1,
            "chosen": -0.25,
            "rejected": -0.75,
            "accuracy": 0.6387499570846558,
        },
    ]


def test_dpo() -> None:
    document = read(
        "***** Evaluating rewards, Epoch 1/1 *****", "chosen: 0.5, rejected: -1.5, loss: 0.25"
    )
    assert document["step"] == "dpo"
    assert document["records"] == [
        {
            "kind": "reward_eval",
            "epoch": 1,
            "chosen": 0.5,
            "rejected": -1.5,
            "loss": 0.25,
            "accuracy": None,
        }
    ]


def test_what_was_not_measured_is_read_back_as_such() -> None:
    for what, line, names in (
        ("perplexity", write.perplexity(None, None), {"ppl", "loss"}),
        ("reward", write.reward_scores(None, None, None), {"chosen", "accuracy"}),
        ("rewards", write.dpo_scores(None, None, None), {"chosen", "rejected", "loss"}),
    ):
        header = write.evaluating(what, 1, 2)
        # also where another rank's line tore into it
        for before in ("", write.step_loss(0, 3, 0, 1.5)):
            document = read(header, before + line)
            (record,) = (r for r in document["records"] if r["kind"] != "loss")
            assert names <= record.keys()
            assert {record[name] for name in names} == {None}
            assert '"nan"' not in documents.to_json(document)
    (record,) = read(write.reward_scores_at(7, None, None, None))["records"]
    assert (record["step"], record["chosen"], record["accuracy"]) == (7, None, None)


def test_optimizer_lines_of_ppo_are_the_actors_then_the_critics() -> None:
    document = read(
        "***** Running training (total_iters=9) *****",
        OPTIMIZER.format(step=0, skipped=0, rate="0"),  # engines start
        OPTIMIZER.format(step=70, skipped=6, rate="6e-06"),
        f"{STAMP} [timer.py:260:stop] epoch=0/micro_step=560/global_step=70, "
        "RunningAvgSamplesPerSec=3.5, CurrSamplesPerSec=nan, MemAllocated=5.92GB, "
        "MaxMemAllocated=42.72GB",
        OPTIMIZER.format(step=70, skipped=4, rate="5e-06"),
        OPTIMIZER.format(step=80, skipped=7, rate="np.float64(4e-06)"),
        OPTIMIZER.format(step=80, skipped=4, rate="3e-06"),
    )
    assert [(r["engine"], r["step"], r["skipped"], r["lr"]) for r in document["records"]] == [
        ("actor", 70, 6, [6e-06, 6e-06]),
        ("critic", 70, 4, [5e-06, 5e-06]),
        ("actor", 80, 7, [4e-06, 4e-06]),
        ("critic", 80, 4, [3e-06, 3e-06]),
    ]
    assert document["records"][0]["samples_per_s"] == 3.5
    assert document["records"][0]["peak_memory_gb"] == 42.72


def test_optimizer_of_the_other_steps_is_the_engine_of_their_configuration() -> None:
    for header, engine in (("perplexity", "actor"), ("reward", "critic"), ("rewards", "actor")):
        line = OPTIMIZER.format(step=10, skipped=0, rate="1e-05")
        document = read(f"***** Evaluating {header}, Epoch 0/1 *****", line, line)
        assert {r["engine"] for r in document["records"]} == {engine}


# documents


def test_document_of_a_file_has_the_documented_shape(tmp_path: Path) -> None:
    path = tmp_path / "training.log"
    lines = [*launched(1), "***** Evaluating perplexity, Epoch 0/1 *****", "ppl: inf, loss: nan"]
    path.write_text("\n".join([*lines, *exits(4)]))
    document = json.loads(documents.to_json(documents.read_document(path)))
    assert list(document) == ["step", "state", "returncode", "cause", "records", "events"]
    assert document["records"] == [{"kind": "eval", "epoch": 0, "ppl": "inf", "loss": "nan"}]
    assert (document["state"], document["returncode"]) == ("ok", 0)
    assert document["events"]["overflow"] == 0


def test_json_of_what_is_not_finite() -> None:
    text = documents.to_json({"a": [math.nan, -math.inf, 1e-08], "b": {"c": math.inf}})
    assert json.loads(text) == {"a": ["nan", "-inf", 1e-08], "b": {"c": "inf"}}


def test_lines_across_blocks_and_lines_without_end(tmp_path: Path) -> None:
    path = tmp_path / "training.log"
    loss = "Epoch: 0, Step: {}, Rank: 0, loss = 0.5\n"
    with path.open("w") as file:
        for step in range(60_000):
            file.write(loss.format(step))
        file.write("x" * 3_000_000 + "\n" + loss.format(60_000))
    steps = [record["step"] for record in documents.read_document(path)["records"]]
    assert steps == list(range(60_001))


def test_run_folder(tmp_path: Path) -> None:
    for folder, lines in (
        ("step1-sft", [*launched(1), *exits(1)]),
        ("step3-rlhf", [*launched(1), LOSSES.format(step=0)]),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "training.log").write_text("\n".join(lines) + "\n")
    steps = documents.read_run(tmp_path)["steps"]
    assert {name: (d["step"], d["state"]) for name, d in steps.items()} == {
        "sft": ("sft", "ok"),
        "ppo": ("ppo", "unknown"),
    }
    state = {"steps": {"sft": {"state": "running"}, "ppo": {"state": "running"}}}
    (tmp_path / "run.json").write_text(json.dumps(state))
    steps = documents.read_run(tmp_path)["steps"]
    assert (steps["sft"]["state"], steps["ppo"]["state"]) == ("ok", "running")
    (tmp_path / "run.json").write_text("[]")
    assert documents.read_run(tmp_path)["steps"]["ppo"]["state"] == "unknown"


# any bytes

FORMS = [
    LOSSES.format(step=1),
    *SPEED,
    TIMER.format(e2e="1.00") + RATES,
    "Average reward score: 1.0 | EMA reward score: 2.0",
    DASHES,
    "ppl: 2.0, loss: 0.7",
    OPTIMIZER.format(step=10, skipped=0, rate="1e-05"),
    "Epoch: 0, Step: 3, Rank: 0, loss = 0.5",
    "chosen_last_scores (higher is better) : 2.5, acc (higher is better) : 0.5",
    "***** Evaluating reward, Epoch 0/1 *****",
    "Beginning of Epoch 1/1, Total Micro Batches 50",
    "Metrics => step: 1, kl: 0.5",
    "Phase => tokenising 34 %",
    "Grad overflow on iteration 5",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1",
    *launched(2),
    *exits(1),
    *failure(-9),
    "Step 1 exited with non-zero status 1",
    OOM,
    "\x1b[31m \r 34%|███▍ | 34/100 [00:10<00:20]",
]


@settings(max_examples=300)
@given(st.binary(max_size=600))
def test_any_bytes(content: bytes) -> None:
    json.loads(documents.to_json(read_bytes(content)))


@settings(max_examples=300)
@given(st.data())
def test_any_mutilation_of_known_lines(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(FORMS) | st.text(max_size=20), max_size=12))
    text = data.draw(st.sampled_from(["\n", "", "\r", " "])).join(pieces)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    middle = data.draw(st.text(st.characters() | st.sampled_from("0123456789.:,=[]|"), max_size=9))
    document = read_bytes((text[:start] + middle + text[end:]).encode("utf-8", "surrogatepass"))
    assert document["state"] in ("ok", "failed", "unknown")
    json.loads(documents.to_json(document))


@pytest.mark.parametrize("word", ["ppl: 1.0", "\x1b]", "[", "Epoch: 0 ", "1%|", "\r", "│ ", ": "])
def test_hostile_lines_are_read_in_bounded_time(word: str) -> None:
    hostile = word * (2_000_000 // len(word))
    nested = "│ [rank0]: " * 5000 + "\t│" * 5000
    assert read(nested)["records"] == []
    assert read(hostile, "Epoch: 0, Step: 3, Rank: 0, loss = 0.5")["records"][-1]["step"] == 3


def test_numbers_too_long_for_python_are_no_numbers() -> None:
    assert read(f"Epoch: {'9' * 5000}, Step: 3, Rank: 0, loss = 0.5")["records"] == []


def test_no_torch() -> None:
    code = "import sys, engine.log.documents; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=environment)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_many_lines_at_once_read_as_one_by_one(data) -> None:
    blocks = [
        [
            LOSSES.format(step=step),
            *SPEED,
            f"Average reward score: 1.5 | EMA reward score: {ema}",
            DASHES,
        ]
        for step, ema in enumerate(("1.25", "NA", "x"))
    ]
    others = [
        "",
        "other text",
        "Epoch: 1, Step: 3, Rank: 0, loss = 0.5",
        TIMER.format(e2e=3.25) + RATES,
        write.metrics(3, {"kl": 0.5}),
        "Metrics => step: 1, kl",
        write.running_training(9),
        LOSSES.format(step=7),
        SPEED[0],
        write.throughput(1.429, 0.5, 77.3, 26.6, 16, 512),
        "Model Parameters: NA, Latency: xs, TFLOPs: 1, Samples/sec: 1, Time/seq 1s, "
        "Batch Size: 1, Sequence Length: 2",
        "average reward score: -2.0",
    ]
    pieces = data.draw(
        st.lists(st.sampled_from([*blocks, *([line] for line in others)]), max_size=12)
    )
    lines = [line for piece in pieces for line in piece]
    offsets = range(0, 100 * len(lines), 100)
    at_once, one_by_one = LogReader(), LogReader()
    records = list(at_once.feed_all(lines, offsets))
    slowly = [
        record for pair in zip(lines, offsets, strict=True) for record in one_by_one.feed(*pair)
    ]
    assert records == slowly
    assert list(at_once.finish()) == list(one_by_one.finish())
    assert (at_once.step, at_once.events) == (one_by_one.step, one_by_one.events)
