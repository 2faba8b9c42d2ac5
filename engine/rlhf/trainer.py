"""Step 3: learning from rewards, by PPO (InstructGPT, section 3.5) or without a critic."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.algorithms.kl import AdaptiveKLController
from engine.algorithms.log_probs import entropy, token_log_probs
from engine.algorithms.masks import ended_with_eos
from engine.algorithms.policy import Objective, ValueLoss, policy_loss, value_loss
from engine.config.schema import RoleConfig
from engine.config.steps import RoleName
from engine.data.batches import GlobalBatches, PromptCollator, row_lengths
from engine.data.phases import PromptColumns
from engine.distributed import device, max_over_ranks, rank, sum_over_ranks, world_size
from engine.generation.sampling import Generation
from engine.log import write
from engine.log.entries import PPOStep
from engine.models.adapters import save_adapters
from engine.models.save import save_model
from engine.planning.flops import training_flops
from engine.report import append
from engine.rewards.functions import RewardFunctions
from engine.rlhf import advantages
from engine.rlhf.experience import Experience
from engine.rlhf.groups import has_spread, with_replacements
from engine.rlhf.mixture import Mixture
from engine.rlhf.models import RLHFEngine
from engine.rlhf.report import (
    StepTimes,
    answer_metrics,
    decoded,
    function_metrics,
    group_metrics,
    rollout_records,
    step_speed,
)
from engine.rlhf.rewards import Rewards
from engine.rlhf.rollouts import GenerationCost, Prompts, Rollouts, rank_seed, with_answers
from engine.rlhf.scoring import FunctionRewards
from engine.rlhf.update_stats import UpdateStats, UpdateTotals
from engine.trainers.context import StepContext, length_of_training
from engine.trainers.engines import backward, engine_step, learning_rates
from engine.trainers.overflow import aligned_overflow
from engine.trainers.watchdog import Watchdog

_REWARD_EMA_DECAY = 0.9
# Rollout batches answered before training to find mean and standard deviation of the scores.
_NORMALIZATION_BATCHES = 2


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step learns from.

    Attributes:
        micro_batches: rows of this rank's experience.
        tokens: that are learnt from, of all ranks.
        answers: that are learnt from, of all ranks.
    """

    micro_batches: list[list[int]]
    tokens: float
    answers: float


class PPOTrainer:
    """Generates answers, scores them, and moves the actor, and the critic if there is one."""

    def __init__(self, context: StepContext) -> None:
        self.context = context
        config, self.options = context.config, context.config.ppo
        options, self.algorithm = self.options, config.algorithm

        # 1. The tokenizer and the prompts.
        self.tokenizer = context.load_tokenizer(context.sft_model())
        self.data = context.build_data(self.tokenizer, "ppo")
        self.collate = PromptCollator(self.tokenizer.pad_token_id)
        lengths = row_lengths(self.data.train, "prompt_ids")
        rollout = options.rollout_batch_size
        prompts = rollout // self.algorithm.answers_per_prompt
        self.batches = GlobalBatches(lengths, prompts, config.seed)
        self.total_steps = length_of_training(options, self.batches, prompts)
        context.warn_of_warmup(self.total_steps)
        self.optimizer_steps = self.total_steps * options.updates_per_step

        # 2. The models, what answers with them, and the text beside the answers.
        self.engine = RLHFEngine(
            context,
            self.tokenizer,
            self.optimizer_steps,
            has_critic=self.algorithm.has_critic,
            has_reward=config.rewarded_by_model,
        )
        self.rollouts = Rollouts(context, self.engine, self.tokenizer)
        self.shuffler = torch.Generator().manual_seed(rank_seed(config.seed))
        # Of prompts that take the place of others, in groups without spread.
        self.spare_prompts = torch.Generator().manual_seed(rank_seed(config.seed) + 1)
        has_text = bool(config.data.unsupervised_sources)
        self.mixture = Mixture(context, self.engine, self.tokenizer) if has_text else None

        # 3. What adapts while training.
        entries = config.rewards.functions
        functions = [entry for entry in entries if entry.kind == "function"]
        model_weights = [entry.weight for entry in entries if entry.kind == "model"]
        self.rewards = Rewards(config, [entry.weight for entry in functions], sum(model_weights))
        self.functions = (
            FunctionRewards(
                RewardFunctions(functions),
                [entry.name for entry in functions],
                PromptColumns(config),
                self.tokenizer,
            )
            if functions
            else None
        )
        self.kl_controller = (
            AdaptiveKLController(self.algorithm.kl_coef, options.kl_target, options.kl_horizon)
            if options.kl_target
            else None
        )
        self.reward_ema: float | None = None
        self.tokens_seen = 0.0
        self.checkpoints = context.checkpoints(self.engine.trained)
        self.watchdog = Watchdog(context.report, self.engine.trained)

    @property
    def kl_coef(self) -> float:
        """The current weight of the KL to the reference."""
        return self.kl_controller.value if self.kl_controller else self.algorithm.kl_coef

    @property
    def objective(self) -> Objective:
        """What the loss of the actor is."""
        algorithm = self.algorithm
        return Objective(
            ratio=algorithm.ratio,
            surrogate=algorithm.surrogate,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            clip_delta=self.context.config.rlhf.clip_delta,
            aggregation=algorithm.aggregation,
            longest_answer=self.options.max_answer_length,
            kl_coef=self.kl_coef if algorithm.kl_in == "loss" else 0.0,
            kl_estimator=algorithm.kl_estimator,
        )

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the engines, of this rank."""
        return {
            "sampler": self.rollouts.sampler.get_state(),
            "shuffler": self.shuffler.get_state(),
            "texts_read": self.mixture.texts_read if self.mixture else 0,
            "spare_prompts": self.spare_prompts.get_state(),
            "reward_ema": self.reward_ema,
            "tokens_seen": self.tokens_seen,
            "normalization": self.rewards.normalization,
            "kl_controller": self.kl_controller.state_dict() if self.kl_controller else None,
            "actor_ema": self.engine.actor_ema.shards if self.engine.actor_ema else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over what `state` gave."""
        self.rollouts.sampler.set_state(state["sampler"])
        self.shuffler.set_state(state["shuffler"])
        if self.mixture:
            self.mixture.texts_read = state["texts_read"]
        # Checkpoints of before 0.2 have neither.
        if "spare_prompts" in state:
            self.spare_prompts.set_state(state["spare_prompts"])
        self.tokens_seen = state.get("tokens_seen", 0.0)
        self.reward_ema = state["reward_ema"]
        self.rewards.normalization = state["normalization"]
        if self.kl_controller and state["kl_controller"]:
            self.kl_controller.load_state_dict(state["kl_controller"])
        if self.engine.actor_ema and state["actor_ema"]:
            self.engine.actor_ema.load(state["actor_ema"])

    def train(self) -> bool:
        """Run all generation steps, or those after the newest checkpoint if there is one.

        Returns:
            whether all steps are done; else a stop was asked for.
        """
        report, per_epoch = self.context.report, len(self.batches)
        resumed = self.checkpoints.resume()
        if resumed:
            self.load_state(resumed.state)
        elif self.options.normalize_reward and self.engine.reward is not None:
            self.measure_scores()
        report.line(write.running_training(self.optimizer_steps))
        first = resumed.step if resumed else 0
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
        own = self.own_rows(rows)
        experience, cost = self.generate_experience(self.repeated_prompts(own), own)
        experience, cost, resampled = self.with_spread(experience, cost)

        # 2. What the update moves towards.
        experience = self.add_targets(experience)

        # 3. Inner epochs of updates, each over the answers in a fresh order.
        train_started = time.perf_counter()
        stats = UpdateStats()
        for minibatch in self.minibatches(experience):
            self.update(experience, minibatch, stats)
        # Reads the device, so that all its work is in the time.
        updates = stats.over_ranks(self.objective)
        now = time.perf_counter()

        # 4. The report.
        times = StepTimes(now - started, cost.seconds, now - train_started)
        self.report(step, epoch, experience, updates, times, cost, resampled)

    def own_rows(self, rows: Sequence[int]) -> list[int]:
        """This rank's prompts of a global batch."""
        (own,) = self.batches.local_micro_batches(rows, rank(), world_size())
        return own

    def prompt_batches(self, rows: Sequence[int]) -> list[Prompts]:
        """This rank's prompts of a global batch, each as often as it is to be answered."""
        return self.repeated_prompts(self.own_rows(rows))

    def repeated_prompts(self, rows: Sequence[int]) -> list[Prompts]:
        """Prompts, each as often as it is to be answered, left padded, in generation batches.

        A whole group is one rank's, next to each other, also where generation batches cut it.
        """
        answers = self.algorithm.answers_per_prompt
        repeated = [row for row in rows for _ in range(answers)]
        size = self.options.generation_batch_size or len(repeated)
        batches = []
        for start in range(0, len(repeated), size):
            cut = [self.data.train[row] for row in repeated[start : start + size]]
            batch = self.collate(cut)
            batches.append((batch["input_ids"].to(device()), batch["attention_mask"].to(device())))
        return batches

    def with_spread(
        self, experience: Experience, cost: GenerationCost
    ) -> tuple[Experience, GenerationCost, int]:
        """Replace groups whose rewards are all equal, which teach nothing (DAPO, section 3.2).

        Other prompts are drawn for them, at most so many times as `rlhf.resampling_tries` says. A
        collective of all ranks, which draw as many prompts as the one that needs most.

        Returns:
            the experience, what generation took in all, and how many groups this rank replaced.
        """
        size, total = self.algorithm.answers_per_prompt, 0
        for _ in range(self.algorithm.resampling_tries):
            is_good = has_spread(self.rewards(experience), size)
            wanted = int(max_over_ranks((~is_good).sum()))
            if not wanted:
                break
            drawn = torch.randint(len(self.data.train), (wanted,), generator=self.spare_prompts)
            spare = drawn.tolist()
            fresh, more = self.generate_experience(self.repeated_prompts(spare), spare)
            is_fresh_good = has_spread(self.rewards(fresh), size)
            experience, replaced = with_replacements(
                experience, is_good, fresh, is_fresh_good, self.tokenizer.pad_token_id
            )
            cost = cost + more
            total += len(replaced)
        return experience, cost, total

    def generate_experience(
        self, batches: Sequence[Prompts], rows: Sequence[int] = ()
    ) -> tuple[Experience, GenerationCost]:
        """Answer prompts and compute what is learnt from the answers.

        Args:
            batches: prompts, left padded, `(batch, prompt)`, each with its attention mask.
            rows: the places in the data of the prompts that are repeated, for reward functions.

        Returns:
            the experience of all batches together, and what generation took.
        """
        generations, cost = self.rollouts.answer(batches)
        # what the four models say of them
        with self.engine.evaluation():
            parts = [
                self._experience(prompts, generation)
                for prompts, generation in zip(batches, generations, strict=True)
            ]
        experience = Experience.concatenate(parts, self.tokenizer.pad_token_id)
        if self.functions is not None:
            numbers = [
                self.data.train[row]["row"]
                for row in rows
                for _ in range(self.algorithm.answers_per_prompt)
            ]
            rewards = self.functions(experience, numbers)
            experience = replace(experience, function_rewards=rewards)
        return experience, cost

    @torch.no_grad()
    def _experience(self, prompts: Prompts, generation: Generation) -> Experience:
        engine, temperature = self.engine, self.options.temperature
        answers, width = generation.answers, generation.answers.shape[1]
        ids, full_mask, mask = with_answers(prompts, generation)
        logits = engine.answer_logits(engine.actor, ids, full_mask, width)
        return Experience(
            ids=ids,
            attention_mask=full_mask,
            mask=mask,
            log_probs=token_log_probs(logits, answers, temperature),
            ref_log_probs=engine.ref_log_probs(ids, full_mask, answers),
            values=None if engine.critic is None else engine.values(ids, full_mask, width),
            entropies=entropy(logits, temperature),
            scores=None if engine.reward is None else engine.scores(ids, full_mask),
            ended=ended_with_eos(answers, self.rollouts.sampling.eos_ids),
        )

    def measure_scores(self) -> None:
        """Let rewards be normalised by the scores of the unchanged actor's answers."""
        report = self.context.report
        report.phase("measuring scores of the SFT model")
        scores = []
        for rows in self.batches.epoch(0)[:_NORMALIZATION_BATCHES]:
            batches = self.prompt_batches(rows)
            generations, _ = self.rollouts.answer(batches)
            for prompts, generation in zip(batches, generations, strict=True):
                ids, attention_mask, _ = with_answers(prompts, generation)
                scores.append(self.engine.scores(ids, attention_mask))
        mean, std = self.rewards.normalize_by(scores)
        report.note(f"scores of the SFT model: mean {mean:.4f}, deviation {std:.4f}")

    def add_targets(self, experience: Experience) -> Experience:
        """The experience with what the updates move towards; a collective of all ranks."""
        if self.context.config.rlhf.mask_truncated:
            experience = replace(experience, learnt=experience.ended)
        kl_coef = self.kl_coef if self.algorithm.kl_in == "reward" else 0.0
        return advantages.add_targets(
            experience, self.rewards(experience), kl_coef, self.options, self.algorithm
        )

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
        lengths, learnt = experience.lengths, experience.learnt_lengths
        totals = sum_over_ranks(
            *(sum(learnt[row] for row in rows) for rows in minibatches),
            *(sum(learnt[row] > 0 for row in rows) for rows in minibatches),
        )
        for index, rows in enumerate(minibatches):
            ordered = sorted(rows, key=lambda row: -sum(lengths[row]))
            micro_batches = [ordered[at : at + micro] for at in range(0, size, micro)]
            yield Minibatch(micro_batches, totals[index], totals[len(minibatches) + index])

    def update(self, experience: Experience, minibatch: Minibatch, stats: UpdateStats) -> None:
        """One optimizer step of actor and critic on a minibatch, cut into micro batches.

        None where all its answers were cut off and are masked.
        """
        if not minibatch.tokens:
            self.context.report.warning(
                "no answer of this update is learnt from, as all were cut off at "
                "ppo.max_answer_length: the update is left out"
            )
            return
        for rows in minibatch.micro_batches:
            self.train_rlhf(experience.rows(rows), minibatch.tokens, stats, minibatch.answers)
        if self.engine.actor_ema and self.engine.actor.was_step_applied():
            self.engine.actor_ema.update()

    def train_rlhf(
        self, batch: Experience, tokens: float, stats: UpdateStats, answers: float = 0.0
    ) -> None:
        """Forward, backward and (at the last micro batch) step of the engines that train.

        Args:
            batch: some rows of the experience.
            tokens: of the whole minibatch on all ranks, which losses are means over.
            stats: added to.
            answers: of the whole minibatch on all ranks, where the actor's loss is a mean over
                answers.
        """
        engine, options = self.engine, self.options
        width, mask, objective = batch.mask.shape[1], batch.loss_mask, self.objective
        total = objective.normalizer(tokens, answers)

        # 1. The actor, with the mixture loss in the same backward pass.
        logits = engine.answer_logits(engine.actor, batch.ids, batch.attention_mask, width)
        log_probs = token_log_probs(logits, batch.answers, options.temperature)
        policy = policy_loss(
            log_probs, batch.log_probs, batch.advantages, mask, objective, batch.ref_log_probs
        )
        loss = policy.loss_sum
        if self.mixture is not None:
            loss = loss + self._mixture_loss(self.mixture, total, stats)
        backward(engine.actor, loss, total)
        stats.flops += self._training_flops("actor", batch.ids.shape)
        align = options.align_overflow and engine.critic is not None
        if not align:
            stats.actor_gradient_norm = engine_step(engine.actor)

        # 2. The critic.
        critic: ValueLoss | None = None
        if engine.critic is not None:
            values = engine.values(batch.ids, batch.attention_mask, width)
            critic = value_loss(values, batch.values, batch.returns, mask, options.value_clip)
            backward(engine.critic, critic.loss_sum, tokens)
            stats.flops += self._training_flops("critic", batch.ids.shape)
            if align:
                self._step_together(stats)
            else:
                stats.critic_gradient_norm = engine_step(engine.critic)
        stats.add(policy, critic)

    def _step_together(self, stats: UpdateStats) -> None:
        """Step actor and critic; where one of them overflowed, neither moves."""
        actor, critic = self.engine.actor, self.engine.critic
        with aligned_overflow(actor, critic) as overflowed:
            stats.actor_gradient_norm = engine_step(actor)
            stats.critic_gradient_norm = engine_step(critic)
        if any(overflowed):
            self.context.report.line(write.skipped_both(*overflowed))

    def _mixture_loss(self, mixture: Mixture, total: float, stats: UpdateStats) -> Tensor:
        """The mixture loss of one micro batch of text, beside a sum that `total` divides."""
        batch = mixture.next_batch()
        weighted, loss_sum, count = mixture.loss(batch, total)
        stats.sums["unsupervised_loss"] += loss_sum
        stats.sums["unsupervised_tokens"] += count
        stats.flops += self._training_flops("actor", batch["input_ids"].shape)
        return weighted

    def _training_flops(self, role: RoleName, rows_and_tokens: torch.Size) -> float:
        """Operations of a forward and a backward pass of actor or critic."""
        layout: RoleConfig = getattr(self.context.config, role)
        is_actor = role == "actor"
        rows, tokens = rows_and_tokens
        return training_flops(
            self.engine.actor_shape if is_actor else self.engine.critic_shape,
            rows,
            tokens,
            checkpointing=layout.gradient_checkpointing,
            frozen_base=layout.lora.only,
            head="lm" if is_actor else "score",
        )

    def report(
        self,
        step: int,
        epoch: int,
        experience: Experience,
        updates: UpdateTotals,
        times: StepTimes,
        cost: GenerationCost,
        resampled: int,
    ) -> None:
        """Write the lines, metrics and rollouts of one step; averages are over all ranks."""
        report, engine, options = self.context.report, self.engine, self.options
        count = len(experience) * world_size()
        rewards = self.rewards(experience)

        # 1. The quantities.
        answers = answer_metrics(experience, rewards, self.rewards.at_bound(experience))
        reward = answers["reward"]
        previous = reward if self.reward_ema is None else self.reward_ema
        self.reward_ema = _REWARD_EMA_DECAY * previous + (1 - _REWARD_EMA_DECAY) * reward
        critic_learning_rate = None if engine.critic is None else learning_rates(engine.critic)[0]
        reported = PPOStep(
            step=step,
            epoch=epoch,
            ppo_epoch=options.inner_epochs,
            speed=step_speed(engine, experience, updates.flops, cost, times, self.context.dtype),
            **answers,
            reward_ema=self.reward_ema,
            kl_coef=self.kl_coef,
            **updates.metrics,
            actor_learning_rate=learning_rates(engine.actor)[0],
            critic_learning_rate=critic_learning_rate,
            tokens_per_s=answers["answer_length"] * count / times.generate_s,
            total_steps=self.total_steps,
            e2e_s=times.e2e_s,
            generate_s=times.generate_s,
            train_s=times.train_s,
            more=self._more_metrics(experience, rewards, updates, resampled),
        )
        metrics = {name: x for name, x in reported.quantities().items() if x is not None}

        # 2. The log, TensorBoard and the rollouts.
        report.write(reported)
        done = options.updates_per_step * (step + 1)
        if done % self.context.config.logging.optimizer_interval < options.updates_per_step:
            for trained in engine.trained.values():
                report.optimizer(trained)
        losses = {
            name: metrics[name] for role in engine.trained if (name := f"{role}_loss") in metrics
        }
        summed = {f"{name}_sum": loss * updates.tokens for name, loss in losses.items()}
        report.events(step, {"reward": reward, **losses, **summed})
        self._write_rollouts(step, experience, rewards)

        # 3. What acts on the quantities.
        norms = [f"{role}_gradient_norm" for role in engine.trained]
        self.watchdog.check(
            step,
            {name: metrics[name] for name in ("reward", "kl", *norms, *losses) if name in metrics},
        )
        self.watchdog.watch_rollouts(metrics)
        if self.kl_controller:
            self.kl_controller.update(answers["kl"], count)

    def _more_metrics(
        self, experience: Experience, rewards: Tensor, updates: UpdateTotals, resampled: int
    ) -> dict[str, float | None]:
        """TRL's metrics, of all but PPO on a reward model alone; a collective of all ranks."""
        (tokens,) = sum_over_ranks(experience.attention_mask.sum())
        self.tokens_seen += tokens
        if self.algorithm.has_critic and experience.function_rewards is None:
            return {}
        more = group_metrics(experience, rewards, self.algorithm.answers_per_prompt)
        if self.functions is not None:
            more |= function_metrics(experience, self.functions.names)
        low, high = updates.clipped
        more["clip_ratio/low_mean"], more["clip_ratio/high_mean"] = low, high
        more["clip_ratio/region_mean"] = updates.metrics["clip_fraction"]
        more["policy_loss"] = updates.metrics["actor_loss"]
        more["num_tokens"] = self.tokens_seen
        if self.algorithm.resampling_tries:
            (more["resampled_groups"],) = sum_over_ranks(resampled)
        return more

    def _write_rollouts(self, step: int, experience: Experience, rewards: Tensor) -> None:
        """Append rank 0's answers to rollouts.jsonl; print them if asked."""
        logging, report = self.context.config.logging, self.context.report
        is_printed = logging.print_answers and step % logging.print_answers_interval == 0
        if rank() != 0 and not is_printed:
            return
        prompts, answers = decoded(experience, self.tokenizer)
        if is_printed:
            report.every_rank(write.prompts_printed(step, rank(), prompts))
            report.every_rank(write.answers_printed(step, rank(), answers))
        if rank() == 0:
            records = rollout_records(
                step,
                experience,
                rewards,
                prompts,
                answers,
                self.algorithm.answers_per_prompt,
                () if self.functions is None else self.functions.names,
            )
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
            append(self.context.folder / "rollouts.jsonl", "".join(lines))

    def save(self) -> None:
        """Write actor, critic and the actor's average as complete Hugging Face folders."""
        report, folder = self.context.report, self.context.folder
        report.line(write.saving_model())
        if self.engine.critic is not None:
            save_model(self.engine.critic.module, self.tokenizer, folder / "critic")
        if self.engine.actor_ema:
            average = self.engine.actor_ema.values
            save_model(self.engine.actor.module, self.tokenizer, folder / "actor_ema", average)
        save_model(self.engine.actor.module, self.tokenizer, folder / "actor")
        bases = {
            "actor": self.context.sft_model(),
            "critic": self.context.trained_reward_model(),
        }
        for role, engine in self.engine.trained.items():
            if getattr(self.context.config, role).lora.export:
                save_adapters(engine.module, bases[role], folder / f"{role}_adapters")
        report.line(write.step_finished(str(folder / "actor")))
