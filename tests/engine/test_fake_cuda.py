"""The whole of each step, evaluation and the chat on a CUDA device that is not there."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_cases import FEATURES, TRAINERS, build_models, chat, configured, feature, mixz, resumes
from fake_cuda import WrongDevice, fake_cuda
from resumed import records
from small_run import configuration

from engine.config.loading import to_yaml
from engine.config.placement import Placement
from engine.evaluation import evaluate, score_pairs
from engine.trainers.context import StepContext


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, str]:
    return build_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def local_rank(monkeypatch):
    """DeepSpeed looks for it whenever an engine is built."""
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FEATURES))
def test_a_step_trains_and_saves_on_the_device(name, models, group, tmp_path):
    with fake_cuda():
        feature(FEATURES[name], models, tmp_path)


@pytest.mark.parametrize("step", ["sft", "ppo"])
def test_it_computes_what_the_cpu_computes(step, models, group, tmp_path):
    """No value is lost on the way: what a stray copy or an empty tensor would change."""
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "the sun is hot and the sea is wet. "}\n' * 200)
    config = configured(
        models["llama"], "hybrid_engine.enabled=true", f"data.unsupervised_sources={text}"
    )
    TRAINERS[step](StepContext.create(config, tmp_path / "cpu", step)).train()
    with fake_cuda():
        TRAINERS[step](StepContext.create(config, tmp_path / "cuda", step)).train()
    plain, faked = (records(tmp_path / device, step) for device in ("cpu", "cuda"))
    assert len(plain) == len(faked) > 1
    for expected, found in zip(plain, faked, strict=True):
        assert found.pop("kind") == expected.pop("kind")
        assert found == pytest.approx(expected, rel=2e-3, abs=2e-4)


@pytest.mark.slow
def test_a_step_resumes_on_the_device(models, group, tmp_path):
    with fake_cuda():
        resumes("ppo", models, tmp_path, "dtype=bf16")


@pytest.mark.slow
def test_quantised_weights_lie_on_the_device(models, group, tmp_path):
    with fake_cuda():
        mixz("ppo", models, tmp_path)


def test_evaluation_on_the_device(run, group, tmp_path):
    (run / "run.yaml").write_text(to_yaml(configuration()))
    data = tmp_path / "pairs.jsonl"
    data.write_text(json.dumps({"prompt": "a?", "chosen": "b", "rejected": "c"}) + "\n")
    with fake_cuda():
        results = evaluate(run)
        scored = score_pairs(run, data)
    assert results["models"]["sft"]["perplexity"] > 1
    assert results["reward_model"]["pairs"] > 0
    assert scored["pairs"] == 1


@pytest.mark.parametrize("placement", [Placement(), Placement(offload="cpu", offload_cache=True)])
def test_the_chat_on_the_device(placement, models, group, tmp_path):
    with fake_cuda():
        chat(placement, models, tmp_path)


def test_a_batch_left_on_the_host_is_noticed(models, group, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.trainers.sft.device", lambda: torch.device("cpu"))
    with fake_cuda():
        trainer = TRAINERS["sft"](StepContext.create(configured(models["llama"]), tmp_path, "sft"))
        with pytest.raises(WrongDevice, match="both cuda:0 and cpu"):
            trainer.train()


def _there(*shape: int, **kwargs: Any) -> torch.Tensor:
    return torch.ones(*shape, device="cuda", **kwargs)


REFUSED = {
    "an operation on both": lambda: _there(3) + torch.ones(3),
    "a list of both": lambda: torch.cat((_there(3), torch.ones(3))),
    "a row's number on the host": lambda: torch.stack((_there(()), torch.tensor(1.0))),
    "a mask of the host": lambda: _there(3).masked_fill(torch.ones(3, dtype=torch.bool), 0.0),
    "a gradient's other operand": lambda: (_there(3) * torch.ones(3)).sum().backward(),
    "a collective": lambda: dist.all_reduce(torch.ones(3)),
    "the host's generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    "the device's generator": lambda: torch.rand(3, generator=torch.Generator("cuda")),
    "a state on the device": lambda: torch.Generator("cuda").set_state(
        torch.Generator("cuda").get_state().to("cuda")
    ),
    "a kernel of the CPU": lambda: torch.ops.mkldnn._linear_pointwise(
        _there(2, 2), _there(2, 2), None, "none", [], ""
    ),
    "numpy": lambda: _there(3).numpy(),
    "two dtypes": lambda: _there(2, 2) @ _there(2, 2, dtype=torch.bfloat16),
}
ALLOWED = {
    "a number": lambda: _there(3) * torch.tensor(2.0),
    "indices of the host": lambda: _there(3)[torch.tensor([0])],
    "a copy": lambda: _there(3).copy_(torch.ones(3)),
    "a move": lambda: _there(3) + torch.ones(3).to("cuda"),
    "a way back": lambda: torch.ones(3) + _there(3).cpu(),
    "a view": lambda: torch.ones(3) + _there(3, 3)[1].cpu(),
    "a collective": lambda: dist.all_reduce(_there(3)),
    "its generator": lambda: torch.rand(3, device="cuda", generator=torch.Generator("cuda")),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_the_fake_refuses_what_cuda_refuses(what, group):
    with fake_cuda(), pytest.raises((RuntimeError, TypeError)):
        REFUSED[what]()


@pytest.mark.parametrize("what", list(ALLOWED))
def test_the_fake_allows_what_cuda_allows(what, group):
    with fake_cuda():
        ALLOWED[what]()


def test_nothing_of_it_is_left(group):
    before = torch.tensor, torch.Generator, torch.Tensor.to, torch.Tensor.device
    with fake_cuda():
        assert _there(1).device == torch.device("cuda:0")
        assert not torch.ones(1).is_cuda
    assert before == (torch.tensor, torch.Generator, torch.Tensor.to, torch.Tensor.device)
    assert not torch.cuda.is_available()
