"""Step 1: supervised fine-tuning of the actor on dialogues."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from engine.algorithms.averages import mean
from engine.algorithms.language_modeling import IGNORED_LABEL, causal_lm_loss, perplexity
from engine.data.batches import GlobalBatches, SftCollator, row_lengths
from engine.distributed import device, rank, sum_over_ranks, world_size
from engine.log import write
from engine.log.entries import PerplexityEvaluation, SFTStep, TrainingSpeed
from engine.models.adapters import save_adapters
from engine.models.save import save_model
from engine.planning.flops import training_flops
from engine.trainers.context import StepContext, length_of_training
from engine.trainers.engines import backward, engine_step, learning_rates
from engine.trainers.setup import trained_model
from engine.trainers.watchdog import Watchdog


class SFTTrainer:
    """Trains the base model on answers; perplexity before and after each epoch."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        config, options = context.config, context.config.sft

        # 1. The tokenizer and the data.
        self.source = source = context.resolve_model(config.models.actor)
        self.tokenizer = context.load_tokenizer(source)
        self.data = context.build_data(self.tokenizer, "sft")
        context.warn_if_nothing_is_held_out(self.data, "perplexity")
        self.collate = SftCollator(self.tokenizer.pad_token_id)
        lengths = row_lengths(self.data.train, "input_ids")
        self.batches = GlobalBatches(lengths, options.batch_size, config.seed)
        self.total_steps = length_of_training(options, self.batches, options.batch_size)

        # 2. The model in its engine.
        def load() -> PreTrainedModel:
            return context.load_actor(source, self.tokenizer, config.actor.dropout)

        context.warn_of_warmup(self.total_steps)
        trained = trained_model(context, "actor", options, options, self.total_steps, load)
        self.engine, self.shape, self.plan = trained.engine, trained.shape, trained.plan
        self.parameters = trained.parameters
        self.checkpoints = context.checkpoints({"sft": self.engine})
        self.watchdog = Watchdog(context.report, {"actor": self.engine})
        self.perplexity: float | None = None

    def train(self) -> bool:
        """Run all optimizer steps, with evaluations before, between and after epochs.

        Goes on after the newest checkpoint, if there is one.

        Returns:
            whether all steps are done; else a stop was asked for.
        """
        options, report = self.context.config.sft, self.context.report
        per_epoch = len(self.batches)
        report.line(write.running_training())
        resumed = self.checkpoints.resume() or {"step": 0, "perplexity": None}
        self.perplexity = resumed["perplexity"]
        if resumed["step"] == 0:
            self.evaluate(epoch=0, step=-1)
        for step in range(resumed["step"], self.total_steps):
            epoch, index = divmod(step, per_epoch)
            if index == 0:
                report.line(write.beginning_of_epoch(epoch + 1, options.epochs, per_epoch))
            self.train_step(step, epoch, self.batches.epoch(epoch)[index])
            between = options.eval_interval and (step + 1) % options.eval_interval == 0
            if between or index + 1 == per_epoch or step + 1 == self.total_steps:
                self.evaluate(epoch + 1, step)
            score = None if self.perplexity is None else -self.perplexity
            if self.checkpoints.after_step(
                step + 1, lambda: {"perplexity": self.perplexity}, score
            ):
                return False
        return True

    def train_step(self, step: int, epoch: int, rows: Sequence[int]) -> None:
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
                checkpointing=config.actor.gradient_checkpointing,
                frozen_base=config.actor.lora.only,
            )
        if config.logging.print_loss:
            own_loss = float(loss_sum) / max(1, trained_tokens)
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
        if (step + 1) % config.logging.optimizer_interval == 0:
            report.optimizer(self.engine)
        self.watchdog.check(step, {"loss": loss, "gradient_norm": gradient_norm})

    def loss(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed loss of a batch and the number of tokens it was summed over."""
        batch = {name: tensor.to(device()) for name, tensor in batch.items()}
        logits = self.engine(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
        return causal_lm_loss(logits, batch["labels"])

    @torch.no_grad()
    def evaluate(self, epoch: int, step: int) -> None:
        """Perplexity over the trained tokens of the held-out rows, over all ranks.

        None, "NA" in the log, where no row is held out.

        Args:
            epoch: from 1; 0 before training.
            step: the last optimizer step done, from 0; -1 before training.
        """
        options, report = self.context.config.sft, self.context.report
        self.engine.eval()
        loss_sum, tokens = 0.0, 0.0
        for rows, is_counted in self.context.eval_batches(
            len(self.data.eval), options.eval_batch_size
        ):
            batch = self.collate([self.data.eval[row] for row in rows])
            batch_loss, batch_tokens = self.loss(batch)
            if is_counted:
                loss_sum += float(batch_loss)
                tokens += float(batch_tokens)
        self.engine.train()
        loss = mean(*sum_over_ranks(loss_sum, tokens))
        self.perplexity = perplexity(loss)
        report.write(PerplexityEvaluation(step, epoch, options.epochs, self.perplexity, loss))

    def save(self) -> None:
        """Write the model as a complete Hugging Face folder."""
        report = self.context.report
        report.line(write.saving_model())
        folder = self.context.folder / "model"
        save_model(self.engine.module, self.tokenizer, folder)
        if self.context.config.actor.lora.export:
            save_adapters(self.engine.module, self.source, self.context.folder / "adapters")
        report.line(write.step_finished(str(folder)))
