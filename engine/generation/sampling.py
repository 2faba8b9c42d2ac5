"""How the next token is chosen, and what a generated batch looks like."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 256


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


def without_padding(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Left-padded prompts with their last token in place of padding: no token is penalised for
    having served as padding. Both `(batch, prompt)`."""
    return torch.where(attention_mask.bool(), input_ids, input_ids[:, -1:])


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
    scaled = logits.float()
    if sampling.temperature != 1.0:
        scaled = scaled / sampling.temperature
    top = scaled.amax(dim=-1, keepdim=True)
    weights = (scaled - top).exp_()
    total = weights.sum(dim=-1)
    scores = scaled
    if sampling.repetition_penalty != 1.0 and history is not None:
        scores = _penalise(scaled, history, sampling.repetition_penalty)
    if sampling.greedy or uniforms is None:
        tokens = scores.argmax(dim=-1)
    else:
        if scores is not scaled or sampling.top_k or sampling.top_p < 1.0:
            weights = _keep_top(scores.softmax(dim=-1), sampling)
        tokens = _invert_cumulative(weights, uniforms)
    chosen = (scaled.gather(1, tokens.unsqueeze(1)) - top).squeeze(1)
    return tokens, chosen - total.log()


def _invert_cumulative(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Find where the cumulative weights of a row first exceed its uniform share of their sum.

    Blocks are searched first and then the tokens of one block: a cumulative sum in fp64 over a
    whole vocabulary takes longer on a CPU than all else about a token's choice.
    """
    rows, vocabulary = weights.shape
    blocks = -(-vocabulary // _BLOCK)
    if blocks * _BLOCK != vocabulary:
        weights = torch.nn.functional.pad(weights, (0, blocks * _BLOCK - vocabulary))
    weights = weights.view(rows, blocks, _BLOCK)
    block_ends = weights.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniforms.unsqueeze(1) * block_ends[:, -1:]
    block = torch.searchsorted(block_ends, target, right=True).clamp_(max=blocks - 1)
    before = torch.where(block > 0, block_ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = weights.gather(1, block.unsqueeze(2).expand(-1, -1, _BLOCK)).squeeze(1)
    ends = inside.cumsum(dim=-1, dtype=torch.float64)
    # The block's fp32 sum and its fp64 ends round differently: scaled, the target stays inside.
    share = (target - before) / (block_ends.gather(1, block) - before)
    offset = torch.searchsorted(ends, share * ends[:, -1:], right=True)
    return (block * _BLOCK + offset.clamp_(max=_BLOCK - 1)).squeeze(1)


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
        # Tokens below this bound hold less than 1 - top_p together: no need to sort them.
        bound = (1 - sampling.top_p) * probabilities.sum(dim=-1, keepdim=True)
        likely = probabilities >= bound / probabilities.shape[-1]
        ordered, index = probabilities.topk(int(likely.sum(dim=-1).max()), dim=-1)
        mass_before = ordered.cumsum(dim=-1) - ordered
        beyond = mass_before >= sampling.top_p * probabilities.sum(dim=-1, keepdim=True)
        beyond[:, 0] = False
        ordered = ordered.masked_fill(beyond, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(1, index, ordered)
    return probabilities
