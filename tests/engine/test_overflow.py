"""fp16: if actor or critic overflows, both skip the step (`ppo.align_overflow`)."""

from __future__ import annotations

import math

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from matrix_run import small_model, step_3
from small_run import configuration

from engine.config.rules import check
from engine.rlhf import trainer as ppo
from engine.rlhf.trainer import PPOTrainer, UpdateStats


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return small_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def fp16(monkeypatch):
    """Let DeepSpeed try fp16 on a CPU without instructions for it: slow, but torch can."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


def scaler(engine):
    return getattr(engine.optimizer, "loss_scaler", None) or engine.optimizer.loss_scale_config


def trained_weights(engine) -> torch.Tensor:
    parts = [getattr(p, "ds_tensor", p.data) for p in engine.module.parameters()]
    return torch.cat([part.detach().flatten().clone() for part in parts])


def update(trainer: PPOTrainer) -> UpdateStats:
    batches = trainer.prompt_batches(trainer.batches.epoch(0)[0])
    experience = trainer.add_targets(trainer.generate_experience(batches)[0])
    stats = UpdateStats()
    trainer.update(experience, next(trainer.minibatches(experience)), stats)
    return stats


@pytest.mark.parametrize(
    ("stage", "offload"),
    [("0 fused", "false"), (0, "false"), (1, "false"), (2, "false"), (2, "true"), (3, "true")],
)
@pytest.mark.parametrize("who", ["actor", "critic"])
def test_both_skip_when_one_overflows(
    who, stage, offload, model, group, tmp_path, monkeypatch, capfd
):
    if stage == "0 fused":
        stage = 0
        # DeepSpeed wraps this class differently at stage 0; its own needs a compiler to be made.
        monkeypatch.setattr("deepspeed.runtime.engine.FusedAdam", torch.optim.AdamW)
    trainer = step_3(
        model,
        tmp_path,
        "dtype=fp16",
        "ppo.align_overflow=true",
        "ppo.micro_batch_size=2",
        *(f"{role}.zero_stage={stage}" for role in ("actor", "critic")),
        *(f"{role}.offload={offload}" for role in ("actor", "critic")),
    )
    engines = {"actor": trainer.engine.actor, "critic": trainer.engine.critic}
    other = "critic" if who == "actor" else "actor"
    for engine in engines.values():
        scaler(engine).cur_scale = 64.0
        scaler(engine).cur_hysteresis = 1
    before = {name: trained_weights(engine) for name, engine in engines.items()}
    backward = ppo.backward

    def overflowing(engine, loss_sum, total):
        backward(engine, loss_sum * (1e30 if engine is engines[who] else 1.0), total)

    monkeypatch.setattr(ppo, "backward", overflowing)
    update(trainer)
    for name, engine in engines.items():
        assert engine.skipped_steps == 1
        assert not engine.was_step_applied()
        assert torch.equal(trained_weights(engine), before[name])
    assert scaler(engines[who]).cur_scale < 64
    assert scaler(engines[other]).cur_scale == 64
    assert (
        f"OVERFLOW: {who} overflow, skipping both actor and critic steps" in capfd.readouterr().out
    )

    monkeypatch.setattr(ppo, "backward", backward)
    stats = update(trainer)
    for name, engine in engines.items():
        assert engine.skipped_steps == 1
        assert engine.was_step_applied()
        assert not torch.equal(trained_weights(engine), before[name])
    assert math.isfinite(stats.actor_gradient_norm)
    assert "OVERFLOW" not in capfd.readouterr().out


def test_without_it_each_skips_for_itself(model, group, tmp_path, monkeypatch):
    trainer = step_3(model, tmp_path, "dtype=fp16", "actor.zero_stage=2", "critic.zero_stage=2")
    actor, critic = trainer.engine.actor, trainer.engine.critic
    scaler(critic).cur_scale = 64.0
    backward = ppo.backward
    monkeypatch.setattr(
        ppo, "backward", lambda e, loss, n: backward(e, loss * (1e30 if e is actor else 1), n)
    )
    update(trainer)
    assert (actor.skipped_steps, critic.skipped_steps) == (1, 0)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "auto"])
def test_formats_without_a_loss_scale_refuse_it(dtype):
    (violation,) = check(configuration("ppo.align_overflow=true", f"dtype={dtype}"))
    assert violation.id == "align-overflow-needs-fp16"
    assert check(configuration("ppo.align_overflow=true", "dtype=fp16")) == []
