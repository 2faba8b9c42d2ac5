"""From the reward model's score of an answer to a reward at each of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.kl import ESTIMATORS
from engine.algorithms.masks import at_least_fp32


def shape_scores(
    scores: Tensor,
    ended_with_eos: Tensor,
    mean: float | None = None,
    std: float | None = None,
    missing_eos_penalty: float | None = None,
    clip: float | None = None,
) -> Tensor:
    """Normalise scores, take the penalty off those without EOS, then clip: in this order.

    Args:
        scores: of the reward model, `(batch,)`.
        ended_with_eos: bool `(batch,)`.
        mean: taken off each score.
        std: divides each score, after the mean.
        missing_eos_penalty: taken off scores of answers without EOS, on the normalised scale.
        clip: bounds the result to [-clip, clip].

    Returns:
        fp32 `(batch,)`.

    Raises:
        ValueError: std is not above 0.
    """
    shaped = scores.float()
    if mean is not None:
        shaped = shaped - mean
    if std is not None:
        if std <= 0:
            raise ValueError(f"Scores cannot be divided by a std of {std}; leave it unset.")
        shaped = shaped / std
    if missing_eos_penalty is not None:
        shaped = torch.where(ended_with_eos, shaped, shaped - missing_eos_penalty)
    if clip is not None:
        shaped = shaped.clamp(-clip, clip)
    return shaped


def token_rewards(
    scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    kl_coef: float,
    kl_estimator: str = "k1",
) -> Tensor:
    """Reward of each action: minus the weighted KL, and the score at the last action.

    Args:
        scores: already shaped, `(batch,)`.
        log_probs: of the sampled tokens under the actor, `(batch, answer)`.
        ref_log_probs: under the reference, `(batch, answer)`.
        mask: bool `(batch, answer)`.
        kl_coef: weight of the KL.
        kl_estimator: k1, k2 or k3.

    Returns:
        `(batch, answer)`, fp32 or more, zero outside of the mask; a row with an empty mask gets no
        score.
    """
    lengths = mask.sum(dim=1, keepdim=True)
    positions = torch.arange(mask.shape[1], device=mask.device)
    is_last = positions == lengths - 1
    rewards = -kl_coef * ESTIMATORS[kl_estimator](log_probs, ref_log_probs)
    rewards = rewards + torch.where(is_last, at_least_fp32(scores).unsqueeze(1), 0.0)
    return rewards.masked_fill(~mask, 0.0)


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """The total reward of each answer: the weighted sum of what could be said of it.

    Args:
        rewards: `(batch, sources)`; NaN where a source cannot say.
        weights: of the sources, `(sources,)`.

    Returns:
        `(batch,)`, fp32 or more; NaN where no source could say anything.
    """
    values = at_least_fp32(rewards)
    total = (values * weights.to(values)).nansum(dim=1)
    return total.masked_fill(values.isnan().all(dim=1), torch.nan)


def overlong_penalty(lengths: Tensor, longest: int, buffer: float) -> Tensor:
    """What a too long answer loses: 0 up to the buffer, then more and more, at the limit 1.

    Source: DAPO (arXiv 2503.14476), equation 13.

    Args:
        lengths: tokens of each answer, `(batch,)`.
        longest: tokens an answer may have.
        buffer: share of these, at their end, over which the penalty rises.

    Returns:
        fp32 `(batch,)`.

    Raises:
        ValueError: the buffer is not above 0 and at most 1.
    """
    if not 0 < buffer <= 1:
        raise ValueError(f"The buffer must be above 0 and at most 1, not {buffer}.")
    tokens = buffer * longest
    return ((lengths.float() - (longest - tokens)) / tokens).clamp(0.0, 1.0)
