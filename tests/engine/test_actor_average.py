"""The saved average of the actor equals one computed from its whole weights after each step."""

from __future__ import annotations

from pathlib import Path

import pytest
from actor_average_run import CASES, check
from launched import launch
from matrix_run import small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """An OPT: it has biases and norms, which ZeRO-3 keeps gathered, and larger matrices."""
    return small_model("opt", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_one_rank(case, model, group, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    check(case, model, tmp_path)


@pytest.mark.slow
def test_on_two_ranks(model, tmp_path):
    launch(Path(__file__).with_name("actor_average_worker.py"), tmp_path, model)
    assert len((tmp_path / "passed").read_text().splitlines()) == len(CASES)
