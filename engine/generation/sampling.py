"""How the next token is chosen, and what a generated batch looks like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled; the defaults are the model's own distribution.

    Raises:
        ValueError: a value is out of its range.
    """

    max_new_tokens: int
    eos_ids: tuple[int, ...]
    pad_id: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    greedy: bool = False
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, valid, bounds in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature > 0, "above 0 (greedy=True takes the likeliest)"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0 (1 is off)"),
        ):
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be {bounds}.")


@dataclass(frozen=True)
class Generation:
    """Answers of one batch.

    Attributes:
        answers: token ids `(batch, answer)`, right padded, as wide as the longest answer.
        lengths: tokens of each answer with its EOS, `(batch,)`.
        log_probs: fp32 `(batch, answer)`, of each token under the model's softmax at the sampling
            temperature, before repetition penalty, top-k and top-p; 0 on padding.
    """

    answers: Tensor
    lengths: Tensor
    log_probs: Tensor


def draw_uniforms(batch: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Draw the one random number a row that a token needs, fp64 `(batch,)` on `device`."""
    source = device if generator is None else generator.device
    return torch.rand(batch, dtype=torch.float64, device=source, generator=generator).to(device)


def choose_tokens(
    logits: Tensor,
    sampling: Sampling,
    uniforms: Tensor | None,
    history: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the next token of each row.

    A token is the inverse of the cumulative distribution at the row's uniform number: a row's
    choice depends on no other row, and costs no random number an entry of the vocabulary.

    Args:
        logits: `(batch, vocabulary)`, any float dtype.
        sampling: how to choose.
        uniforms: numbers in [0, 1), `(batch,)`; not needed for greedy choice.
        history: ids so far with the prompt, `(batch, seq)`; needed for a repetition penalty.

    Returns:
        ids `(batch,)` and their fp32 log-probabilities as in `Generation.log_probs`.
    """
    logits = logits.float() / sampling.temperature
    top = logits.amax(dim=-1, keepdim=True)
    weights = (logits - top).exp_()
    scores = logits
    if sampling.repetition_penalty != 1.0 and history is not None:
        scores = _penalise(logits, history, sampling.repetition_penalty)
    if sampling.greedy or uniforms is None:
        tokens = scores.argmax(dim=-1)
        total = weights.sum(dim=-1)
    else:
        total = None
        if scores is not logits or sampling.top_k or sampling.top_p < 1.0:
            total = weights.sum(dim=-1)
            weights = _keep_top(scores.softmax(dim=-1), sampling)
        cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
        mass = cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, uniforms.unsqueeze(1) * mass, right=True)
        tokens = tokens.squeeze(1).clamp_(max=logits.shape[-1] - 1)
        total = mass.squeeze(1).float() if total is None else total
    chosen = logits.gather(1, tokens.unsqueeze(1)) - top
    return tokens, chosen.squeeze(1) - total.log()


def _penalise(scores: Tensor, history: Tensor, penalty: float) -> Tensor:
    """Make tokens of the history less likely (CTRL, arXiv 1909.05858)."""
    seen = scores.gather(1, history)
    return scores.scatter(1, history, torch.where(seen < 0, seen * penalty, seen / penalty))


def _keep_top(probabilities: Tensor, sampling: Sampling) -> Tensor:
    """Zero what is beyond the top k, then beyond the smallest set with a mass of top p."""
    if 0 < sampling.top_k < probabilities.shape[-1]:
        smallest = probabilities.topk(sampling.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.masked_fill(probabilities < smallest, 0.0)
    if sampling.top_p < 1.0:
        ordered, index = probabilities.sort(dim=-1, descending=True)
        mass_before = ordered.cumsum(dim=-1) - ordered
        beyond = mass_before >= sampling.top_p * ordered.sum(dim=-1, keepdim=True)
        beyond[:, 0] = False
        probabilities = probabilities.masked_fill(beyond.scatter(1, index, beyond), 0.0)
    return probabilities
