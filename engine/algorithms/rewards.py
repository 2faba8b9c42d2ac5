"""From the reward model's score of an answer to a reward at each of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.kl import k1


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
            raise ValueError(f"Scores cannot be divided by a deviation of {std}; leave it unset.")
        shaped = shaped / std
    if missing_eos_penalty is not None:
        shaped = torch.where(ended_with_eos, shaped, shaped - missing_eos_penalty)
    if clip is not None:
        shaped = shaped.clamp(-clip, clip)
    return shaped


def token_rewards(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:
    """Reward of each action: minus the weighted KL, and the score at the last action.

    Args:
        scores: already shaped, `(batch,)`.
        log_probs: of the sampled tokens under the actor, `(batch, answer)`.
        ref_log_probs: under the reference, `(batch, answer)`.
        mask: bool `(batch, answer)`.
        kl_coef: weight of the KL.

    Returns:
        fp32 `(batch, answer)`, zero outside of the mask; a row with an empty mask gets no score.
    """
    lengths = mask.sum(dim=1, keepdim=True)
    positions = torch.arange(mask.shape[1], device=mask.device)
    is_last = positions == lengths - 1
    rewards = -kl_coef * k1(log_probs, ref_log_probs)
    rewards = rewards + torch.where(is_last, scores.float().unsqueeze(1), 0.0)
    return rewards.masked_fill(~mask, 0.0)
