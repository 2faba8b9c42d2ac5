"""Step 3: PPO on the reward model's score (InstructGPT, section 3.5; PPO, arXiv 1707.06347)."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor

from engine.algorithms.advantages import generalized_advantages
from engine.algorithms.kl import AdaptiveKLController
from engine.algorithms.language_modeling import causal_lm_loss
from engine.algorithms.log_probs import entropy, token_log_probs
from engine.algorithms.masks import ended_with_eos, length_mask, masked_moments, whiten
from engine.algorithms.policy import explained_variance, policy_loss, value_loss
from engine.algorithms.rewards import shape_scores, token_rewards
from engine.data.batches import GlobalBatches, PromptCollator, SftCollator, row_lengths
from engine.distributed import device, rank, sum_over_ranks, world_size
from engine.generation.hybrid import HybridEngine
from engine.generation.sampling import Generation, Sampling
from engine.log import write
from engine.log.entries import PPOSpeed, PPOStep
from engine.models.adapters import save_adapters
from engine.models.save import save_model
from engine.planning.flops import (
    forward_flops,
    generation_flops,
    training_flops,
    weight_bytes_read_per_token,
)
from engine.report import append
from engine.rlhf.experience import Experience
from engine.rlhf.models import RLHFEngine
from engine.rlhf.update_stats import UpdateStats, UpdateTotals
from engine.trainers.context import StepContext, length_of_training
from engine.trainers.engines import backward, engine_step, learning_rates
from engine.trainers.overflow import aligned_overflow
from engine.trainers.watchdog import Watchdog

# Each rank samples from a stream of its own.
_RANK_SEED_STRIDE = 1_000_003
_REWARD_EMA_DECAY = 0.9
# Rollout batches answered before training to find the mean and deviation of the scores.
_NORMALIZATION_BATCHES = 2


@dataclass(frozen=True)
class GenerationCost:
    """What the answers of a rollout batch took on this rank; a pass reads all weights once."""

    seconds: float
    flops: float
    passes: int


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step learns from.

    Attributes:
        micro_batches: rows of this rank's experience.
        tokens: of the answers on all ranks together.
    """

    micro_batches: list[list[int]]
    tokens: float


class PPOTrainer:
    """Generates answers, scores them, and moves actor and critic by clipped updates."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        config, self.options = context.config, context.config.ppo
        options = self.options

        # 1. The tokenizer and the prompts.
        self.tokenizer = context.load_tokenizer(context.sft_model())
        self.data = context.build_data(self.tokenizer, "ppo")
        self.collate = PromptCollator(self.tokenizer.pad_token_id)
        lengths = row_lengths(self.data.train, "prompt_ids")
        rollout = options.rollout_batch_size
        self.batches = GlobalBatches(lengths, rollout, config.seed)
        self.total_steps = length_of_training(options, self.batches, rollout)
        context.warn_of_warmup(self.total_steps)
        optimizer_steps = self.total_steps * options.updates_per_step

        # 2. The engines.
        self.engine = RLHFEngine(context, self.tokenizer, optimizer_steps)
        self.sampling = Sampling(
            max_new_tokens=options.max_answer_length,
            temperature=options.temperature,
            eos_ids=(self.tokenizer.eos_token_id,),
            pad_id=self.tokenizer.pad_token_id,
        )
        own_seed = config.seed + _RANK_SEED_STRIDE * rank()
        self.sampler = torch.Generator(device()).manual_seed(own_seed)
        self.shuffler = torch.Generator().manual_seed(own_seed)
        self.hybrid = HybridEngine(self.engine.actor, config.hybrid_engine)
        self._told_hybrid_engine = False
        self.unsupervised = self._unsupervised_batches()
        self.texts_read = 0

        # 3. What adapts while training.
        self.kl_controller = (
            AdaptiveKLController(options.kl_coef, options.kl_target, options.kl_horizon)
            if options.kl_target
            else None
        )
        self.reward_ema: float | None = None
        self.normalization: tuple[float, float] | None = None
        engines = {"actor": self.engine.actor, "critic": self.engine.critic}
        self.checkpoints = context.checkpoints(engines)
        self.watchdog = Watchdog(context.report, engines)

    @property
    def kl_coef(self) -> float:
        """The current weight of the KL in the reward."""
        return self.kl_controller.value if self.kl_controller else self.options.kl_coef

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the engines, of this rank."""
        return {
            "sampler": self.sampler.get_state(),
            "shuffler": self.shuffler.get_state(),
            "texts_read": self.texts_read,
            "reward_ema": self.reward_ema,
            "normalization": self.normalization,
            "kl_controller": self.kl_controller.state_dict() if self.kl_controller else None,
            "actor_ema": self.engine.actor_ema.shards if self.engine.actor_ema else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.sampler.set_state(state["sampler"])
        self.shuffler.set_state(state["shuffler"])
        self.texts_read = state["texts_read"]
        self.reward_ema = state["reward_ema"]
        self.normalization = state["normalization"]
        if self.kl_controller and state["kl_controller"]:
            self.kl_controller.load_state_dict(state["kl_controller"])
        if self.engine.actor_ema and state["actor_ema"]:
            self.engine.actor_ema.load(state["actor_ema"])

    def train(self) -> bool:
        """Run all generation steps; goes on after the newest checkpoint, if there is one.

        Returns:
            whether all steps are done; else a stop was asked for.
        """
        report, per_epoch = self.context.report, len(self.batches)
        resumed = self.checkpoints.resume()
        if resumed:
            self.load_state(resumed)
        elif self.options.normalize_reward:
            self.normalization = self.measure_scores()
        optimizer_steps = self.total_steps * self.options.updates_per_step
        report.line(write.running_training(optimizer_steps))
        first = resumed["step"] if resumed else 0
        for step in range(first, self.total_steps):
            epoch, index = divmod(step, per_epoch)
            if index == 0:
                report.line(
                    write.beginning_of_epoch(
                        epoch + 1, self.options.epochs, per_epoch, generation=True
                    )
                )
            self.train_step(step, epoch, self.batches.epoch(epoch)[index])
            if self.checkpoints.after_step(step + 1, self.state, self.reward_ema):
                return False
        return True

    def train_step(self, step: int, epoch: int, rows: Sequence[int]) -> None:
        """Answer a global batch of prompts, then update actor and critic on the answers."""
        started = time.perf_counter()

        # 1. Answers and their scores.
        experience, cost = self.generate_experience(self.prompt_batches(rows))

        # 2. What the update moves towards.
        experience = self.add_targets(experience)

        # 3. Inner epochs of updates, each over the answers in a fresh order.
        train_started = time.perf_counter()
        stats = UpdateStats()
        for minibatch in self.minibatches(experience):
            self.update(experience, minibatch, stats)
        # Reads the device, so that all its work is in the time.
        updates = stats.over_ranks()
        train_s = time.perf_counter() - train_started

        # 4. The report.
        e2e_s = time.perf_counter() - started
        times = {"e2e_s": e2e_s, "generate_s": cost.seconds, "train_s": train_s}
        self.report(step, epoch, experience, updates, times, cost)

    def prompt_batches(self, rows: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """This rank's prompts of a global batch, left padded, a generation batch at a time."""
        size = self.options.generation_batch_size or len(rows) // world_size()
        batches = []
        for cut in self.batches.local_micro_batches(rows, rank(), world_size(), size):
            batch = self.collate([self.data.train[row] for row in cut])
            batches.append((batch["input_ids"].to(device()), batch["attention_mask"].to(device())))
        return batches

    def generate_experience(
        self, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Experience, GenerationCost]:
        """Answer prompts and compute what PPO needs to know of the answers.

        Args:
            batches: prompts, left padded, `(batch, prompt)`, each with its attention mask.

        Returns:
            the experience of all batches together, and what generation took.
        """
        generations, cost = self.answer(batches)
        # what the four models say of them
        with self.engine.evaluation():
            parts = [
                self._experience(prompts, mask, generation)
                for (prompts, mask), generation in zip(batches, generations, strict=True)
            ]
        return Experience.concatenate(parts, self.tokenizer.pad_token_id), cost

    def answer(
        self, batches: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[list[Generation], GenerationCost]:
        """Answer prompts, with the actor laid out for generation where the hybrid engine is on.

        Args:
            batches: prompts, left padded, `(batch, prompt)`, each with its attention mask.
        """
        started = time.perf_counter()
        with self.hybrid.rollout():
            generations = [
                self.hybrid.generate(prompts, mask, self.sampling, self.sampler)
                for prompts, mask in batches
            ]
        seconds = time.perf_counter() - started
        self._tell_hybrid_engine()
        widths = [generation.answers.shape[1] for generation in generations]
        flops = sum(
            generation_flops(self.engine.actor_shape, *prompts.shape, width)
            for (prompts, _), width in zip(batches, widths, strict=True)
        )
        return generations, GenerationCost(seconds, flops, sum(widths))

    @torch.no_grad()
    def _experience(
        self, prompts: Tensor, attention_mask: Tensor, generation: Generation
    ) -> Experience:
        engine, temperature = self.engine, self.options.temperature
        answers, width = generation.answers, generation.answers.shape[1]
        ids, full_mask, mask = _with_answers(prompts, attention_mask, generation)
        logits = engine.answer_logits(engine.actor, ids, full_mask, width)
        return Experience(
            ids=ids,
            attention_mask=full_mask,
            mask=mask,
            log_probs=token_log_probs(logits, answers, temperature),
            ref_log_probs=engine.ref_log_probs(ids, full_mask, answers),
            values=engine.values(ids, full_mask, width),
            entropies=entropy(logits, temperature),
            scores=engine.scores(ids, full_mask),
            ended=ended_with_eos(answers, self.sampling.eos_ids),
        )

    def _tell_hybrid_engine(self) -> None:
        """Say in the log, once, why the hybrid engine switched itself off."""
        if self.hybrid.off_reason is not None and not self._told_hybrid_engine:
            self._told_hybrid_engine = True
            self.context.report.warning(
                f"the hybrid engine switched itself off: {self.hybrid.off_reason}"
            )

    def measure_scores(self) -> tuple[float, float]:
        """Mean and deviation of the scores of the unchanged actor's answers, over all ranks."""
        self.context.report.phase("measuring scores of the SFT model")
        scores = []
        for rows in self.batches.epoch(0)[:_NORMALIZATION_BATCHES]:
            batches = self.prompt_batches(rows)
            generations, _ = self.answer(batches)
            for batch, generation in zip(batches, generations, strict=True):
                ids, attention_mask, _ = _with_answers(*batch, generation)
                scores.append(self.engine.scores(ids, attention_mask))
        mean, variance = _moments(torch.cat(scores))
        std = max(math.sqrt(variance), 1e-6)
        self.context.report.note(f"scores of the SFT model: mean {mean:.4f}, deviation {std:.4f}")
        return float(mean), std

    def shaped_scores(self, experience: Experience) -> Tensor:
        """Scores normalised, penalised and clipped, `(batch,)`."""
        mean, std = self.normalization or (None, None)
        return shape_scores(
            experience.scores,
            experience.ended,
            mean=mean,
            std=std,
            missing_eos_penalty=self.options.missing_eos_penalty,
            clip=self.options.reward_clip,
        )

    def add_targets(self, experience: Experience) -> Experience:
        """The experience with advantages and returns; a collective of all ranks."""
        rewards = token_rewards(
            self.shaped_scores(experience),
            experience.log_probs,
            experience.ref_log_probs,
            experience.mask,
            self.kl_coef,
        )
        advantages, returns = generalized_advantages(
            rewards, experience.values, experience.mask, self.options.gamma, self.options.gae_lambda
        )
        if self.options.whiten_advantages:
            advantages = whiten(advantages, experience.mask)
        return replace(experience, advantages=advantages, returns=returns)

    def minibatches(self, experience: Experience) -> Iterator[Minibatch]:
        """What each optimizer step learns from, over all inner epochs; a collective of all ranks.

        Rows of about the same length share a micro batch, which is cut to its longest: less
        padding is computed, and the sum over the minibatch is the same.
        """
        size = self.options.batch_size // world_size()
        micro = self.engine.plan.micro_batch_size
        minibatches = []
        for _ in range(self.options.inner_epochs):
            order = torch.randperm(len(experience), generator=self.shuffler).tolist()
            minibatches += [order[start : start + size] for start in range(0, len(order), size)]
        lengths = experience.lengths
        tokens = sum_over_ranks(*(sum(lengths[row][1] for row in rows) for rows in minibatches))
        for rows, total in zip(minibatches, tokens, strict=True):
            ordered = sorted(rows, key=lambda row: -sum(lengths[row]))
            yield Minibatch([ordered[at : at + micro] for at in range(0, size, micro)], total)

    def update(self, experience: Experience, minibatch: Minibatch, stats: UpdateStats) -> None:
        """One optimizer step of actor and critic on a minibatch, cut into micro batches."""
        for rows in minibatch.micro_batches:
            self.train_rlhf(experience.rows(rows), minibatch.tokens, stats)
        if self.engine.actor_ema and self.engine.actor.was_step_applied():
            self.engine.actor_ema.update()

    def train_rlhf(self, batch: Experience, tokens: float, stats: UpdateStats) -> None:
        """Forward, backward and (at the last micro batch) step of both engines.

        Args:
            batch: some rows of the experience.
            tokens: of the whole minibatch on all ranks, which the losses are means over.
            stats: added to.
        """
        engine, options = self.engine, self.options
        width = batch.mask.shape[1]

        # 1. The actor, with the mixture loss in the same backward pass.
        logits = engine.answer_logits(engine.actor, batch.ids, batch.attention_mask, width)
        log_probs = token_log_probs(logits, batch.answers, options.temperature)
        policy = policy_loss(log_probs, batch.log_probs, batch.advantages, batch.mask, options.clip)
        loss = policy.loss_sum
        if self.unsupervised is not None:
            loss = loss + self.unsupervised_loss(tokens, stats)
        backward(engine.actor, loss, tokens)
        if not options.align_overflow:
            stats.actor_gradient_norm = engine_step(engine.actor)

        # 2. The critic.
        values = engine.values(batch.ids, batch.attention_mask, width)
        critic = value_loss(values, batch.values, batch.returns, batch.mask, options.value_clip)
        backward(engine.critic, critic.loss_sum, tokens)
        if options.align_overflow:
            with aligned_overflow(engine.actor, engine.critic) as overflowed:
                stats.actor_gradient_norm = engine_step(engine.actor)
                stats.critic_gradient_norm = engine_step(engine.critic)
            if any(overflowed):
                self.context.report.line(write.skipped_both(*overflowed))
        else:
            stats.critic_gradient_norm = engine_step(engine.critic)

        # 3. Sums for the report.
        stats.add(policy, critic)
        roles = self.context.config.actor, self.context.config.critic
        for role, shape, head in zip(
            roles, (engine.actor_shape, engine.critic_shape), ("lm", "score"), strict=True
        ):
            stats.flops += training_flops(
                shape,
                *batch.ids.shape,
                checkpointing=role.gradient_checkpointing,
                frozen_base=role.lora.only,
                head=head,
            )

    def unsupervised_loss(self, tokens: float, stats: UpdateStats) -> Tensor:
        """The mixture loss of one micro batch of text, scaled to stand beside a sum over `tokens`.

        Its mean is weighted by `unsupervised_coef` (the PPO-ptx gamma of InstructGPT, equation 2).
        """
        batch = {name: tensor.to(device()) for name, tensor in self.next_texts().items()}
        logits = self.engine.actor(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
        loss_sum, count = causal_lm_loss(logits, batch["labels"])
        micro_batches = self.engine.plan.accumulation * world_size()
        stats.sums["unsupervised_loss"] += loss_sum.detach()
        stats.sums["unsupervised_tokens"] += count
        stats.flops += training_flops(
            self.engine.actor_shape,
            *batch["input_ids"].shape,
            checkpointing=self.context.config.actor.gradient_checkpointing,
            frozen_base=self.context.config.actor.lora.only,
        )
        mean = loss_sum / count.clamp(min=1) / micro_batches
        return self.options.unsupervised_coef * mean * tokens

    def next_texts(self) -> dict[str, Tensor]:
        """This rank's next micro batch of unsupervised text; begins again at the end."""
        rows, batches = self.unsupervised
        epoch, index = divmod(self.texts_read, len(batches))
        self.texts_read += 1
        batch = batches.epoch(epoch)[index]
        (cut,) = batches.local_micro_batches(batch, rank(), world_size())
        return SftCollator(self.tokenizer.pad_token_id)([rows[row] for row in cut])

    def _unsupervised_batches(self) -> tuple[Dataset, GlobalBatches] | None:
        """Blocks of text and their micro batches, or None without unsupervised sources."""
        config, options = self.context.config, self.options
        if not config.data.unsupervised_sources:
            return None
        length = options.max_prompt_length + options.max_answer_length
        rows = self.context.text_blocks(self.tokenizer, length)
        size = self.engine.plan.micro_batch_size * world_size()
        batches = GlobalBatches([length] * len(rows), size, config.seed)
        length_of_training(options, batches, size)
        return rows, batches

    def report(
        self,
        step: int,
        epoch: int,
        experience: Experience,
        updates: UpdateTotals,
        times: dict[str, float],
        cost: GenerationCost,
    ) -> None:
        """Write the lines, metrics and rollouts of one step; averages are over all ranks."""
        report, engine = self.context.report, self.engine
        count = len(experience) * world_size()
        shaped = self.shaped_scores(experience)

        # 1. The quantities.
        answers = self.answer_metrics(experience, shaped)
        reward = answers["reward"]
        previous = reward if self.reward_ema is None else self.reward_ema
        self.reward_ema = _REWARD_EMA_DECAY * previous + (1 - _REWARD_EMA_DECAY) * reward
        reported = PPOStep(
            step=step,
            epoch=epoch,
            ppo_epoch=self.options.inner_epochs,
            speed=self.speed(experience, updates.flops, cost, times),
            **answers,
            reward_ema=self.reward_ema,
            kl_coef=self.kl_coef,
            **updates.metrics,
            actor_learning_rate=learning_rates(engine.actor)[0],
            critic_learning_rate=learning_rates(engine.critic)[0],
            tokens_per_s=answers["answer_length"] * count / times["generate_s"],
            total_steps=self.total_steps,
            **times,
        )
        metrics = reported.quantities()

        # 2. The log, TensorBoard and the rollouts.
        report.write(reported)
        done = self.options.updates_per_step * (step + 1)
        if done % self.context.config.logging.optimizer_interval < self.options.updates_per_step:
            report.optimizer(engine.actor)
            report.optimizer(engine.critic)
        losses = {name: metrics[name] for name in ("actor_loss", "critic_loss")}
        summed = {f"{name}_sum": loss * updates.tokens for name, loss in losses.items()}
        report.events(step, {"reward": reward, **losses, **summed})
        self.write_rollouts(step, experience, shaped)

        # 3. What acts on the quantities.
        watched = ("reward", "kl", "actor_gradient_norm", "critic_gradient_norm", *losses)
        self.watchdog.check(step, {name: metrics[name] for name in watched})
        self.watchdog.watch_rollouts(metrics)
        if self.kl_controller:
            self.kl_controller.update(answers["kl"], count)

    def answer_metrics(self, experience: Experience, shaped: Tensor) -> dict[str, float]:
        """What a step's answers were like, over all ranks; a collective of all ranks.

        Args:
            experience: with its returns.
            shaped: the rewards of the answers, `(batch,)`.
        """
        lengths, ended = experience.mask.sum(dim=1), experience.ended
        count = len(experience) * world_size()
        tokens, ended_count, empty, kl, entropies, at_bound = sum_over_ranks(
            lengths.sum(),
            ended.sum(),
            ((lengths == 1) & ended).sum(),
            experience.kl.sum(),
            (experience.entropies * experience.mask).sum(),
            (shaped.abs() >= self.options.reward_clip).sum(),
        )
        reward, _ = _moments(shaped)
        score_mean, score_variance = _moments(experience.scores)
        explained = explained_variance(experience.values, experience.returns, experience.mask)
        return {
            "reward": float(reward),
            "score_mean": float(score_mean),
            "score_std": math.sqrt(score_variance),
            "reward_at_clip_share": at_bound / count,
            "kl": kl / count,
            "entropy": entropies / tokens,
            "explained_variance": float(explained),
            "answer_length": tokens / count,
            "eos_share": ended_count / count,
            "empty_answers": int(empty),
        }

    def speed(
        self,
        experience: Experience,
        own_flops: float,
        cost: GenerationCost,
        times: dict[str, float],
    ) -> PPOSpeed:
        """What the step took."""
        engine, shape, width = self.engine, experience.ids.shape, experience.mask.shape[1]
        # Actor and reference, critic and reward model read each answer once.
        scoring = 2 * forward_flops(engine.actor_shape, *shape, logits_tokens=width)
        scoring += 2 * forward_flops(engine.critic_shape, *shape, head="score")
        element = torch.finfo(self.context.dtype).bits // 8
        moved = weight_bytes_read_per_token(engine.actor_shape, element) * cost.passes
        return PPOSpeed(
            batch_size=len(experience) * world_size(),
            sequence_length=shape[1],
            answer_length_limit=width,
            tflops=(cost.flops + own_flops + scoring) / times["e2e_s"] / 1e12,
            generate_tflops=cost.flops / times["generate_s"] / 1e12,
            train_tflops=own_flops / times["train_s"] / 1e12,
            bandwidth_gb_s=moved / times["generate_s"] / 1e9,
            actor_parameters_b=engine.actor_parameters / 1e9,
            critic_parameters_b=engine.critic_parameters / 1e9,
        )

    def write_rollouts(self, step: int, experience: Experience, rewards: Tensor) -> None:
        """Append rank 0's answers to rollouts.jsonl; print them if asked."""
        logging = self.context.config.logging
        printed = logging.print_answers and step % logging.print_answers_interval == 0
        if rank() != 0 and not printed:
            return
        start = experience.ids.shape[1] - experience.mask.shape[1]
        prompts, answers = [], []
        for ids, (prompt, answer) in zip(experience.ids.tolist(), experience.lengths, strict=True):
            for texts, tokens in (
                (prompts, ids[start - prompt : start]),
                (answers, ids[start : start + answer]),
            ):
                texts.append(self.tokenizer.decode(tokens, skip_special_tokens=True))
        if printed:
            every_rank = self.context.report.every_rank
            every_rank(write.prompts_printed(step, rank(), prompts))
            every_rank(write.answers_printed(step, rank(), answers))
        if rank() != 0:
            return
        columns = {
            "reward": rewards.tolist(),
            "score": experience.scores.tolist(),
            "kl": experience.kl.tolist(),
            "length": [answer for _, answer in experience.lengths],
            "ended": experience.ended.tolist(),
        }
        lines = []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            record = {"step": step, "prompt": prompt, "answer": answer}
            record |= {name: values[row] for name, values in columns.items()}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        append(self.context.folder / "rollouts.jsonl", "".join(lines))

    def save(self) -> None:
        """Write actor, critic and the actor's average as complete Hugging Face folders."""
        report, folder = self.context.report, self.context.folder
        report.line(write.saving_model())
        save_model(self.engine.critic.module, self.tokenizer, folder / "critic")
        if self.engine.actor_ema:
            average = self.engine.actor_ema.values
            save_model(self.engine.actor.module, self.tokenizer, folder / "actor_ema", average)
        save_model(self.engine.actor.module, self.tokenizer, folder / "actor")
        for name, module, base in (
            ("actor", self.engine.actor.module, self.context.sft_model()),
            ("critic", self.engine.critic.module, self.context.trained_reward_model()),
        ):
            if getattr(self.context.config, name).lora.export:
                save_adapters(module, base, folder / f"{name}_adapters")
        report.line(write.step_finished(str(folder / "actor")))


def _with_answers(
    prompts: Tensor, attention_mask: Tensor, generation: Generation
) -> tuple[Tensor, Tensor, Tensor]:
    """Prompts and their answers in one: ids and attention mask `(batch, prompt + answer)`.

    The third is true on the answer's tokens up to and with its first EOS, `(batch, answer)`: the
    EOS is an action, also where it is the only token.
    """
    answers = generation.answers
    mask = length_mask(generation.lengths, answers.shape[1])
    ids = torch.cat((prompts, answers), dim=1)
    return ids, torch.cat((attention_mask, mask.to(attention_mask.dtype)), dim=1), mask


def _moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one number per answer, over all answers of all ranks."""
    return masked_moments(values, torch.ones_like(values, dtype=torch.bool))
