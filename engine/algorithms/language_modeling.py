"""Log-probabilities of whole answers, and the loss of SFT and of the mixture in PPO."""

from __future__ import annotations

import math

from torch import Tensor

from engine.algorithms.log_probs import token_log_probs

IGNORED_LABEL = -100


def perplexity(loss: float | None) -> float | None:
    """exp of a mean loss per token; infinity beyond a float, None where the loss is."""
    if loss is None:
        return None
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def sequence_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each row's labelled tokens together, in fp32.

    Args:
        logits: `(batch, seq, vocabulary)`.
        labels: the input ids, -100 where a token does not count, `(batch, seq)`; shifted in here.

    Returns:
        fp32 `(batch,)`.
    """
    targets = labels[:, 1:]
    counted = targets != IGNORED_LABEL
    log_probs = token_log_probs(logits[:, :-1], targets.masked_fill(~counted, 0))
    return log_probs.masked_fill(~counted, 0.0).sum(dim=1)


def causal_lm_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the next token, summed, with the number of tokens it was summed over.

    Dividing by the tokens of the whole global batch makes loss and gradients the same however
    the rows are cut into micro batches and ranks.

    Args:
        logits: `(batch, seq, vocabulary)`.
        labels: the input ids, -100 where no loss is wanted, `(batch, seq)`; shifted in here.

    Returns:
        `(loss_sum, token_count)`: fp32 and int64 scalars.
    """
    return -sequence_log_probs(logits, labels).sum(), (labels[:, 1:] != IGNORED_LABEL).sum()
