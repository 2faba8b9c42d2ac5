"""Values of engine.log.entries for tests, with what a test does not care about filled in."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from engine.log.entries import PPOSpeed, PPOStep

_SPEED = {
    "batch_size": 16,
    "sequence_length": 512,
    "answer_length_limit": 256,
    "tflops": 0.5,
    "generate_tflops": 0.25,
    "train_tflops": 0.75,
}
_STEP = {
    **{"step": 0, "epoch": 0, "ppo_epoch": 1, "total_steps": 100},
    **{"reward": 1.5, "reward_ema": 1.25, "score_mean": 1.5, "score_std": 0.5},
    **{"reward_at_clip_share": 0.0, "kl": 0.125, "kl_coef": 0.1, "entropy": 2.0},
    **{"answer_length": 128.0, "eos_share": 0.75, "empty_answers": 0, "tokens_per_s": 512.0},
    **{"actor_loss": -0.25, "critic_loss": 0.5, "unsupervised_loss": None},
    **{"approx_kl": 0.001, "clip_fraction": 0.125, "value_clip_fraction": 0.25},
    **{"first_ratio_mean": 1.0, "ratio_mean": 1.001, "ratio_max": 1.5, "explained_variance": 0.5},
    **{"actor_gradient_norm": 0.5, "critic_gradient_norm": 1.5},
    **{"actor_learning_rate": 1e-5, "critic_learning_rate": 5e-6},
    **{"e2e_s": 4.0, "generate_s": 2.0, "train_s": 1.0},
}


def ppo_step(**changes: Any) -> PPOStep:
    """A step of PPO with these fields, of its speed too."""
    of_speed = {field.name for field in fields(PPOSpeed)}
    speed = {name: value for name, value in changes.items() if name in of_speed}
    step = {name: value for name, value in changes.items() if name not in of_speed}
    return PPOStep(speed=PPOSpeed(**{**_SPEED, **speed}), **{**_STEP, **step})
