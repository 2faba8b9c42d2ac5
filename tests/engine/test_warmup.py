"""Warm-ups that outlast training, or do nothing, are told with the numbers."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from matrix_run import small_model, step_3
from small_run import configuration
from transformers import get_scheduler

from engine.config.schema import PpoConfig, Scheduler, SftConfig
from engine.config.warmup import warmup_problem
from engine.trainers.context import StepContext
from engine.trainers.sft import SFTTrainer


def highest_rate(scheduler: str, warmup: int, steps: int) -> float:
    """The share of its learning rate that an optimizer gets to in so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = get_scheduler(
        scheduler, optimizer, num_warmup_steps=warmup, num_training_steps=steps
    )
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps - 1):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return max(rates)


@pytest.mark.parametrize("scheduler", ["linear", "cosine", "polynomial", "constant_with_warmup"])
@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 1), (1, 1), (1, 2), (19, 20), (20, 20), (21, 20), (100, 20), (9, 4)]
)
def test_a_rate_that_is_never_reached_is_told_as_it_will_be(scheduler, warmup, steps):
    options = SftConfig(scheduler=scheduler, warmup_steps=warmup)
    problem = warmup_problem("sft", options, steps)
    reached = highest_rate(scheduler, warmup, steps)
    if reached == 1:
        assert problem is None
    else:
        assert f"sft.warmup_steps={warmup}, but training has only {steps} opt" in problem
        assert f"rises to {reached:.0%} of its value" in problem


def test_the_updates_of_ppo_are_counted():
    options = PpoConfig(
        warmup_steps=100, inner_epochs=2, rollout_batch_size=64, batch_size=32, scheduler="linear"
    )
    assert warmup_problem("ppo", options, 26) is None
    problem = warmup_problem("ppo", options, 20)
    assert "ppo.warmup_steps=100, but training has only 80 optimizer steps" in problem
    assert "(20 steps of 4 updates)" in problem
    assert "79%" in problem


def test_a_schedule_without_warm_up_says_that_it_has_none():
    problem = warmup_problem("dpo", SftConfig(scheduler="constant", warmup_steps=5), None)
    assert "dpo.warmup_steps=5 does nothing with dpo.scheduler=constant" in problem
    assert highest_rate("constant", 5, 1) == 1
    assert warmup_problem("dpo", SftConfig(scheduler="constant"), None) is None
    assert warmup_problem("dpo", SftConfig(warmup_steps=5), None) is None


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("scheduler", get_args(Scheduler))
def test_a_warm_up_as_long_as_training_does_not_end_it(scheduler, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    changes = ("ppo.max_steps=2", "ppo.warmup_steps=2", f"ppo.scheduler={scheduler}")
    assert step_3(small_model("llama", tmp_path / "model"), tmp_path, *changes).train()


@pytest.mark.usefixtures("group")
def test_steps_warn_at_their_start_by_their_real_schedule(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("LOCAL_RANK", "0")
    config = configuration("sft.warmup_steps=100", "sft.max_steps=7")
    SFTTrainer(StepContext.create(config, tmp_path, "sft"))
    expected = "Warning => sft.warmup_steps=100, but training has only 7 optimizer steps: "
    assert expected in capfd.readouterr().out

    model = small_model("llama", tmp_path / "model")
    changes = ("ppo.scheduler=linear", "ppo.inner_epochs=3", "ppo.max_steps=2")
    trainer = step_3(model, tmp_path, *changes, "ppo.warmup_steps=9")
    assert "6 optimizer steps (2 steps of 3 updates)" in capfd.readouterr().out
    trainer.train()
    assert trainer.engine.actor.global_steps == 6
    step_3(model, tmp_path, *changes, "ppo.warmup_steps=5")
    assert "warmup" not in capfd.readouterr().out
