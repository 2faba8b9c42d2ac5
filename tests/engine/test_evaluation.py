"""`dschat eval`: the models of a run side by side, one in memory at a time."""

from __future__ import annotations

import json
import math
import weakref
from pathlib import Path

import pytest
from plain_torch import perplexity, rating_by_likelihood, rating_by_score, ratings_of
from small_run import configuration
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from engine import evaluation
from engine.config.loading import to_yaml
from engine.data.phases import build_phase
from engine.evaluation import evaluate
from engine.models.embedded import build
from engine.models.load import load_tokenizer
from engine.models.reward import RewardModel


@pytest.fixture
def whole_run(run, tmp_path):
    """A run with all models: its actor is the SFT model, its model of DPO the base."""
    folders = {
        "step1-sft/model": run / "step1-sft/model",
        "step2-reward/model": run / "step2-reward/model",
        "step2-dpo/model": Path(build("tiny-llama")),
        "step3-rlhf/actor": run / "step1-sft/model",
    }
    for name, target in folders.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True)
        (tmp_path / "run" / name).symlink_to(target)

    def make(*assignments: str) -> Path:
        (tmp_path / "run/run.yaml").write_text(to_yaml(configuration(*assignments)))
        return tmp_path / "run"

    return make


def test_one_model_is_in_memory_at_a_time(whole_run, monkeypatch):
    models: list[weakref.ref] = []
    alive: list[int] = []

    def watched(load):
        def loading(*arguments, **options):
            alive.append(sum(model() is not None for model in models))
            model = load(*arguments, **options)
            models.append(weakref.ref(model))
            return model

        return loading

    monkeypatch.setattr(evaluation, "load_causal_lm", watched(evaluation.load_causal_lm))
    monkeypatch.setattr(RewardModel, "from_pretrained", watched(RewardModel.from_pretrained))
    evaluate(whole_run())
    assert alive == [0] * 5


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_figures_are_those_of_plain_transformers(dtype, whole_run):
    folder = whole_run(f"dtype={dtype}", "data.eval_rows=8")
    document = evaluate(folder)
    models = document["models"]
    assert list(models) == ["base", "sft", "dpo", "actor"]
    assert models["actor"] == models["sft"]
    assert models["dpo"] == models["base"]
    # the same model in one and the same format: no rounding may look like a divergence
    assert models["sft"]["kl"] == 0
    assert models["base"]["kl"] > 0
    if dtype == "bf16":
        return
    config = configuration("data.eval_rows=8")
    tokenizer = load_tokenizer(str(folder / "step1-sft/model"))
    held_out = build_phase(config, tokenizer, "sft").eval
    for name, path in (("sft", folder / "step1-sft/model"), ("base", build("tiny-llama"))):
        expected = perplexity(path, list(held_out))
        assert models[name]["perplexity"] == pytest.approx(expected, rel=1e-4)
    pairs = list(build_phase(config, tokenizer, "reward").eval)
    for name, rating in (
        ("reward_model", rating_by_score(folder / "step2-reward/model")),
        (
            "implicit_rewards",
            rating_by_likelihood(build("tiny-llama"), folder / "step1-sft/model", config.dpo.beta),
        ),
    ):
        margins = [chosen - rejected for chosen, rejected in ratings_of(rating, pairs)]
        found = document[name]
        assert found["pairs"] == len(pairs) == 8
        assert found["accuracy"] == sum(margin > 0 for margin in margins) / 8
        assert found["margin"] == pytest.approx(sum(margins) / 8, abs=1e-4)
        of_kinds = {kind: [] for kind in sorted({pair["kind"] for pair in pairs})}
        for pair, margin in zip(pairs, margins, strict=True):
            of_kinds[pair["kind"]].append(margin > 0)
        assert found["kinds"] == {kind: sum(x) / len(x) for kind, x in of_kinds.items()}


def test_a_model_that_diverged_is_told_as_json(whole_run, monkeypatch):
    broken = {"models": {"sft": {"perplexity": math.inf, "kl": math.nan}}}
    monkeypatch.setattr(evaluation, "evaluate", lambda run: broken)
    told = CliRunner().invoke(app, ["eval", str(whole_run()), "--json"])
    assert json.loads(told.stdout)["models"]["sft"] == {"perplexity": "inf", "kl": "nan"}


def test_of_no_rows_nothing_is_measured(whole_run, nothing_held_out):
    folder = whole_run(f"data.sources={nothing_held_out}")
    told = CliRunner().invoke(app, ["eval", str(folder), "--json"])
    document = json.loads(told.stdout)
    assert document["prompts"] == 0
    for figures in document["models"].values():
        assert set(figures.values()) == {None}
    for name in ("reward_model", "implicit_rewards"):
        assert document[name] == {"accuracy": None, "margin": None, "pairs": 0, "kinds": {}}
    shown = CliRunner().invoke(app, ["eval", str(folder)]).stdout
    assert "accuracy -, margin - on 0 pairs" in shown
