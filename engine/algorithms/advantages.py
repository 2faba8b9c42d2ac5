"""Advantages: of a critic, of the other answers to a prompt, or of returns alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from engine.algorithms.masks import at_least_fp32, masked_std

# Keeps rewards that are all but equal from being blown up; that of TRL.
_STD_EPSILON = 1e-4


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of each action (Schulman et al. 2015, equation 16).

    The value after the last action is 0. Returns use the advantages as they are here, before
    any whitening.

    Args:
        rewards: `(batch, answer)`.
        values: of the state before each action, `(batch, answer)`.
        mask: bool `(batch, answer)`.
        gamma: discount per token.
        gae_lambda: 0 gives the TD error, 1 the discounted return minus the value.

    Returns:
        `(advantages, returns)`, both `(batch, answer)`, fp32 or more, zero outside of the mask.
    """
    rewards = at_least_fp32(rewards).masked_fill(~mask, 0.0)
    values = at_least_fp32(values).masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in range(values.shape[1] - 1, -1, -1):
        td_error = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = td_error + gamma * gae_lambda * next_advantage
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """The sum of this and all later rewards at each action (REINFORCE).

    Args:
        rewards: `(batch, answer)`.
        mask: bool `(batch, answer)`.
        gamma: discount per token.

    Returns:
        `(batch, answer)`, fp32 or more, zero outside of the mask.
    """
    returns, _ = generalized_advantages(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns


@torch.no_grad()
def group_means(rewards: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased standard deviation of each group of answers to one prompt.

    Args:
        rewards: of answers, those to a prompt next to each other, `(batch,)`; NaN counts nowhere.
        size: answers of a group.

    Returns:
        `(means, stds)`, each `(groups,)`; a std is NaN where fewer than two rewards are known, and
        0 where they are equal.
    """
    groups = rewards.view(-1, size)
    count = (~groups.isnan()).sum(dim=1)
    means = groups.nanmean(dim=1)
    # The mean of equal numbers is rounded, and would leave its error as a spread.
    lowest = groups.nan_to_num(torch.inf).amin(dim=1)
    is_flat = lowest >= groups.nan_to_num(-torch.inf).amax(dim=1)
    means = torch.where(is_flat & (count > 0), lowest, means)
    squares = (groups - means.unsqueeze(1)).square().nansum(dim=1)
    stds = (squares / (count - 1).clamp(min=1)).sqrt()
    return means, stds.masked_fill(count < 2, torch.nan)


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    size: int,
    scale: str,
    leave_one_out: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """How much better an answer is than the mean of its group (GRPO, arXiv 2402.03300).

    Args:
        rewards: of answers, those to a prompt next to each other, `(batch,)`; NaN where an answer
            has none.
        size: answers of a group.
        scale: what divides: the standard deviation of the group (`group`), of all rewards of all
            ranks (`batch`, arXiv 2508.08221), or nothing (`none`, arXiv 2503.20783).
        leave_one_out: compare with the mean of the other answers (RLOO, arXiv 2402.14740).
        group: the ranks that share the statistics, for `batch`, which is a collective.

    Returns:
        `(batch,)`, 0 where an answer has no reward or no other one of its group has.
    """
    means, stds = group_means(rewards, size)
    advantages = rewards.view(-1, size) - means.unsqueeze(1)
    if leave_one_out:
        # R minus the mean of the n - 1 others is n / (n - 1) times R minus the mean of all n.
        count = (~rewards.isnan()).view(-1, size).sum(dim=1, keepdim=True)
        advantages = advantages * count / (count - 1)
    if scale == "group":
        advantages = advantages / (stds.unsqueeze(1) + _STD_EPSILON)
    elif scale == "batch":
        advantages = advantages / (masked_std(rewards, ~rewards.isnan(), group) + _STD_EPSILON)
    return advantages.masked_fill(stds.isnan().unsqueeze(1), 0.0).nan_to_num(nan=0.0).flatten()
