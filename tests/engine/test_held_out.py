"""Held-out rows: each is evaluated once, on any number of ranks; of none nothing is measured."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from held_out_worker import SIZES, TRAINERS, evaluations, options
from launched import launch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from dschat_tui.runs import gates
from dschat_tui.runs.results import final_metrics, summary_text
from engine.data.phases import build_phase
from engine.models.embedded import build
from engine.models.load import load_tokenizer
from engine.trainers.context import StepContext
from engine.training_log import LogReader

FOLDERS = {"sft": "step1-sft", "reward": "step2-reward", "dpo": "step2-dpo"}
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def sft() -> str:
    return str(build("tiny-llama"))


@pytest.fixture(scope="module")
def on_two_ranks(sft, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    launch(Path(__file__).with_name("held_out_worker.py"), sft, folder, timeout=300)
    return folder


def log_probs(model: torch.nn.Module, ids: list[int], start: int) -> torch.Tensor:
    """Of the tokens from `start` on, each after all before it."""
    text = torch.tensor([ids])
    with torch.no_grad():
        logits = model(input_ids=text).logits[0].double()
    return logits.log_softmax(dim=-1)[range(start - 1, len(ids) - 1), ids[start:]]


def perplexity(model: torch.nn.Module, rows: Rows) -> float:
    """Row by row, without padding."""
    losses = []
    for row in rows:
        every = log_probs(model, row["input_ids"], 1)
        losses += [-every[i - 1] for i, label in enumerate(row["labels"]) if i and label >= 0]
    return math.exp(sum(losses) / len(losses))


def rate_by_score(run: Path, sft: str) -> Any:
    folder = run / "step2-reward" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def rate(ids: list[int], start: int) -> float:
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits)

    return rate


def rate_by_likelihood(run: Path, sft: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(run / "step2-dpo" / "model").eval()
    before = AutoModelForCausalLM.from_pretrained(sft).eval()
    beta = options("dpo", sft).dpo.beta

    def rate(ids: list[int], start: int) -> float:
        return beta * float(
            log_probs(model, ids, start).sum() - log_probs(before, ids, start).sum()
        )

    return rate


def kinds_in(notes: list[str]) -> dict[str, tuple[int, int]]:
    """Pairs right, and all, of each kind that notes tell of."""
    found = [re.fullmatch(r"held-out pairs of kind (\S+): (\d+) of (\d+) right", n) for n in notes]
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


def judge(step: str, sft: str, run: Path, found: Rows) -> None:
    """Compare what a trainer said of each size with plain torch on the model that it saved."""
    config = options(step, sft)
    phase = "sft" if step == "sft" else "reward"
    held_out = build_phase(config, load_tokenizer(sft), phase).eval
    assert [record["kind"] for record in found] == ["eval" if step == "sft" else "reward_eval"] * 5
    if step == "sft":
        model = AutoModelForCausalLM.from_pretrained(run / FOLDERS[step] / "model").eval()
        for size, record in zip(SIZES[1:], found[1:], strict=True):
            expected = perplexity(model, [held_out[row] for row in range(size)])
            assert record["ppl"] == pytest.approx(expected, rel=1e-4)
            assert record["loss"] == pytest.approx(math.log(expected), rel=1e-4)
        assert (found[0]["ppl"], found[0]["loss"]) == (None, None)
        return
    rate = (rate_by_score if step == "reward" else rate_by_likelihood)(run, sft)
    ratings = []
    for row in (held_out[number] for number in range(max(SIZES))):
        start = row["prompt_length"]
        ratings.append((rate(row["chosen_ids"], start), rate(row["rejected_ids"], start)))
    for size, record in zip(SIZES[1:], found[1:], strict=True):
        chosen, rejected = zip(*ratings[:size], strict=True)
        right = [one > other for one, other in ratings[:size]]
        assert record["pairs"] == size
        assert record["accuracy"] == sum(right) / size
        assert record["chosen"] == pytest.approx(sum(chosen) / size, abs=1e-4)
        assert record["rejected"] == pytest.approx(sum(rejected) / size, abs=1e-4)
        losses = [math.log1p(math.exp(other - one)) for one, other in ratings[:size]]
        assert record["loss"] == pytest.approx(sum(losses) / size, abs=1e-4)
        kinds = held_out[:size]["kind"]
        of, correct = Counter(kinds), Counter(k for k, r in zip(kinds, right, strict=True) if r)
        assert kinds_in(record["notes"]) == {kind: (correct[kind], of[kind]) for kind in of}
    unknown = {name: found[0][name] for name in ("accuracy", "chosen", "rejected", "loss")}
    assert unknown == dict.fromkeys(unknown)
    assert found[0]["pairs"] == 0


@pytest.mark.parametrize("step", TRAINERS)
def test_one_rank_measures_what_plain_torch_measures(step, sft, group, tmp_path):
    judge(step, sft, tmp_path, evaluations(step, sft, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("step", TRAINERS)
def test_two_ranks_evaluate_every_row_once_also_fewer_rows_than_ranks(step, sft, on_two_ranks):
    found = json.loads((on_two_ranks / f"{step}.json").read_text())
    judge(step, sft, on_two_ranks / step, found)


@pytest.fixture(scope="module")
def nothing_held_out(tmp_path_factory) -> str:
    """Pairs whose held-out ones do not fit into any step."""
    folder = tmp_path_factory.mktemp("data") / "pairs"
    folder.mkdir()
    for part, words, count in (("train", "", 160), ("test", "word " * 150, 2)):
        pairs = [
            {"prompt": f"Say {number}. {words}", "chosen": str(number), "rejected": "no"}
            for number in range(count)
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(folder)


@pytest.mark.parametrize("step", TRAINERS)
def test_of_no_rows_nothing_is_measured_and_this_is_said(
    step, sft, group, nothing_held_out, tmp_path, capfd
):
    changes = ("checkpoint.interval=1", "checkpoint.keep_last=1", f"{step}.eval_interval=2")
    config = options(step, sft, f"data.sources={nothing_held_out}", *changes)
    trainer = TRAINERS[step](StepContext.create(config, tmp_path, step))
    assert trainer.train()
    reader = LogReader()
    told = [record for line in capfd.readouterr().out.splitlines() for record in reader.feed(line)]
    measured = "perplexity" if step == "sft" else "accuracy"
    (warning,) = (record["text"] for record in told if record["kind"] == "warning")
    assert f"{measured} is not measured" in warning
    evaluations = [record for record in told if record["kind"] in ("eval", "reward_eval")]
    assert len(evaluations) == 3
    for record in evaluations:
        assert {record[name] for name in ("ppl", "chosen", "loss") if name in record} == {None}

    (newest,) = trainer.checkpoints.whole()
    assert (newest[1].step, newest[1].score) == (3, None)
    metrics = final_metrics(step, trainer.context.folder)
    assert summary_text(step, metrics) == f"{measured} not measured"
    config.gates.sft_perplexity, config.gates.reward_accuracy = 1e9, 0.0
    missed = gates.missed(config, step, metrics)
    assert [record["reading"] for record in missed] == ([] if step == "dpo" else [None])
    assert all("was not measured" in gates.told(record) for record in missed)
