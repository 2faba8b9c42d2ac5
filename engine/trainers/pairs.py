"""What training on pairs of a chosen and a rejected answer has in common (step 2)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import Tensor

from engine.algorithms.averages import mean
from engine.config.schema import PretrainingStyleStep
from engine.config.steps import RoleName
from engine.distributed import device, rank, sum_over_ranks, world_size
from engine.log import write
from engine.log.entries import DPOEvaluation, PairStep, RewardEvaluation, TrainingSpeed
from engine.trainers.context import StepContext
from engine.trainers.engines import backward, engine_step, learning_rates
from engine.trainers.supervised import Batch, SupervisedTrainer


class PairState(TypedDict):
    """What a checkpoint of step 2 keeps beside the engine."""

    accuracy: float | None
    epoch_losses: list[float]


class PairTrainer(SupervisedTrainer[PairState]):
    """Trains a model to rate chosen answers above rejected ones; measures accuracy.

    How a model rates an answer, and the loss, are the subclass's.
    """

    # What an evaluation is reported as.
    evaluation: type[RewardEvaluation | DPOEvaluation]

    phase = "reward"
    columns = ("chosen_ids", "rejected_ids")
    measured = "accuracy"

    def __init__(
        self, context: StepContext, role: RoleName, options: PretrainingStyleStep, source: str
    ) -> None:
        super().__init__(context, role, options, source)
        self.kept = {"accuracy": None, "epoch_losses": []}

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, ratings of chosen `(pairs,)` and of rejected answers `(pairs,)`."""

    @abstractmethod
    def flops(self, rows: int, seq: int) -> float:
        """Operations of a micro batch of `rows` texts, each `seq` tokens wide."""

    def score(self) -> float | None:
        """The accuracy."""
        return self.kept["accuracy"]

    def train_step(self, step: int, rows: Sequence[int]) -> None:
        """One optimizer step on a global batch of pairs."""
        started = time.perf_counter()

        # 1. Forward and backward of this rank's micro batches.
        micro = self.plan.micro_batch_size
        cuts = self.batches.local_micro_batches(rows, rank(), world_size(), micro)
        # On the device: reading it would make the host wait for all work queued there.
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
        if step % len(self.batches) == 0:
            self.kept["epoch_losses"] = []
        self.kept["epoch_losses"].append(loss_mean)
        seconds = time.perf_counter() - started
        pairs = sum(len(cut) for cut in cuts)
        self.context.report.write(
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
        self.check(step, loss_mean, gradient_norm)

    @torch.no_grad()
    def evaluate(self, epoch: int, step: int) -> None:
        """Accuracy, scores and loss on the held-out pairs, over all ranks."""
        report, epochs = self.context.report, self.options.epochs
        in_epoch = epoch > 0 and not self.ends_epoch(step)
        if epoch and not in_epoch:
            losses = self.kept["epoch_losses"]
            report.line(write.epoch_loss(epoch, epochs, sum(losses) / len(losses)))
        self.engine.eval()
        sums = torch.zeros(4, dtype=torch.float64)
        pairs_of, correct_of = Counter[str | None](), Counter[str | None]()
        batches = self.context.eval_batches(len(self.data.eval), self.options.eval_batch_size)
        for rows, is_counted in batches:
            pairs = [self.data.eval[row] for row in rows]
            batch_loss, chosen, rejected = self.loss(self.collate(pairs))
            if not is_counted:
                continue
            correct = chosen > rejected
            sums += torch.stack([batch_loss, correct.sum(), chosen.sum(), rejected.sum()]).cpu()
            kinds = [pair["kind"] for pair in pairs]
            pairs_of.update(kinds)
            correct_of.update(
                kind for kind, right in zip(kinds, correct.tolist(), strict=True) if right
            )
        self.engine.train()
        *sums_everywhere, count = sum_over_ranks(*sums.tolist(), pairs_of.total())
        loss_mean, accuracy, chosen_mean, rejected_mean = (
            mean(total, count) for total in sums_everywhere
        )
        self.kept["accuracy"] = accuracy
        report.write(
            self.evaluation(
                step=step,
                epoch=epoch,
                epochs=epochs,
                in_epoch=in_epoch,
                loss=loss_mean,
                chosen=chosen_mean,
                rejected=rejected_mean,
                accuracy=accuracy,
                pairs=int(count),
            )
        )
        for kind in sorted(set(self.data.eval["kind"]) - {None}):
            right, of = sum_over_ranks(correct_of[kind], pairs_of[kind])
            report.note(f"held-out pairs of kind {kind}: {right:.0f} of {of:.0f} right")
