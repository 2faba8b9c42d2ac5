"""The mean of the other answers to a prompt is the baseline (RLOO, arXiv 2402.14740)."""

from __future__ import annotations

from torch import Tensor

from engine.config.algorithms import Algorithm
from engine.config.schema import PpoConfig
from engine.rlhf.advantages import group
from engine.rlhf.experience import Experience


def advantages(
    experience: Experience,
    rewards: Tensor,
    kl_coef: float,
    options: PpoConfig,
    algorithm: Algorithm,
) -> tuple[Tensor, None]:
    """As of `group`, with the mean of the others in place of the mean of all."""
    return group.advantages(experience, rewards, kl_coef, options, algorithm, leave_one_out=True)
