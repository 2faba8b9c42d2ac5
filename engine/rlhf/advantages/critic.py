"""PPO's advantages: the critic is the baseline (generalised advantage estimation)."""

from __future__ import annotations

from torch import Tensor

from engine.algorithms.advantages import generalized_advantages
from engine.algorithms.rewards import token_rewards
from engine.config.algorithms import Algorithm
from engine.config.schema import PpoConfig
from engine.rlhf.experience import Experience


def advantages(
    experience: Experience,
    rewards: Tensor,
    kl_coef: float,
    options: PpoConfig,
    algorithm: Algorithm,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns; the KL is taken off token by token. See `add_targets`."""
    assert experience.values is not None
    per_token = token_rewards(
        rewards.nan_to_num(0.0),
        experience.log_probs,
        experience.ref_log_probs,
        experience.mask,
        kl_coef,
        algorithm.kl_estimator,
    )
    return generalized_advantages(
        per_token, experience.values, experience.mask, options.gamma, options.gae_lambda
    )
