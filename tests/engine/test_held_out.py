"""Held-out rows: each is evaluated once, on any number of ranks; of none nothing is measured."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from held_out_worker import SIZES, TRAINERS, evaluations, options
from launched import launch
from plain_torch import perplexity, rating_by_likelihood, rating_by_score, ratings_of

from dschat_tui.run_text import result_line
from dschat_tui.runs import gates
from dschat_tui.runs.results import final_metrics
from engine.data.phases import build_phase
from engine.log.read import LogReader
from engine.models.embedded import build
from engine.models.load import load_tokenizer
from engine.trainers.context import StepContext

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


def kinds_in(notes: list[str]) -> dict[str, tuple[int, int]]:
    """Pairs right, and all, of each kind that notes tell of."""
    found = [re.fullmatch(r"held-out pairs of kind (\S+): (\d+) of (\d+) right", n) for n in notes]
    return {match[1]: (int(match[2]), int(match[3])) for match in found if match}


def judge(step: str, sft: str, run: Path, found: Rows) -> None:
    """Compare what a trainer said of each size with plain torch on the model that it saved."""
    config = options(step, sft)
    phase = "sft" if step == "sft" else "reward"
    held_out = build_phase(config, load_tokenizer(sft), phase).eval
    rows = [held_out[number] for number in range(max(SIZES))]
    model = run / FOLDERS[step] / "model"
    assert [record["kind"] for record in found] == ["eval" if step == "sft" else "reward_eval"] * 5
    if step == "sft":
        assert (found[0]["ppl"], found[0]["loss"]) == (None, None)
        for size, record in zip(SIZES[1:], found[1:], strict=True):
            expected = perplexity(model, rows[:size])
            assert record["ppl"] == pytest.approx(expected, rel=1e-4)
            assert record["loss"] == pytest.approx(math.log(expected), rel=1e-4)
        return
    if step == "reward":
        ratings = ratings_of(rating_by_score(model), rows)
    else:
        ratings = ratings_of(rating_by_likelihood(model, sft, config.dpo.beta), rows)
    for size, record in zip(SIZES[1:], found[1:], strict=True):
        chosen, rejected = zip(*ratings[:size], strict=True)
        right = [one > other for one, other in ratings[:size]]
        assert record["pairs"] == size
        assert record["accuracy"] == sum(right) / size
        assert record["chosen"] == pytest.approx(sum(chosen) / size, abs=1e-4)
        assert record["rejected"] == pytest.approx(sum(rejected) / size, abs=1e-4)
        losses = [math.log1p(math.exp(other - one)) for one, other in ratings[:size]]
        assert record["loss"] == pytest.approx(sum(losses) / size, abs=1e-4)
        kinds = [row["kind"] for row in rows[:size]]
        of, correct = Counter(kinds), Counter(k for k, r in zip(kinds, right, strict=True) if r)
        assert kinds_in(record["notes"]) == {kind: (correct[kind], of[kind]) for kind in of}
    unknown = {name: found[0][name] for name in ("accuracy", "chosen", "rejected", "loss")}
    assert unknown == dict.fromkeys(unknown)
    assert found[0]["pairs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("step", TRAINERS)
def test_one_rank_measures_what_plain_torch_measures(step, sft, group, tmp_path):
    judge(step, sft, tmp_path, evaluations(step, sft, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("step", TRAINERS)
def test_two_ranks_evaluate_every_row_once_also_fewer_rows_than_ranks(step, sft, on_two_ranks):
    found = json.loads((on_two_ranks / f"{step}.json").read_text())
    judge(step, sft, on_two_ranks / step, found)


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
    assert result_line(step, metrics) == f"{measured} not measured"
    config.gates.sft_perplexity, config.gates.reward_accuracy = 1e9, 0.0
    missed = gates.missed(config, step, metrics)
    assert [record["reading"] for record in missed] == ([] if step == "dpo" else [None])
    assert all("was not measured" in gates.told(record) for record in missed)
