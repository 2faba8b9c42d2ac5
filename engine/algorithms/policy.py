"""The losses of actor and critic (PPO, Schulman et al. 2017, and its successors)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.algorithms.kl import ESTIMATORS, k3
from engine.algorithms.masks import at_least_fp32, masked_moments


@dataclass(frozen=True)
class Objective:
    """What the actor's loss is: a way to compare policies, bounds, a mean, and a KL.

    Attributes:
        ratio: of the new policy to the one that answered: of each token (`token`), of an answer as
            the geometric mean of its tokens' (`sequence_mean`, GSPO, arXiv 2507.18071), or of an
            answer as a whole (`sequence_sum`, RLOO, arXiv 2402.14740).
        surrogate: `clipped`: no gradient where the ratio has gone beyond its bounds; `cispo`: the
            ratio up to its bound is a constant weight of the log-probability (arXiv 2506.13585).
        clip_low: the ratio is held above 1 - clip_low.
        clip_high: the ratio is held below 1 + clip_high.
        clip_delta: bound of the ratio on the side that is not clipped, where an advantage below 0
            meets a large ratio; None: none.
        aggregation: the loss is a mean over all tokens of the global batch (`token`), over each
            answer's tokens and then over answers (`answer`), or a sum over tokens divided by the
            answers and by the most tokens an answer may have (`constant`, arXiv 2503.20783).
        longest_answer: most tokens an answer may have.
        kl_coef: weight of the KL to the reference in the loss; 0: none.
        kl_estimator: k1, k2 or k3.
    """

    ratio: str = "token"
    surrogate: str = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_delta: float | None = None
    aggregation: str = "token"
    longest_answer: int = 1
    kl_coef: float = 0.0
    kl_estimator: str = "k3"

    def normalizer(self, tokens: float, answers: float) -> float:
        """What the loss sums of all micro batches of all ranks are divided by.

        Args:
            tokens: in the mask, of the global batch.
            answers: that have a token in the mask, of the global batch.
        """
        return tokens if self.aggregation == "token" else answers


@dataclass(frozen=True)
class PolicyLoss:
    """Scalars summed over the mask, so that they add up over micro batches and ranks.

    Only `loss_sum` carries a gradient. There is a ratio per token or per answer: `ratio_count` is
    how many there are. `ratio_max` is a maximum: 0 where the mask is empty.
    """

    loss_sum: Tensor
    token_count: Tensor
    answer_count: Tensor
    ratio_count: Tensor
    clipped_low_count: Tensor
    clipped_high_count: Tensor
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
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    objective: Objective,
    ref_log_probs: Tensor | None = None,
) -> PolicyLoss:
    """Loss of the actor, to be divided by the `normalizer` of the whole global batch.

    A ratio counts as clipped where it lies beyond the bound that its advantage pulls it to, so
    that there is no gradient. The approximate KL is k3 from the old policy to the new.

    Args:
        log_probs: under the weights being trained, `(batch, answer)`.
        old_log_probs: under the weights that sampled, `(batch, answer)`.
        advantages: `(batch, answer)`.
        mask: bool `(batch, answer)`; an answer may be empty, and then counts nowhere.
        objective: what the loss is.
        ref_log_probs: under the reference, `(batch, answer)`; for a KL in the loss.
    """
    new = _zero_outside(mask, log_probs)
    old, advantage = (_zero_outside(mask, x).detach() for x in (old_log_probs, advantages))
    lengths = mask.sum(dim=1, keepdim=True)
    ratio = torch.exp(_log_ratio(new - old, lengths, objective.ratio))
    low, high = 1.0 - objective.clip_low, 1.0 + objective.clip_high
    if objective.surrogate == "cispo":
        per_token = -ratio.detach().clamp(max=high) * advantage * new
    else:
        bounded = ratio if objective.clip_delta is None else ratio.clamp(max=objective.clip_delta)
        per_token = torch.maximum(-advantage * bounded, -advantage * ratio.clamp(low, high))
    if objective.kl_coef:
        if ref_log_probs is None:
            raise ValueError("A KL in the loss needs the log-probabilities of the reference.")
        kl = ESTIMATORS[objective.kl_estimator](new, _zero_outside(mask, ref_log_probs).detach())
        per_token = per_token + objective.kl_coef * kl
    with torch.no_grad():
        approx_kl_sum = k3(old, new).sum()
        # The answer's tokens share their advantage where they share the ratio.
        is_counted = mask if ratio.shape == mask.shape else mask[:, :1]
        signs = advantage[:, : is_counted.shape[1]]
        masked_ratio = ratio.masked_fill(~is_counted, 0.0)
        clipped_low = (ratio < low) & (signs < 0)
        clipped_high = (ratio > high) & (signs > 0)
    return PolicyLoss(
        loss_sum=_summed(per_token, lengths, objective),
        token_count=lengths.sum(),
        answer_count=(lengths > 0).sum(),
        ratio_count=is_counted.sum(),
        clipped_low_count=clipped_low.sum(),
        clipped_high_count=clipped_high.sum(),
        ratio_sum=masked_ratio.sum(),
        ratio_max=masked_ratio.max(),
        approx_kl_sum=approx_kl_sum,
    )


def _log_ratio(differences: Tensor, lengths: Tensor, ratio: str) -> Tensor:
    """Log-ratios `(batch, answer)`, or `(batch, 1)` where an answer has but one."""
    if ratio == "token":
        return differences
    total = differences.sum(dim=1, keepdim=True)
    return total if ratio == "sequence_sum" else total / lengths.clamp(min=1)


def _summed(per_token: Tensor, lengths: Tensor, objective: Objective) -> Tensor:
    """The sum over a micro batch that `Objective.normalizer` makes a mean."""
    if objective.aggregation == "token":
        return per_token.sum()
    if objective.aggregation == "constant":
        return per_token.sum() / objective.longest_answer
    return (per_token.sum(dim=1, keepdim=True) / lengths.clamp(min=1)).sum()


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
    """The values in fp32 or more, 0 outside of the mask, where both losses are then 0 as well.

    `masked_select` would make the host wait for the device, which alone knows how many are chosen.
    """
    return at_least_fp32(values).masked_fill(~mask, 0.0)


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
