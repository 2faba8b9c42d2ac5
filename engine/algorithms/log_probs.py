"""Log-probabilities and entropy of tokens from logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 64 MiB in fp32: large vocabularies are converted a few positions at a time.
_CHUNK_ELEMENTS = 2**24


def _log_softmax_chunks(logits: Tensor, temperature: float) -> Iterator[Tensor]:
    if temperature <= 0:
        raise ValueError(
            f"Temperature {temperature} has no log-probabilities; use a temperature above 0."
        )
    batch, _, vocabulary = logits.shape
    positions = max(1, _CHUNK_ELEMENTS // max(1, batch * vocabulary))
    for chunk in logits.split(positions, dim=1):
        yield torch.log_softmax(chunk.float() / temperature, dim=-1)


def token_log_probs(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each token under the logits at the same index, in fp32.

    The caller aligns both: the logits at position t predict the token at t + 1. Autograd keeps
    one fp32 copy of the logits; without gradients only a chunk lives at a time.

    Args:
        logits: `(batch, seq, vocabulary)`, any float dtype.
        tokens: ids, `(batch, seq)`.
        temperature: the temperature at which the tokens were sampled.

    Returns:
        fp32 `(batch, seq)`.

    Raises:
        ValueError: the temperature is not above 0.
    """
    chosen, start = [], 0
    for chunk in _log_softmax_chunks(logits, temperature):
        ids = tokens[:, start : start + chunk.shape[1]]
        chosen.append(chunk.gather(-1, ids.unsqueeze(-1)).squeeze(-1))
        start += chunk.shape[1]
    return torch.cat(chosen, dim=1)


def entropy(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Entropy in nats of the distribution at each position, in fp32.

    Args:
        logits: `(batch, seq, vocabulary)`; -inf stands for a token that cannot be sampled.
        temperature: the temperature at which tokens are sampled.

    Returns:
        fp32 `(batch, seq)`.

    Raises:
        ValueError: the temperature is not above 0.
    """
    lowest = torch.finfo(torch.float32).min
    sums = [
        -(chunk.exp() * chunk.clamp(min=lowest)).sum(dim=-1)
        for chunk in _log_softmax_chunks(logits, temperature)
    ]
    return torch.cat(sums, dim=1)
