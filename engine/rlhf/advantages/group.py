"""The mean of a prompt's answers is the baseline (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from torch import Tensor

from engine.algorithms.advantages import group_advantages
from engine.algorithms.kl import ESTIMATORS
from engine.config.algorithms import Algorithm
from engine.config.schema import PpoConfig
from engine.rlhf.experience import Experience


def advantages(
    experience: Experience,
    rewards: Tensor,
    kl_coef: float,
    options: PpoConfig,
    algorithm: Algorithm,
    leave_one_out: bool = False,
) -> tuple[Tensor, None]:
    """One advantage for all tokens of an answer; its whole KL is taken off. See `add_targets`."""
    if kl_coef:
        estimate = ESTIMATORS[algorithm.kl_estimator]
        kl = estimate(experience.log_probs, experience.ref_log_probs) * experience.mask
        rewards = rewards - kl_coef * kl.sum(dim=1)
    found = group_advantages(
        rewards.double(), algorithm.answers_per_prompt, algorithm.scale, leave_one_out
    )
    return found.unsqueeze(1) * experience.mask, None
