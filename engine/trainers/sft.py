"""Step 1: supervised fine-tuning of the actor on dialogues."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypedDict

import torch
from transformers import PreTrainedModel

from engine.algorithms.averages import mean
from engine.algorithms.language_modeling import IGNORED_LABEL, causal_lm_loss, perplexity
from engine.data.batches import SftCollator
from engine.distributed import device, rank, sum_over_ranks, world_size
from engine.log import write
from engine.log.entries import PerplexityEvaluation, SFTStep, TrainingSpeed
from engine.planning.flops import training_flops
from engine.trainers.context import StepContext
from engine.trainers.engines import backward, engine_step, learning_rates
from engine.trainers.supervised import SupervisedTrainer


class SFTState(TypedDict):
    """What a checkpoint of step 1 keeps beside the engine."""

    perplexity: float | None


class SFTTrainer(SupervisedTrainer[SFTState]):
    """Trains the base model on answers; measures perplexity."""

    phase = "sft"
    columns = ("input_ids",)
    collator = SftCollator
    measured = "perplexity"

    def __init__(self, context: StepContext) -> None:
        source = context.resolve_model(context.config.models.actor)
        super().__init__(context, "actor", context.config.sft, source)
        self.kept = {"perplexity": None}

    def load_model(self) -> PreTrainedModel:
        """The base model."""
        return self.context.load_actor(self.source, self.tokenizer, self.layout.dropout)

    def score(self) -> float | None:
        """The perplexity, negated."""
        perplexity = self.kept["perplexity"]
        return None if perplexity is None else -perplexity

    def train_step(self, step: int, rows: Sequence[int]) -> None:
        """One optimizer step on a global batch of rows."""
        config, report = self.context.config, self.context.report
        started = time.perf_counter()

        # 1. This rank's micro batches, and over how many tokens all ranks take the mean.
        micro = self.plan.micro_batch_size
        cuts = self.batches.local_micro_batches(rows, rank(), world_size(), micro)
        batches = [self.collate([self.data.train[row] for row in cut]) for cut in cuts]
        trained_tokens = sum(int((b["labels"][:, 1:] != IGNORED_LABEL).sum()) for b in batches)
        read_tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
        trained_tokens_everywhere, read_tokens_everywhere = sum_over_ranks(
            trained_tokens, read_tokens
        )

        # 2. Forward and backward.
        loss_sum = torch.zeros((), device=device())
        for batch in batches:
            batch_loss, _ = self.loss(batch)
            backward(self.engine, batch_loss, max(1.0, trained_tokens_everywhere))
            loss_sum += batch_loss.detach()
            gradient_norm = engine_step(self.engine)

        # 3. The report.
        (loss_everywhere,) = sum_over_ranks(loss_sum)
        seconds = time.perf_counter() - started
        samples = sum(len(cut) for cut in cuts)
        width = max(batch["input_ids"].shape[1] for batch in batches)
        flops = 0.0
        for batch in batches:
            batch_rows, batch_width = batch["input_ids"].shape
            flops += training_flops(
                self.shape,
                batch_rows,
                batch_width,
                checkpointing=self.layout.gradient_checkpointing,
                frozen_base=self.layout.lora.only,
            )
        if config.logging.print_loss:
            own_loss = float(loss_sum) / max(1, trained_tokens)
            epoch = step // len(self.batches)
            report.every_rank(write.step_loss(epoch, step, rank(), own_loss))
        loss = loss_everywhere / max(1.0, trained_tokens_everywhere)
        report.write(
            SFTStep(
                step=step,
                speed=TrainingSpeed(self.parameters, seconds, flops, samples, width),
                loss=loss,
                learning_rate=learning_rates(self.engine)[0],
                gradient_norm=gradient_norm,
                tokens_per_s=read_tokens_everywhere / seconds,
                trained_token_share=trained_tokens_everywhere / read_tokens_everywhere,
                total_steps=self.total_steps,
            )
        )
        self.check(step, loss, gradient_norm)

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss of a batch and the number of tokens it was summed over."""
        batch = {name: tensor.to(device()) for name, tensor in batch.items()}
        logits = self.engine(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
        return causal_lm_loss(logits, batch["labels"])

    @torch.no_grad()
    def evaluate(self, epoch: int, step: int) -> None:
        """Perplexity over the trained tokens of the held-out rows, over all ranks."""
        self.engine.eval()
        loss_sum, tokens = 0.0, 0.0
        batches = self.context.eval_batches(len(self.data.eval), self.options.eval_batch_size)
        for rows, is_counted in batches:
            batch = self.collate([self.data.eval[row] for row in rows])
            batch_loss, batch_tokens = self.loss(batch)
            if is_counted:
                loss_sum += float(batch_loss)
                tokens += float(batch_tokens)
        self.engine.train()
        loss = mean(*sum_over_ranks(loss_sum, tokens))
        self.kept["perplexity"] = value = perplexity(loss)
        self.context.report.write(
            PerplexityEvaluation(step, epoch, self.options.epochs, value, loss)
        )
