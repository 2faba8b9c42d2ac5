"""The clipped losses of actor and critic (Schulman et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.algorithms.kl import k3
from engine.algorithms.masks import masked_moments


@dataclass(frozen=True)
class PolicyLoss:
    """Scalars summed over the mask, so that they add up over micro batches and ranks.

    Only `loss_sum` carries a gradient. `ratio_max` is a maximum: 0 where the mask is empty.
    """

    loss_sum: Tensor
    token_count: Tensor
    clipped_count: Tensor
    ratio_sum: Tensor
    ratio_max: Tensor
    approx_kl_sum: Tensor


@dataclass(frozen=True)
class ValueLoss:
    """Scalars summed over the mask; only `loss_sum` carries a gradient."""

    loss_sum: Tensor
    token_count: Tensor
    clipped_count: Tensor


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip: float
) -> PolicyLoss:
    """Clipped surrogate loss of the actor, to be divided by the global token count.

    A token counts as clipped where the clipped term is the larger loss, so that it has no
    gradient. The approximate KL is k3 from the old policy to the new.

    Args:
        log_probs: under the weights being trained, `(batch, answer)`.
        old_log_probs: under the weights that sampled, `(batch, answer)`.
        advantages: `(batch, answer)`.
        mask: bool `(batch, answer)`.
        clip: the ratio is held within 1 - clip and 1 + clip.
    """
    new = _zero_outside(mask, log_probs)
    old, advantage = (_zero_outside(mask, x).detach() for x in (old_log_probs, advantages))
    ratio = torch.exp(new - old)
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip, 1.0 + clip)
    with torch.no_grad():
        masked_ratio = ratio.masked_fill(~mask, 0.0)
        approx_kl_sum = k3(old, new).sum()
    return PolicyLoss(
        loss_sum=torch.maximum(unclipped, clipped).sum(),
        token_count=mask.sum(),
        clipped_count=(clipped > unclipped).sum(),
        ratio_sum=masked_ratio.sum(),
        ratio_max=masked_ratio.max(),
        approx_kl_sum=approx_kl_sum,
    )


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> ValueLoss:
    """Half the larger squared error of the value and the clipped value, summed over the mask.

    Args:
        values: of the critic being trained, `(batch, answer)`.
        old_values: of the critic at the rollout, `(batch, answer)`.
        returns: `(batch, answer)`.
        mask: bool `(batch, answer)`.
        clip: the clipped value lies within this distance of the old one.
    """
    new = _zero_outside(mask, values)
    old, target = (_zero_outside(mask, x).detach() for x in (old_values, returns))
    near_old = old + (new - old).clamp(-clip, clip)
    unclipped = (new - target).square()
    clipped = (near_old - target).square()
    return ValueLoss(
        loss_sum=0.5 * torch.maximum(unclipped, clipped).sum(),
        token_count=mask.sum(),
        clipped_count=(clipped > unclipped).sum(),
    )


def _zero_outside(mask: Tensor, values: Tensor) -> Tensor:
    """The values in fp32, 0 outside of the mask, where both losses are then 0 as well.

    `masked_select` would make the host wait for the device, which alone knows how many are chosen.
    """
    return values.float().masked_fill(~mask, 0.0)


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Share of the returns' variance that the values explain, of all ranks together.

    1 is a perfect critic, 0 one that knows no more than the mean, below 0 a worse one. Equal
    returns have nothing to explain and give 0. A collective like `masked_moments`.

    Args:
        values: at the rollout, `(batch, answer)`.
        returns: `(batch, answer)`.
        mask: bool `(batch, answer)`.
        group: the ranks that share the statistics.

    Returns:
        fp64 scalar.
    """
    _, unexplained = masked_moments(returns.float() - values.float(), mask, group)
    _, total = masked_moments(returns, mask, group)
    return torch.where(total > 0, 1.0 - unexplained / total, 0.0)
