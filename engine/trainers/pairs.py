"""What training on pairs of a chosen and a rejected answer has in common (step 2)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.algorithms.averages import mean
from engine.config.schema import PretrainingStyleStep, RoleConfig
from engine.config.steps import RoleName
from engine.data.batches import GlobalBatches, row_lengths
from engine.distributed import device, rank, sum_over_ranks, world_size
from engine.log import write
from engine.log.entries import DPOEvaluation, PairStep, RewardEvaluation, TrainingSpeed
from engine.models.adapters import save_adapters
from engine.models.reward import RewardModel
from engine.models.save import save_model
from engine.trainers.context import StepContext, length_of_training
from engine.trainers.engines import backward, engine_step, learning_rates
from engine.trainers.setup import trained_model
from engine.trainers.watchdog import Watchdog

Batch = dict[str, Tensor]


class PairTrainer(ABC):
    """Trains a model to rate chosen answers above rejected ones; accuracy on held-out pairs.

    How a model rates an answer, and the loss, are the subclass's.
    """

    # what an evaluation is reported as
    evaluation: type[RewardEvaluation | DPOEvaluation]

    def __init__(
        self,
        context: StepContext,
        role: RoleName,
        options: PretrainingStyleStep,
        source: str,
        collator: Callable[[int], Callable[[list[dict[str, Any]]], Batch]],
    ) -> None:
        self.context = context
        self.options = options
        self.source = source
        self.layout: RoleConfig = getattr(context.config, role)

        # 1. The tokenizer and the data.
        self.tokenizer = context.load_tokenizer(source)
        self.data = context.build_data(self.tokenizer, "reward")
        context.warn_if_nothing_is_held_out(self.data, "accuracy")
        self.collate = collator(self.tokenizer.pad_token_id)
        lengths = row_lengths(self.data.train, "chosen_ids", "rejected_ids")
        self.batches = GlobalBatches(lengths, options.batch_size, context.config.seed)
        self.total_steps = length_of_training(options, self.batches, options.batch_size)

        # 2. The model in its engine.
        context.warn_of_warmup(self.total_steps)
        trained = trained_model(context, role, options, options, self.total_steps, self.load_model)
        self.engine, self.shape, self.plan = trained.engine, trained.shape, trained.plan
        self.parameters = trained.parameters
        self.checkpoints = context.checkpoints({context.step: self.engine})
        self.watchdog = Watchdog(context.report, {role: self.engine})
        self.accuracy: float | None = None
        self.epoch_losses: list[float] = []

    @abstractmethod
    def load_model(self) -> PreTrainedModel | RewardModel:
        """The model to train."""

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, ratings of chosen `(pairs,)` and of rejected answers `(pairs,)`."""

    @abstractmethod
    def flops(self, rows: int, seq: int) -> float:
        """Operations of a micro batch of `rows` texts, each `seq` tokens wide."""

    def train(self) -> bool:
        """Run all optimizer steps, with evaluations before, between and after epochs.

        Goes on after the newest checkpoint, if there is one.

        Returns:
            whether all steps are done; else a stop was asked for.
        """
        options, report = self.options, self.context.report
        per_epoch = len(self.batches)
        report.line(write.running_training())
        resumed = self.checkpoints.resume() or {"step": 0, **self.state()}
        self.accuracy, self.epoch_losses = resumed["accuracy"], resumed["epoch_losses"]
        if resumed["step"] == 0:
            self.evaluate(epoch=0, step=-1)
        for step in range(resumed["step"], self.total_steps):
            epoch, index = divmod(step, per_epoch)
            if index == 0:
                report.line(write.beginning_of_epoch(epoch + 1, options.epochs, per_epoch))
                self.epoch_losses = []
            self.epoch_losses.append(self.train_step(step, self.batches.epoch(epoch)[index]))
            last = index + 1 == per_epoch or step + 1 == self.total_steps
            if last:
                loss = sum(self.epoch_losses) / len(self.epoch_losses)
                report.line(write.epoch_loss(epoch + 1, options.epochs, loss))
            if last or (options.eval_interval and (step + 1) % options.eval_interval == 0):
                self.evaluate(epoch + 1, step, in_epoch=not last)
            if self.checkpoints.after_step(step + 1, self.state, self.accuracy):
                return False
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the engine."""
        return {"accuracy": self.accuracy, "epoch_losses": self.epoch_losses}

    def train_step(self, step: int, rows: Sequence[int]) -> float:
        """One optimizer step on a global batch of pairs; returns the mean loss."""
        config, report = self.context.config, self.context.report
        started = time.perf_counter()

        # 1. Forward and backward of this rank's micro batches.
        micro = self.plan.micro_batch_size
        cuts = self.batches.local_micro_batches(rows, rank(), world_size(), micro)
        # On the device: to read it, the host would wait for all work that is queued there.
        totals = torch.zeros(4, dtype=torch.float64, device=device())
        flops, tokens, width = 0.0, 0, 0
        for cut in cuts:
            batch = self.collate([self.data.train[row] for row in cut])
            loss, chosen, rejected = self.loss(batch)
            backward(self.engine, loss, len(rows))
            gradient_norm = engine_step(self.engine)
            correct = (chosen > rejected).sum()
            totals += torch.stack([loss, correct, chosen.sum(), rejected.sum()]).detach()
            flops += self.flops(*batch["input_ids"].shape)
            tokens += int(batch["attention_mask"].sum())
            width = max(width, batch["input_ids"].shape[1])

        # 2. The report, over all ranks.
        *sums, tokens_everywhere = sum_over_ranks(*totals, tokens)
        loss_mean, accuracy, chosen_mean, rejected_mean = (total / len(rows) for total in sums)
        seconds = time.perf_counter() - started
        pairs = sum(len(cut) for cut in cuts)
        report.write(
            PairStep(
                step=step,
                speed=TrainingSpeed(self.parameters, seconds, flops, pairs, width),
                loss=loss_mean,
                accuracy=accuracy,
                margin=chosen_mean - rejected_mean,
                chosen=chosen_mean,
                rejected=rejected_mean,
                learning_rate=learning_rates(self.engine)[0],
                gradient_norm=gradient_norm,
                tokens_per_s=tokens_everywhere / seconds,
                total_steps=self.total_steps,
            )
        )
        if (step + 1) % config.logging.optimizer_interval == 0:
            report.optimizer(self.engine)
        self.watchdog.check(step, {"loss": loss_mean, "gradient_norm": gradient_norm})
        return loss_mean

    @torch.no_grad()
    def evaluate(self, epoch: int, step: int, in_epoch: bool = False) -> None:
        """Accuracy, scores and loss on the held-out pairs over all ranks.

        None, "NA" in the log, where no pair is held out.

        Args:
            epoch: from 1; 0 before training.
            step: the last optimizer step done, from 0; -1 before training.
            in_epoch: in the middle of an epoch, not at its end.
        """
        report = self.context.report
        self.engine.eval()
        sums = torch.zeros(4, dtype=torch.float64)
        pairs_of, correct_of = Counter[str | None](), Counter[str | None]()
        batches = self.context.eval_batches(len(self.data.eval), self.options.eval_batch_size)
        for rows, is_counted in batches:
            pairs = [self.data.eval[row] for row in rows]
            loss, chosen, rejected = self.loss(self.collate(pairs))
            if not is_counted:
                continue
            correct = chosen > rejected
            sums += torch.stack([loss, correct.sum(), chosen.sum(), rejected.sum()]).cpu()
            kinds = [pair["kind"] for pair in pairs]
            pairs_of.update(kinds)
            correct_of.update(
                kind for kind, right in zip(kinds, correct.tolist(), strict=True) if right
            )
        self.engine.train()
        *sums_everywhere, count = sum_over_ranks(*sums.tolist(), pairs_of.total())
        loss_mean, self.accuracy, chosen_mean, rejected_mean = (
            mean(total, count) for total in sums_everywhere
        )
        report.write(
            self.evaluation(
                step=step,
                epoch=epoch,
                epochs=self.options.epochs,
                in_epoch=in_epoch,
                loss=loss_mean,
                chosen=chosen_mean,
                rejected=rejected_mean,
                accuracy=self.accuracy,
                pairs=int(count),
            )
        )
        for kind in sorted(set(self.data.eval["kind"]) - {None}):
            right, of = sum_over_ranks(correct_of[kind], pairs_of[kind])
            report.note(f"held-out pairs of kind {kind}: {right:.0f} of {of:.0f} right")

    def save(self) -> None:
        """Write the model as a complete Hugging Face folder."""
        report = self.context.report
        report.line(write.saving_model())
        folder = self.context.folder / "model"
        save_model(self.engine.module, self.tokenizer, folder)
        if self.layout.lora.export:
            save_adapters(self.engine.module, self.source, self.context.folder / "adapters")
        report.line(write.step_finished(str(folder)))
