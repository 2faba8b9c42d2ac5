"""Divergence ends a step with its checkpoints kept; doubtful trends are told once."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from small_run import configuration

from engine.trainers.context import StepContext
from engine.trainers.sft import SFTTrainer
from engine.trainers.watchdog import Watchdog

GOOD = {
    "answer_length": 12.0,
    "kl": 1.0,
    "reward_at_clip_share": 0.0,
    "reward_ema": 0.0,
    "score_std": 1.0,
}


class Warnings(list):
    """Stands where a report does, and keeps what it is told."""

    warning = list.append


def engine(applied: bool = True, fp16: bool = False, scale: float = 2.0):
    return SimpleNamespace(
        was_step_applied=lambda: applied,
        fp16_enabled=lambda: fp16,
        optimizer=SimpleNamespace(loss_scale=scale),
    )


@pytest.mark.usefixtures("group")
def test_a_learning_rate_that_diverges_ends_the_step_and_keeps_the_checkpoint(tmp_path):
    config = configuration("sft.learning_rate=1e30", "sft.max_steps=8", "checkpoint.interval=1")
    trainer = SFTTrainer(StepContext.create(config, tmp_path, "sft"))
    with pytest.raises(FloatingPointError, match="lower the learning rate"):
        trainer.train()
    kept = trainer.checkpoints.whole()
    assert kept
    assert kept[-1][1].step < 8


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_ends_the_step(bad):
    dog = Watchdog(Warnings(), {"actor": engine()})
    dog.check(3, {"loss": 1.0, "gradient_norm": 2.0})
    with pytest.raises(FloatingPointError, match=f"gradient_norm is {bad} at step 4"):
        dog.check(4, {"loss": 1.0, "gradient_norm": bad})


def test_a_skipped_fp16_step_may_have_no_gradient_norm():
    dog = Watchdog(Warnings(), {"actor": engine(applied=False, fp16=True, scale=1024.0)})
    for step in range(10):
        dog.check(step, {"loss": 1.0, "actor_gradient_norm": math.inf})


def test_a_loss_scale_that_stays_at_its_floor_ends_the_step():
    dog = Watchdog(Warnings(), {"critic": engine(applied=False, fp16=True, scale=1.0)})
    dog.check(0, {"loss": 1.0})
    dog.check(1, {"loss": 1.0})
    with pytest.raises(FloatingPointError, match="loss scale of the critic"):
        dog.check(2, {"loss": 1.0})


@pytest.mark.parametrize(
    ("change", "steps", "told"),
    [
        ({"answer_length": 2.0}, 5, "answers have 2.0 tokens"),
        ({"kl": 30.0}, 1, "the KL is 30.0"),
        ({"reward_at_clip_share": 0.9}, 5, "90% of the scores"),
        ({}, 30, "it is flat"),
    ],
)
def test_a_doubtful_trend_is_told_once_and_not_before_its_time(change, steps, told):
    warnings = Warnings()
    dog = Watchdog(warnings, {})
    for _ in range(steps - 1):
        dog.watch_rollouts({**GOOD, **change})
    assert not warnings
    dog.watch_rollouts({**GOOD, **change})
    assert len(warnings) == 1
    assert told in warnings[0]
    dog.watch_rollouts({**GOOD, **change})
    assert len(warnings) == 1


def test_a_reward_that_moves_is_not_flat():
    warnings = Warnings()
    dog = Watchdog(warnings, {})
    for step in range(60):
        dog.watch_rollouts({**GOOD, "reward_ema": step / 100})
    assert not warnings
