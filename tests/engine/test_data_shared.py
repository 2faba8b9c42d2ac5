"""Real public data, where it lies beside the checkout (`../shared/data`)."""

from pathlib import Path

import pytest

from engine.config.schema import DataSource, RunConfig
from engine.data.checks import refusals
from engine.data.schemas import schema_of
from engine.data.sources import load_source

FOLDER = Path(__file__).parents[3] / "shared" / "data"


def source(name):
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout (../shared/data)")
    return DataSource(path=str(path))


@pytest.mark.parametrize("name", ["dpo_en.json", "dpo_zh.json"])
def test_preference_dialogues_serve_all_steps(name, tmp_path):
    assert schema_of(source(name)).phases == {"sft", "reward", "ppo"}
    loaded = load_source(source(name), str(tmp_path))
    assert len(loaded.train) == 300
    assert set(loaded.dropped.values()) == {0}
    assert all(prompt[-1]["role"] == "user" for prompt in loaded.train["prompt"][:])
    assert any(prompt[0]["role"] == "system" for prompt in loaded.train["prompt"][:])
    assert all(
        a != b for a, b in zip(*(loaded.train[c][:] for c in ("chosen", "rejected")), strict=True)
    )


def test_instructions_serve_step_1_alone(tmp_path):
    assert "reward" not in schema_of(source("alpaca_en.json")).phases
    assert len(load_source(source("alpaca_en.json"), str(tmp_path)).train) == 999
    config = RunConfig.model_validate({"data": {"sources": [source("alpaca_en.json").path]}})
    assert "no rejected answers" in refusals(config, [1, 2, 3])[0]


def test_web_text_serves_the_mixture_loss(tmp_path):
    loaded = load_source(source("c4.jsonl"), str(tmp_path))
    assert loaded.is_text
    assert len(loaded.train) == 300
