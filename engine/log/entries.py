"""What steps report, each as one value: lines of training.log and a record of metrics.jsonl.

A field of a step's value is a quantity under the name that metrics.jsonl has for it, in the order
of the `Metrics =>` line. docs/metrics.md says what each means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Protocol

from engine.log import write
from engine.log.write import SEPARATOR, exact, rate_text

Values = Mapping[str, float | str | None]

_NOT_QUANTITIES = ("step", "epoch", "ppo_epoch", "speed", "more")


class Entry(Protocol):
    """One thing to report."""

    def lines(self) -> list[str]:
        """The lines of training.log."""

    def record(self) -> Values:
        """The record of metrics.jsonl."""


@dataclass(frozen=True)
class TrainingSpeed:
    """What an optimizer step of step 1 or 2 took on this rank.

    Attributes:
        parameters: of the model.
        seconds: of the step.
        flops: of this rank; nan for families without a known shape.
        rows: of this rank.
        width: tokens of the widest micro batch.
    """

    parameters: int
    seconds: float
    flops: float
    rows: int
    width: int

    def line(self) -> str:
        """The line that DeepSpeed-Chat writes."""
        return write.throughput(
            self.parameters / 1e9,
            self.seconds,
            self.flops / self.seconds / 1e12,
            self.rows / self.seconds,
            self.rows,
            self.width,
        )


@dataclass(frozen=True)
class TrainingStep:
    """An optimizer step of step 1 or 2; the subclass has the quantities."""

    step: int
    speed: TrainingSpeed

    def quantities(self) -> dict[str, float | None]:
        """The quantities by name."""
        return _without(self, *_NOT_QUANTITIES)

    def lines(self) -> list[str]:
        """The line of speed and the line of metrics."""
        return [self.speed.line(), write.metrics(self.step, self.quantities())]

    def record(self) -> Values:
        """The quantities, with all digits."""
        return {"kind": "metrics", "step": self.step, **self.quantities()}


@dataclass(frozen=True)
class SFTStep(TrainingStep):
    """An optimizer step of step 1."""

    loss: float
    learning_rate: float
    gradient_norm: float | None
    tokens_per_s: float
    trained_token_share: float
    total_steps: int


@dataclass(frozen=True)
class PairStep(TrainingStep):
    """An optimizer step on pairs: of the reward model or of DPO."""

    loss: float
    accuracy: float
    margin: float
    chosen: float
    rejected: float
    learning_rate: float
    gradient_norm: float | None
    tokens_per_s: float
    total_steps: int


@dataclass(frozen=True)
class PerplexityEvaluation:
    """Perplexity and loss on held-out rows; None where no row was held out.

    Attributes:
        step: the last optimizer step done, from 0; -1 before training.
        epoch: from 1; 0 before training.
        epochs: of the whole training.
    """

    step: int
    epoch: int
    epochs: int
    ppl: float | None
    loss: float | None

    def lines(self) -> list[str]:
        """The header and the result."""
        header = write.evaluating("perplexity", self.epoch, self.epochs)
        return [header, write.perplexity(self.ppl, self.loss)]

    def record(self) -> Values:
        """The result."""
        return {"kind": "eval", **_without(self, "epochs")}


@dataclass(frozen=True)
class PairEvaluation:
    """Scores, loss and accuracy on held-out pairs; None where no pair was held out.

    Attributes:
        step: the last optimizer step done, from 0; -1 before training.
        epoch: from 1; 0 before training.
        epochs: of the whole training.
        in_epoch: in the middle of an epoch, not at its end.
        pairs: how many were evaluated, on all ranks.
    """

    step: int
    epoch: int
    epochs: int
    in_epoch: bool
    loss: float | None
    chosen: float | None
    rejected: float | None
    accuracy: float | None
    pairs: int

    def record(self) -> Values:
        """The result."""
        return {"kind": "reward_eval", **_without(self, "epochs", "in_epoch")}


@dataclass(frozen=True)
class RewardEvaluation(PairEvaluation):
    """Of the reward model."""

    def lines(self) -> list[str]:
        """The result: in the middle of an epoch without a header, as the original writes it."""
        scores = self.chosen, self.rejected, self.accuracy
        if self.in_epoch:
            return [write.reward_scores_at(self.step, *scores)]
        header = write.evaluating("reward", self.epoch, self.epochs)
        return [header, write.reward_scores(*scores)]


@dataclass(frozen=True)
class DPOEvaluation(PairEvaluation):
    """Of DPO, whose scores are the implicit rewards."""

    def lines(self) -> list[str]:
        """Header and result as the original writes them, and the accuracy, which it does not."""
        found = [
            write.evaluating("rewards", self.epoch, self.epochs),
            write.dpo_scores(self.chosen, self.rejected, self.loss),
        ]
        if self.step >= 0:
            found.append(write.metrics(self.step, {"eval_accuracy": self.accuracy}))
        return found


@dataclass(frozen=True)
class PPOSpeed:
    """What a generation step took.

    Attributes:
        batch_size: answers of all ranks.
        sequence_length: tokens of the widest row, its prompt included.
        answer_length_limit: tokens of the widest answer.
        tflops: of this rank, over the whole step; nan, as the next three, where it is not known.
        generate_tflops: while answers are generated.
        train_tflops: while models are updated.
        bandwidth_gb_s: weights read in GB/s while answers are generated.
        actor_parameters_b: in billions.
        critic_parameters_b: in billions; None without a critic.
    """

    batch_size: int
    sequence_length: int
    answer_length_limit: int
    tflops: float
    generate_tflops: float
    train_tflops: float
    bandwidth_gb_s: float = math.nan
    actor_parameters_b: float | None = None
    critic_parameters_b: float | None = None


_OF_CRITIC = (
    "explained_variance", "critic_loss", "value_clip_fraction", "critic_gradient_norm",
    "critic_learning_rate",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PPOStep:
    """A generation step of step 3 and the updates on its answers, over all ranks.

    The quantities of the critic are left out of the metrics where its loss is None: where there is
    no critic.

    Attributes:
        epoch: from 0.
        ppo_epoch: how often the updates went over the answers.
        more: further quantities, by name, such as those of a way to find advantages.
    """

    step: int
    epoch: int
    ppo_epoch: int
    speed: PPOSpeed
    reward: float
    score_mean: float
    score_std: float
    reward_at_clip_share: float
    kl: float
    entropy: float
    explained_variance: float | None = None
    answer_length: float
    eos_share: float
    empty_answers: int
    reward_ema: float
    kl_coef: float
    actor_loss: float | None
    critic_loss: float | None = None
    unsupervised_loss: float | None
    approx_kl: float | None
    clip_fraction: float | None
    value_clip_fraction: float | None = None
    first_ratio_mean: float | None
    ratio_mean: float | None
    ratio_max: float
    actor_gradient_norm: float
    critic_gradient_norm: float | None = None
    actor_learning_rate: float
    critic_learning_rate: float | None = None
    tokens_per_s: float
    total_steps: int
    e2e_s: float
    generate_s: float
    train_s: float
    more: Mapping[str, float | None] = field(default_factory=dict)

    def quantities(self) -> dict[str, float | None]:
        """The quantities by name."""
        left_out = _NOT_QUANTITIES + (_OF_CRITIC if self.critic_loss is None else ())
        return {**_without(self, *left_out), **self.more}

    def block(self) -> list[str]:
        """The lines that DeepSpeed-Chat writes, the dashes that close them included."""
        speed = self.speed
        actor, critic = (
            "NA" if parameters is None else f"{parameters:.3f} B"
            for parameters in (speed.actor_parameters_b, speed.critic_parameters_b)
        )
        bandwidth = -1.0 if math.isnan(speed.bandwidth_gb_s) else speed.bandwidth_gb_s
        return [
            f"Epoch: {self.epoch} | Step: {self.step} | PPO Epoch: {self.ppo_epoch} | "
            f"Actor Loss: {exact(self.actor_loss)} | Critic Loss: {exact(self.critic_loss)} | "
            f"Unsupervised Loss: {exact(self.unsupervised_loss or 0.0)}",
            f"End-to-End => Latency: {self.e2e_s:.2f}s, TFLOPs: {rate_text(speed.tflops)}, "
            f"Samples/sec: {speed.batch_size / self.e2e_s:.2f}, "
            f"Time/seq {self.e2e_s / speed.batch_size:.2f}s, "
            f"Batch Size: {speed.batch_size}, Total Seq. Length: {speed.sequence_length}",
            f"Generation => Latency: {self.generate_s:.2f}s, "
            f"Per-token Latency {self.generate_s / speed.answer_length_limit * 1000:.2f} ms, "
            f"TFLOPs: {rate_text(speed.generate_tflops)}, BW: {bandwidth:.2f} GB/sec, "
            f"Answer Seq. Length: {speed.answer_length_limit}",
            f"Training   => Latency: {self.train_s:.2f}s, TFLOPs: {rate_text(speed.train_tflops)}",
            f"Actor Model Parameters => {actor}, Critic Model Parameters => {critic}",
            f"Average reward score: {exact(self.reward)} | "
            f"EMA reward score: {exact(self.reward_ema)}",
            SEPARATOR,
        ]

    def lines(self) -> list[str]:
        """The block and the line of metrics."""
        return [*self.block(), write.metrics(self.step, self.quantities())]

    def record(self) -> Values:
        """The quantities, with all digits."""
        return {"kind": "metrics", "step": self.step, **self.quantities()}


def quantity_names(kind: type[SFTStep | PairStep | PPOStep]) -> list[str]:
    """The quantities that a kind of step writes, without those of `more`."""
    return [field.name for field in fields(kind) if field.name not in _NOT_QUANTITIES]


def _without(entry: object, *names: str) -> dict[str, float | None]:
    return {name: value for name, value in vars(entry).items() if name not in names}
