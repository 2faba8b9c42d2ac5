"""Answers of the actor to prompts, and what generating them took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.algorithms.masks import length_mask
from engine.distributed import device, rank
from engine.generation.hybrid import HybridEngine
from engine.generation.sampling import Generation, Sampling
from engine.planning.flops import generation_flops
from engine.rlhf.models import RLHFEngine
from engine.trainers.context import StepContext

# Each rank samples from a stream of its own.
_RANK_SEED_STRIDE = 1_000_003

# Prompts, left padded, `(batch, prompt)`, and their attention mask.
Prompts = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GenerationCost:
    """What the answers of a rollout batch took on this rank; a pass reads all weights once."""

    seconds: float
    flops: float
    passes: int

    def __add__(self, other: GenerationCost) -> GenerationCost:
        return GenerationCost(
            self.seconds + other.seconds, self.flops + other.flops, self.passes + other.passes
        )


class Rollouts:
    """Samples answers, with the actor laid out for generation where the hybrid engine is on.

    Attributes:
        sampler: source of the random numbers, of this rank alone.
    """

    def __init__(
        self, context: StepContext, engine: RLHFEngine, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        options = context.config.ppo
        self._report = context.report
        self._shape = engine.actor_shape
        self.hybrid = HybridEngine(engine.actor, context.config.hybrid_engine)
        self.sampling = Sampling(
            max_new_tokens=options.max_answer_length,
            temperature=options.temperature,
            eos_ids=(tokenizer.eos_token_id,),
            pad_id=tokenizer.pad_token_id,
        )
        self.sampler = torch.Generator(device()).manual_seed(rank_seed(context.config.seed))
        self._has_reported_hybrid_engine = False

    def answer(self, batches: Sequence[Prompts]) -> tuple[list[Generation], GenerationCost]:
        """Answer batches of prompts."""
        started = time.perf_counter()
        with self.hybrid.rollout():
            generations = [
                self.hybrid.generate(prompts, mask, self.sampling, self.sampler)
                for prompts, mask in batches
            ]
        seconds = time.perf_counter() - started
        self._report_hybrid_engine()
        flops, passes = 0.0, 0
        for (prompts, _), generation in zip(batches, generations, strict=True):
            rows, prompt_width = prompts.shape
            width = generation.answers.shape[1]
            flops += generation_flops(self._shape, rows, prompt_width, width)
            passes += width
        return generations, GenerationCost(seconds, flops, passes)

    def _report_hybrid_engine(self) -> None:
        """Say in the log, once, why the hybrid engine switched itself off."""
        if self.hybrid.off_reason is not None and not self._has_reported_hybrid_engine:
            self._has_reported_hybrid_engine = True
            self._report.warning(f"the hybrid engine switched itself off: {self.hybrid.off_reason}")


def rank_seed(seed: int) -> int:
    """The seed of this rank's own random numbers."""
    return seed + _RANK_SEED_STRIDE * rank()


def with_answers(prompts: Prompts, generation: Generation) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts and their answers in one: ids and attention mask `(batch, prompt + answer)`.

    The third is true on the answer's tokens up to and with its first EOS, `(batch, answer)`: the
    EOS is an action, also where it is the only token.
    """
    prompt_ids, prompt_mask = prompts
    mask = length_mask(generation.lengths, generation.answers.shape[1])
    ids = torch.cat((prompt_ids, generation.answers), dim=1)
    return ids, torch.cat((prompt_mask, mask.to(prompt_mask.dtype)), dim=1), mask
