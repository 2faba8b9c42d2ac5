"""The saved average of the actor equals one computed from its whole weights after each step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from actor_average_run import CASES, check
from launched import launch
from matrix_run import small_model

from engine.config.layout import whole_checkpoints
from engine.models.folders import missing_parts
from engine.rlhf import actor_average
from engine.rlhf.actor_average import ActorAverage


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """An OPT: it has biases and norms, which ZeRO-3 keeps gathered, and larger matrices."""
    return small_model("opt", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_one_rank(case, model, group, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    check(case, model, tmp_path)


def test_an_average_on_the_host_is_given_where_the_model_computes(monkeypatch):
    # As if the model were on another device than the host.
    monkeypatch.setattr(actor_average, "device", lambda: torch.device("meta"))
    model = torch.nn.Linear(3, 2)
    average = ActorAverage(SimpleNamespace(module=model), 0.5, on_host=True)
    assert {shard.device.type for shard in average.shards} == {"cpu"}
    with average.values([model.weight]) as (value,):
        assert value.device.type == "meta"
        assert value.shape == (2, 3)


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory) -> Path:
    """The folder in which two ranks left what they ran: starting them takes long."""
    folder = tmp_path_factory.mktemp("two-ranks")
    launch(Path(__file__).with_name("actor_average_worker.py"), folder, model)
    return folder


@pytest.mark.slow
def test_on_two_ranks(two_ranks):
    assert len((two_ranks / "passed").read_text().splitlines()) == len(CASES)


@pytest.mark.slow
def test_ranks_wait_for_one_that_writes_longer_than_a_collective_may_take(two_ranks):
    assert missing_parts(two_ranks / "model") == []
    assert len(list((two_ranks / "model").glob("*.safetensors"))) > 1
    assert [manifest.step for _, manifest in whole_checkpoints(two_ranks)] == [1]
