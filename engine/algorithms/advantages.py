"""Generalised advantage estimation."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each action (Schulman et al. 2015, equation 16).

    The value after the last action is 0. Returns rest on the advantages as they are here, before
    any whitening.

    Args:
        rewards: `(batch, answer)`.
        values: of the state before each action, `(batch, answer)`.
        mask: bool `(batch, answer)`.
        gamma: discount a token.
        gae_lambda: 0 gives the TD error, 1 the discounted return minus the value.

    Returns:
        `(advantages, returns)`, both fp32 `(batch, answer)`, zero outside of the mask.
    """
    rewards = rewards.float().masked_fill(~mask, 0.0)
    values = values.float().masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in range(values.shape[1] - 1, -1, -1):
        td_error = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = td_error + gamma * gae_lambda * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values
