"""Without a baseline: an action's advantage is the return from there on (REINFORCE)."""

from __future__ import annotations

from torch import Tensor

from engine.algorithms.advantages import discounted_returns
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
) -> tuple[Tensor, None]:
    """Returns of rewards with the KL taken off token by token. See `add_targets`."""
    per_token = token_rewards(
        rewards.nan_to_num(0.0),
        experience.log_probs,
        experience.ref_log_probs,
        experience.mask,
        kl_coef,
        algorithm.kl_estimator,
    )
    return discounted_returns(per_token, experience.mask, options.gamma), None
