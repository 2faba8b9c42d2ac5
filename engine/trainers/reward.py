"""Step 2: the reward model, trained to score chosen answers above rejected ones."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from engine import training_log
from engine.algorithms.preference import gather_last, pairwise_loss, pairwise_loss_all_tokens
from engine.config.deepspeed import deepspeed_config, role_layout
from engine.data.batches import GlobalBatches, PairCollator, row_lengths
from engine.distributed import device, rank, sum_over_ranks, world_size
from engine.models.adapters import save_adapters
from engine.models.load import resize_for
from engine.models.lora import add_lora, describe_lora, parameter_groups
from engine.models.reward import RewardModel
from engine.models.save import save_model
from engine.planning.flops import training_flops
from engine.planning.shapes import ModelShape
from engine.precision import dtype_name
from engine.trainers.context import BatchPlan, StepContext, length_of_training
from engine.trainers.engines import (
    backward,
    engine_step,
    learning_rates,
    training_engine,
    zero3_loading,
)
from engine.trainers.watchdog import Watchdog


class RewardTrainer:
    """Trains a scalar score on pairs (InstructGPT, equation 1); accuracy on held-out pairs."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        config, report, options = context.config, context.report, context.config.reward

        # 1. The tokenizer and the data.
        from_sft = config.models.reward == "sft"
        source = context.sft_model() if from_sft else context.resolve_model(config.models.reward)
        self.source = source
        self.tokenizer = context.load_tokenizer(source)
        self.data = context.build_data(self.tokenizer, "reward")
        self.collate = PairCollator(self.tokenizer.pad_token_id)
        lengths = row_lengths(self.data.train, "chosen_ids", "rejected_ids")
        self.batches = GlobalBatches(lengths, options.batch_size, config.seed)
        self.total_steps = length_of_training(options, self.batches, options.batch_size)

        # 2. The model: in ZeRO-3 shards, with adapters, where asked. Its head always trains.
        report.phase("loading the model")
        self.plan = BatchPlan.of(options, world_size())
        engine_config = deepspeed_config(
            dtype=dtype_name(context.dtype),
            micro_batch_size=self.plan.micro_batch_size,
            accumulation=self.plan.accumulation,
            ranks=world_size(),
            max_gradient_norm=options.max_gradient_norm,
            monitor=context.monitor("reward"),
            **role_layout(config, "critic"),
        )
        with zero3_loading(engine_config):
            model = RewardModel.from_pretrained(
                source,
                context.dtype,
                dropout=config.critic.dropout,
                trust_remote_code=config.models.trust_remote_code,
                seed=config.seed,
            )
            resize_for(model.model, self.tokenizer)
        self.shape = ModelShape.from_config(model.config.to_dict())
        if config.critic.gradient_checkpointing:
            model.model.activation_checkpointing_enable()
        if config.critic.lora.rank:
            model = add_lora(model, config.critic.lora)
            report.note(describe_lora(model))

        # 3. The engine.
        groups = parameter_groups(
            model, options.learning_rate, options.weight_decay, config.critic.lora.learning_rate
        )
        self.engine = training_engine(model, engine_config, groups, options, self.total_steps)
        self.checkpoints = context.checkpoints({"reward": self.engine})
        self.watchdog = Watchdog(report, {"critic": self.engine})
        self.accuracy = math.nan
        self.epoch_losses: list[float] = []

    def train(self) -> bool:
        """Run all optimizer steps, with evaluations before, between and after epochs.

        Goes on after the newest checkpoint, if there is one.

        Returns:
            whether all steps are done; else a stop was asked for.
        """
        options, report = self.context.config.reward, self.context.report
        per_epoch = len(self.batches)
        report.line(training_log.running_training())
        resumed = self.checkpoints.resume() or {"step": 0, **self.state()}
        self.accuracy, self.epoch_losses = resumed["accuracy"], resumed["epoch_losses"]
        if resumed["step"] == 0:
            self.evaluate(epoch=0, step=-1)
        for step in range(resumed["step"], self.total_steps):
            epoch, index = divmod(step, per_epoch)
            if index == 0:
                report.line(training_log.beginning_of_epoch(epoch + 1, options.epochs, per_epoch))
                self.epoch_losses = []
            self.epoch_losses.append(self.train_step(step, self.batches.epoch(epoch)[index]))
            last = index + 1 == per_epoch or step + 1 == self.total_steps
            if last:
                mean = sum(self.epoch_losses) / len(self.epoch_losses)
                report.line(training_log.epoch_loss(epoch + 1, options.epochs, mean))
            if last or (options.eval_interval and (step + 1) % options.eval_interval == 0):
                self.evaluate(epoch + 1, step, in_epoch=not last)
            if self.checkpoints.after_step(step + 1, self.state, self.accuracy):
                return False
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the engine."""
        return {"accuracy": self.accuracy, "epoch_losses": self.epoch_losses}

    def train_step(self, step: int, rows: list[int]) -> float:
        """One optimizer step on a global batch of pairs; returns the mean loss."""
        config, report = self.context.config, self.context.report
        started = time.perf_counter()

        # 1. Forward and backward of this rank's micro batches.
        micro = self.plan.micro_batch_size
        cuts = self.batches.local_micro_batches(rows, rank(), world_size(), micro)
        totals = torch.zeros(4, dtype=torch.float64)
        flops, tokens, width = 0.0, 0, 0
        for cut in cuts:
            batch = self.collate([self.data.train[row] for row in cut])
            loss, chosen, rejected = self.loss(batch)
            backward(self.engine, loss, len(rows))
            gradient_norm = engine_step(self.engine)
            correct = (chosen > rejected).sum()
            totals += torch.stack([loss, correct, chosen.sum(), rejected.sum()]).detach().cpu()
            flops += training_flops(
                self.shape,
                *batch["input_ids"].shape,
                checkpointing=config.critic.gradient_checkpointing,
                frozen_base=config.critic.lora.only,
                head="score",
            )
            tokens += int(batch["attention_mask"].sum())
            width = max(width, batch["input_ids"].shape[1])

        # 2. The report, over all ranks.
        *sums, tokens_everywhere = sum_over_ranks(*totals.tolist(), tokens)
        loss_mean, accuracy, chosen_mean, rejected_mean = (total / len(rows) for total in sums)
        seconds = time.perf_counter() - started
        pairs = sum(len(cut) for cut in cuts)
        report.line(
            training_log.throughput(
                self.shape.parameters / 1e9,
                seconds,
                flops / seconds / 1e12,
                pairs / seconds,
                pairs,
                width,
            )
        )
        report.metrics(
            step,
            {
                "loss": loss_mean,
                "accuracy": accuracy,
                "margin": chosen_mean - rejected_mean,
                "chosen": chosen_mean,
                "rejected": rejected_mean,
                "learning_rate": learning_rates(self.engine)[0],
                "gradient_norm": gradient_norm,
                "tokens_per_s": tokens_everywhere / seconds,
                "total_steps": self.total_steps,
            },
        )
        if (step + 1) % config.logging.optimizer_interval == 0:
            report.optimizer(self.engine)
        self.watchdog.check(step, {"loss": loss_mean, "gradient_norm": gradient_norm})
        return loss_mean

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, chosen scores `(pairs,)` and rejected scores `(pairs,)` of a batch."""
        options = self.context.config.reward
        ids, mask = batch["input_ids"].to(device()), batch["attention_mask"].to(device())
        values = self.engine(input_ids=ids, attention_mask=mask)
        chosen, rejected = gather_last(values, mask).chunk(2)
        if options.loss == "last_token":
            loss = pairwise_loss(chosen, rejected)
        else:
            loss = pairwise_loss_all_tokens(
                *values.chunk(2),
                *(part for pair in zip(ids.chunk(2), mask.chunk(2), strict=True) for part in pair),
            )
        if options.score_penalty:
            penalty = torch.cat((chosen, rejected)).square().sum() / 2
            loss = loss + options.score_penalty * penalty
        return loss, chosen, rejected

    @torch.no_grad()
    def evaluate(self, epoch: int, step: int, in_epoch: bool = False) -> None:
        """Accuracy on the held-out pairs over all ranks.

        Args:
            epoch: from 1; 0 before training.
            step: the last optimizer step done, from 0; -1 before training.
            in_epoch: in the middle of an epoch, not at its end.
        """
        options, report = self.context.config.reward, self.context.report
        self.engine.eval()
        sums = torch.zeros(4, dtype=torch.float64)
        pairs_of, correct_of = Counter[str](), Counter[str]()
        for rows in self.context.eval_batches(len(self.data.eval), options.eval_batch_size):
            pairs = [self.data.eval[row] for row in rows]
            loss, chosen, rejected = self.loss(self.collate(pairs))
            correct = chosen > rejected
            sums += torch.stack([loss, correct.sum(), chosen.sum(), rejected.sum()]).cpu()
            kinds = [pair.get("kind") or "pair" for pair in pairs]
            pairs_of.update(kinds)
            correct_of.update(
                kind for kind, right in zip(kinds, correct.tolist(), strict=True) if right
            )
        self.engine.train()
        *sums_everywhere, count = sum_over_ranks(*sums.tolist(), pairs_of.total())
        loss_mean, self.accuracy, chosen_mean, rejected_mean = (
            total / max(1.0, count) for total in sums_everywhere
        )
        scores = chosen_mean, rejected_mean, self.accuracy
        if in_epoch:
            report.line(training_log.reward_scores_at(step, *scores))
        else:
            report.line(training_log.evaluating("reward", epoch, options.epochs))
            report.line(training_log.reward_scores(*scores))
        report.record(
            {
                "kind": "reward_eval",
                "step": step,
                "epoch": epoch,
                "loss": loss_mean,
                "chosen": chosen_mean,
                "rejected": rejected_mean,
                "accuracy": self.accuracy,
                "pairs": int(count),
            }
        )
        kinds = sorted(set(self.data.eval["kind"])) if "kind" in self.data.eval.column_names else []
        for kind in kinds:
            right, of = sum_over_ranks(correct_of[kind], pairs_of[kind])
            report.note(f"held-out pairs of kind {kind}: {right:.0f} of {of:.0f} right")

    def save(self) -> None:
        """Write the model as a complete Hugging Face folder."""
        report = self.context.report
        report.line(training_log.saving_model())
        folder = self.context.folder / "model"
        save_model(self.engine.module, self.tokenizer, folder)
        if self.context.config.critic.lora.export:
            save_adapters(self.engine.module, self.source, self.context.folder / "adapters")
        report.line(training_log.step_finished(str(folder)))
