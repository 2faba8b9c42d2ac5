"""Learning from pairs: the reward model's score and loss, and direct preference optimisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.algorithms.masks import length_mask


def last_token_index(attention_mask: Tensor) -> Tensor:
    """Index of the last real token of each row, left or right padded.

    Args:
        attention_mask: 1 or True at real tokens, `(batch, seq)`.

    Returns:
        int64 `(batch,)`.

    Raises:
        ValueError: a row has no real token.
    """
    real = attention_mask.bool()
    if not bool(real.any(dim=1).all()):
        empty = torch.nonzero(~real.any(dim=1)).flatten().tolist()
        raise ValueError(
            f"Rows {empty} have no real token in the attention mask, so they have no score; "
            "drop empty texts before batching."
        )
    positions = torch.arange(real.shape[1], device=real.device)
    return (positions * real).amax(dim=1)


def gather_last(values: Tensor, attention_mask: Tensor) -> Tensor:
    """Take the value at the last real token: `(batch, seq)` to `(batch,)`.

    Raises:
        ValueError: a row has no real token.
    """
    return values.gather(1, last_token_index(attention_mask).unsqueeze(1)).squeeze(1)


def pairwise_loss(chosen_scores: Tensor, rejected_scores: Tensor) -> Tensor:
    """Minus log-sigmoid of the margin, summed over pairs (InstructGPT, equation 1).

    Args:
        chosen_scores: `(pairs,)`, any float dtype.
        rejected_scores: `(pairs,)`.

    Returns:
        fp32 scalar.
    """
    return -F.logsigmoid(chosen_scores.float() - rejected_scores.float()).sum()


def divergence_start(
    chosen_ids: Tensor, chosen_mask: Tensor, rejected_ids: Tensor, rejected_mask: Tensor
) -> Tensor:
    """Index of the first token that differs between the right-padded texts of each pair.

    Where one text is the beginning of the other, they differ where the shorter one ends. Texts
    that are the same give their length, so that nothing lies between it and their end.

    Args:
        chosen_ids: `(pairs, seq)`.
        chosen_mask: attention mask, `(pairs, seq)`.
        rejected_ids: `(pairs, seq)`, of the same width.
        rejected_mask: attention mask, `(pairs, seq)`.

    Returns:
        int64 `(pairs,)`.
    """
    chosen_real, rejected_real = chosen_mask.bool(), rejected_mask.bool()
    same = (chosen_ids == rejected_ids) & chosen_real & rejected_real
    return same.long().cumprod(dim=1).sum(dim=1)


def pairwise_loss_all_tokens(
    chosen_values: Tensor,
    rejected_values: Tensor,
    chosen_ids: Tensor,
    chosen_mask: Tensor,
    rejected_ids: Tensor,
    rejected_mask: Tensor,
) -> Tensor:
    """Pairwise loss as in DeepSpeed-Chat: a mean over tokens of each pair, summed over pairs.

    The mean runs from the first differing token to the end of the longer text; the shorter one
    takes part there with its values at padding. Texts that are the same contribute 0.

    Args:
        chosen_values: a score at every token, `(pairs, seq)`, right padded.
        rejected_values: `(pairs, seq)`.
        chosen_ids: `(pairs, seq)`.
        chosen_mask: attention mask, `(pairs, seq)`.
        rejected_ids: `(pairs, seq)`.
        rejected_mask: attention mask, `(pairs, seq)`.

    Returns:
        fp32 scalar.
    """
    start = divergence_start(chosen_ids, chosen_mask, rejected_ids, rejected_mask)
    end = torch.maximum(chosen_mask.long().sum(dim=1), rejected_mask.long().sum(dim=1))
    width = chosen_values.shape[1]
    counted = length_mask(end, width) & ~length_mask(start, width)
    losses = -F.logsigmoid(chosen_values.float() - rejected_values.float())
    per_pair = losses.masked_fill(~counted, 0.0).sum(dim=1) / (end - start).clamp(min=1)
    return per_pair.sum()


def implicit_rewards(log_probs: Tensor, reference_log_probs: Tensor, beta: float) -> Tensor:
    """The reward of an answer that a policy stands for (Rafailov et al. 2023, equation 5).

    Up to a term of the prompt alone, which falls away between the answers of a pair.

    Args:
        log_probs: of whole answers under the policy, `(batch,)`.
        reference_log_probs: of the same under the reference, `(batch,)`.
        beta: how much the KL to the reference weighs against rewards.

    Returns:
        `(batch,)`.
    """
    return beta * (log_probs - reference_log_probs)


def dpo_loss(
    chosen_rewards: Tensor, rejected_rewards: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Direct preference optimisation (Rafailov et al. 2023, equation 7), summed over pairs.

    Args:
        chosen_rewards: implicit rewards, `(pairs,)`.
        rejected_rewards: `(pairs,)`.
        label_smoothing: share of pairs that are taken to be labelled the wrong way.

    Returns:
        fp32 scalar.
    """
    right = pairwise_loss(chosen_rewards, rejected_rewards)
    if not label_smoothing:
        return right
    wrong = pairwise_loss(rejected_rewards, chosen_rewards)
    return (1 - label_smoothing) * right + label_smoothing * wrong
