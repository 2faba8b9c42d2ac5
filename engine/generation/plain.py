"""Generation as transformers does it, with the model as training laid it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from engine.algorithms.masks import answer_lengths, length_mask
from engine.generation.sampling import (
    Generation,
    Sampling,
    choose_tokens,
    draw_uniforms,
    without_padding,
)


class _Choice(LogitsProcessor):
    """Leaves transformers one token to choose and keeps its log-probability."""

    def __init__(
        self, sampling: Sampling, generator: torch.Generator | None, attention_mask: Tensor
    ) -> None:
        self.sampling = sampling
        self.generator = generator
        self.attention_mask = attention_mask
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniforms = None
        if not self.sampling.greedy:
            uniforms = draw_uniforms(len(scores), scores.device, self.generator)
        history = None
        if self.sampling.repetition_penalty != 1.0:
            width = self.attention_mask.shape[1]
            prompts = without_padding(input_ids[:, :width], self.attention_mask)
            history = torch.cat((prompts, input_ids[:, width:]), dim=1)
        tokens, log_probs = choose_tokens(scores, self.sampling, uniforms, history)
        self.log_probs.append(log_probs)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.unsqueeze(1), 0.0)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout and gradient checkpointing off; each module's own mode comes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _neutral_generation_config(model: Any) -> Iterator[None]:
    """Hide the checkpoint's own settings: transformers mixes them into every call."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def causal_lm(model: nn.Module) -> Any:
    """The transformers model itself, without a wrapper by peft; its adapters stay active."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ZeRO-3 holds the parameters."""
    return any(hasattr(parameter, "ds_id") for parameter in model.parameters())


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    synced: bool | None = None,
) -> Generation:
    """Generate answers with transformers' own `generate`.

    Only the choice of a token is ours, so that a generator of one's own gives the same tokens
    here and in the decode loop, and nothing from the checkpoint's generation config slips in.

    Args:
        model: a causal language model of transformers, peft's wrapper allowed.
        input_ids: left-padded prompts, `(batch, prompt)`.
        attention_mask: 1 on tokens, 0 on padding, `(batch, prompt)`.
        sampling: how to sample.
        generator: source of random numbers; the global one if None.
        synced: keep all ranks in the loop until the last has finished, which sharded parameters
            need. None finds out.
    """
    if synced is None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        synced = several and is_sharded(model)
    inner = causal_lm(model)
    choice = _Choice(sampling, generator, attention_mask)
    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        do_sample=False,
        eos_token_id=None if sampling.ignore_eos else list(sampling.eos_ids),
        pad_token_id=sampling.pad_id,
    )
    with evaluation_mode(model), _neutral_generation_config(inner):
        sequences = inner.generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            logits_processor=LogitsProcessorList([choice]),
            synced_gpus=synced,
        )
    answers = sequences[:, input_ids.shape[1] :]
    lengths = answer_lengths(answers, () if sampling.ignore_eos else sampling.eos_ids)
    mask = length_mask(lengths, answers.shape[1])
    log_probs = torch.stack(choice.log_probs, dim=1)[:, : answers.shape[1]]
    return Generation(answers, lengths, log_probs.masked_fill(~mask, 0.0))
