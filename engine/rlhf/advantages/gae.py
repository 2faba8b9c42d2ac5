"""PPO's advantages: the critic is the baseline (generalised advantage estimation)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engine.algorithms.advantages import generalized_advantages
from engine.algorithms.masks import whiten
from engine.algorithms.rewards import token_rewards
from engine.config.schema import PpoConfig
from engine.rlhf.experience import Experience


def add_targets(
    experience: Experience, rewards: Tensor, kl_coef: float, options: PpoConfig
) -> Experience:
    """The experience with advantages and returns; a collective of all ranks.

    Args:
        experience: with the critic's values.
        rewards: of the answers, `(batch,)`; the KL to the reference is taken off token by token.
        kl_coef: weight of that KL.
        options: of step 3.
    """
    assert experience.values is not None
    per_token = token_rewards(
        rewards, experience.log_probs, experience.ref_log_probs, experience.mask, kl_coef
    )
    advantages, returns = generalized_advantages(
        per_token, experience.values, experience.mask, options.gamma, options.gae_lambda
    )
    if options.whiten_advantages:
        advantages = whiten(advantages, experience.mask)
    return replace(experience, advantages=advantages, returns=returns)
