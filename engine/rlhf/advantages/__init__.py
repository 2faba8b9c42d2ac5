"""How advantages are found: one baseline per file, named as in `engine.config.algorithms`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from torch import Tensor

from engine.algorithms.masks import whiten
from engine.config.algorithms import Algorithm
from engine.config.schema import PpoConfig
from engine.rlhf.experience import Experience


def add_targets(
    experience: Experience,
    rewards: Tensor,
    kl_coef: float,
    options: PpoConfig,
    algorithm: Algorithm,
) -> Experience:
    """The experience with advantages, and returns where there is a critic; a collective.

    The file of the baseline has a function `advantages` of the same arguments that returns both,
    `(batch, answer)`; without a critic the second is None.

    Args:
        experience: with the critic's values, where there is one; answers to a prompt stand next
            to each other, all on one rank.
        rewards: of the answers, `(batch,)`; NaN where an answer has none. Such an answer has
            advantage 0 and counts in no mean.
        kl_coef: weight of the KL to the reference that is taken off rewards.
        options: of step 3.
        algorithm: what decides how step 3 learns.
    """
    baseline = import_module(f"engine.rlhf.advantages.{algorithm.baseline}")
    advantages, returns = baseline.advantages(experience, rewards, kl_coef, options, algorithm)
    is_unknown = rewards.isnan().unsqueeze(1)
    advantages = advantages.masked_fill(is_unknown, 0.0)
    if returns is not None:
        returns = returns.where(~is_unknown, experience.values)
    if algorithm.whiten:
        advantages = whiten(advantages, experience.loss_mask & ~is_unknown)
    return replace(experience, advantages=advantages.float(), returns=returns)
