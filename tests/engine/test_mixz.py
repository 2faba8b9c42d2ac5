"""MixZ: frozen weights kept as int8 between uses, on one rank and on two."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from launched import launch
from mixz_run import STEPS, large_model, losses, ppo, sft, share_of_bf16
from small_run import configuration

from engine.config.deepspeed import role_layout
from engine.config.rules import check
from engine.models.folders import is_complete_model
from engine.models.load import load_causal_lm
from engine.models.quantization import TorchQuantizer, install_quantizer, quantize_frozen


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return large_model(tmp_path_factory.mktemp("large"))


@pytest.fixture(autouse=True)
def local_rank(monkeypatch):
    """DeepSpeed looks for it whenever an engine is built."""
    monkeypatch.setenv("LOCAL_RANK", "0")


def test_quantised_values_are_within_half_a_step_of_their_block():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64 * 96, generator=generator) * torch.logspace(-3, 2, 64).repeat(96)
    values[:96] = 0
    integers, scales = TorchQuantizer.quantize(values, 64, 8, TorchQuantizer.Symmetric)
    assert integers.dtype == torch.int8
    assert scales.shape == (64,)
    back = TorchQuantizer.dequantize(integers, scales, 64, 8, TorchQuantizer.Symmetric)
    error = (back.float() - values).abs().reshape(64, -1)
    largest = values.abs().reshape(64, -1).amax(dim=1, keepdim=True)
    # Half a step of 127, and the rounding of the result to fp16.
    assert bool((error <= largest * (0.5 / 127 + 2**-11)).all())
    assert not back[:96].any()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_frozen_weights_take_half_and_losses_stay(
    dtype, model, group, tmp_path, monkeypatch, capfd
):
    # torch computes in fp16 on any CPU; DeepSpeed refuses where there are no instructions for it.
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    results = {}
    for name, enabled in (("off", "false"), ("on", "true")):
        run = tmp_path / name
        trainer = sft(model, run, f"dtype={dtype}", f"mixz.enabled={enabled}")
        assert trainer.train()
        results[name] = share_of_bf16(trainer.engine.module), losses(run)
    assert results["off"][0] == 1
    assert results["on"][0] <= 0.6
    assert results["on"][1] == pytest.approx(results["off"][1], rel=0.02)
    # Weights that lost some digits are not the same weights.
    assert results["on"][1] != results["off"][1]
    assert "MixZ: frozen weights" in capfd.readouterr().out
    trainer.save()
    saved = load_causal_lm(str(run / "step1-sft/model"), torch.float32).state_dict()
    first = load_causal_lm(model, torch.float32).state_dict()
    for tensor in ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"):
        apart = (saved[tensor] - first[tensor]).abs().max()
        assert 0 < apart < 0.02 * first[tensor].abs().max() + 1e-3


@pytest.mark.slow
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(model, group, tmp_path):
    run = tmp_path / "run"
    options = ("dtype=bf16", "mixz.enabled=true", "checkpoint.interval=2")
    assert sft(model, run, *options).train()
    whole = losses(run)
    shutil.rmtree(run / f"step1-sft/checkpoints/step-{STEPS:08d}")
    resumed = sft(model, run, *options)
    assert resumed.train()
    assert losses(run) == whole
    assert share_of_bf16(resumed.engine.module) <= 0.6


@pytest.mark.slow
@pytest.mark.parametrize("hybrid", ["true", "false"])
def test_step_3_generates_trains_and_saves_with_it(hybrid, model, group, tmp_path):
    options = ("dtype=bf16", "mixz.enabled=true", f"hybrid_engine.enabled={hybrid}")
    trainer = ppo(model, tmp_path, *options)
    assert trainer.engine.ref is None
    assert trainer.train()
    assert trainer.rollouts.hybrid.off_reason is None
    assert share_of_bf16(trainer.engine.actor.module) <= 0.6
    trainer.save()
    assert is_complete_model(tmp_path / "step3-rlhf/actor")
    rows = [
        json.loads(line)
        for line in (tmp_path / "step3-rlhf/metrics.jsonl").read_text().splitlines()
    ]
    assert all(isinstance(row["actor_loss"], float) for row in rows)
    assert rows[0]["kl"] == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_two_ranks_hold_half_and_learn_alike(model, tmp_path):
    launch(Path(__file__).with_name("mixz_worker.py"), tmp_path, model)
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results) == {"bf16", "fp16"}
    for dtype, found in results.items():
        assert found["share off"] == 1
        assert found["share on"] <= 0.6
        assert found["share ppo"] <= 0.6
        assert found["off_reason"] is None
        off, on, gather = found["losses"]
        for quantised in (on, gather):
            assert quantised == pytest.approx(off, rel=0.02)
            assert quantised != off
        # Only the traffic is quantised here.
        assert found["share gather"] == 1
        assert is_complete_model(tmp_path / dtype / "on/step1-sft/model")
        assert is_complete_model(tmp_path / dtype / "on/step3-rlhf/actor")


def test_a_model_too_small_for_it_is_told(group):
    install_quantizer()
    layer = torch.nn.Linear(4, 4).requires_grad_(False)
    for parameter in layer.parameters():
        parameter.ds_numel, parameter.ds_tensor = parameter.numel(), parameter.data.flatten()
    with pytest.raises(ValueError, match=r"mixz\.enabled=false"):
        quantize_frozen(layer)


def test_the_secondary_partition_follows_the_topology():
    mixz = ("actor.zero_stage=3", "actor.lora.rank=4", "actor.lora.only=true", "mixz.enabled=true")
    nodes = ("launch.deployment=multi_node", "launch.hostfile=hosts", "launch.num_accelerators=4")
    sizes = [
        role_layout(configuration(*mixz, *where), "actor")["zero_options"]
        for where in ((), ("launch.deployment=single_node", "launch.num_accelerators=4"), nodes)
    ]
    assert [options["zero_hpz_partition_size"] for options in sizes] == [1, 1, 4]
    assert check(configuration(*mixz, *nodes, "mixz.hpz_partition_size=4")) == []
    for wrong in (
        (*mixz, "mixz.hpz_partition_size=4"),
        (*mixz, *nodes, "mixz.hpz_partition_size=2"),
    ):
        assert [v.id for v in check(configuration(*wrong))] == ["hpz-partition-size"]
