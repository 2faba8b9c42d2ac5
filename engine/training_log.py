"""The grammar of training.log: one module that both writes and reads each of its lines.

Written, with the wording of DeepSpeed-Chat so that its users' scripts keep working:
`running_training`, `beginning_of_epoch`, `saving_model`, `optimizer_step`, `evaluating`,
`perplexity`, `step_loss`, `throughput`, `reward_scores`, `reward_scores_at`, `epoch_loss`,
`dpo_scores`, `PPOStep`, `skipped_both`, `prompts_printed`, `answers_printed`; and with words of our
own: `metrics`, `phase`, `note`, `warning`, `step_finished`. Each gives a line (`PPOStep.lines()`
several), and `write_line` puts a line into the log, whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

# a number as Python prints it, or one of the words that stand where a number is missing
_NUMBER = r"([-+]?(?:[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?|nan|inf)|NA)"
_COUNT = r"([0-9]{1,15})"
_SEPARATOR = "-" * 85


def write_line(stream: TextIO, line: str) -> None:
    """Put one line into the log by a single write, so that ranks never tear each other's lines."""
    text = _one_line(line) + "\n"
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # a stream in memory
        stream.write(text)
        return
    stream.flush()
    os.write(descriptor, text.encode("utf-8", "replace"))


def _one_line(text: str) -> str:
    return r"\n".join(text.splitlines())


def _number_text(value: float | None) -> str:
    if value is None:
        return "NA"
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def running_training(total_iters: int | None = None) -> str:
    """Header of the training loop; PPO tells its number of optimizer steps."""
    told = "" if total_iters is None else f" (total_iters={total_iters})"
    return f"***** Running training{told} *****"


def beginning_of_epoch(epoch: int, epochs: int, batches: int, generation: bool = False) -> str:
    """Start of an epoch, counted from 1, with its micro batches (PPO: generation batches)."""
    kind = "Generation" if generation else "Micro"
    return f"Beginning of Epoch {epoch}/{epochs}, Total {kind} Batches {batches}"


def saving_model() -> str:
    """Notice before the model folder is written."""
    return "saving model ..."


def optimizer_step(
    step: int, skipped: int, learning_rates: Sequence[float], betas: Sequence[Sequence[float]]
) -> str:
    """An engine's optimizer steps so far, in DeepSpeed's wording.

    In PPO the actor's line comes first, then the critic's of the same step.
    """
    stamp = time.strftime("%Y-%m-%d %H:%M:%S,000")
    rates = ", ".join(_number_text(float(rate)) for rate in learning_rates)
    momentum = ", ".join(str(tuple(pair)) for pair in betas)
    return (
        f"[{stamp}] [INFO] [logging.py:96:log_dist] [Rank 0] "
        f"step={step}, skipped={skipped}, lr=[{rates}], mom=[{momentum}]"
    )


def evaluating(what: str, epoch: int, epochs: int) -> str:
    """Header of an evaluation: of `perplexity` (SFT), `reward` or, in DPO, `rewards`.

    Epoch 0 is before training.
    """
    return f"***** Evaluating {what}, Epoch {epoch}/{epochs} *****"


def perplexity(perplexity: float, loss: float) -> str:
    """Result of an SFT evaluation, after its header."""
    return f"ppl: {_number_text(perplexity)}, loss: {_number_text(loss)}"


def step_loss(epoch: int, step: int, rank: int, loss: float) -> str:
    """One rank's loss in one SFT step; epoch and step count from 0."""
    return f"Epoch: {epoch}, Step: {step}, Rank: {rank}, loss = {_number_text(loss)}"


def throughput(
    parameters_b: float | None,
    latency_s: float,
    tflops: float,
    samples_per_s: float,
    batch_size: int,
    sequence_length: int,
) -> str:
    """Speed of a micro batch in step 1 or 2; samples a second are those of one device."""
    parameters = "NA" if parameters_b is None else f"{parameters_b:.3f} B"
    return (
        f"Model Parameters: {parameters}, Latency: {latency_s:.2f}s, TFLOPs: {tflops:.2f}, "
        f"Samples/sec: {samples_per_s:.2f}, Time/seq {latency_s / batch_size:.2f}s, "
        f"Batch Size: {batch_size}, Sequence Length: {sequence_length}"
    )


def reward_scores(chosen: float, rejected: float, accuracy: float) -> str:
    """Result of a reward evaluation, after its header."""
    return (
        f"chosen_last_scores (higher is better) : {_number_text(chosen)}, "
        f"rejected_last_scores (lower is better) : {_number_text(rejected)}, "
        f"acc (higher is better) : {_number_text(accuracy)}"
    )


def reward_scores_at(step: int, chosen: float, rejected: float, accuracy: float) -> str:
    """Result of a reward evaluation in the middle of an epoch, at an optimizer step."""
    return (
        f"Iter {step}: c_scores: {_number_text(chosen)}, r_scores: {_number_text(rejected)}, "
        f"diff: {_number_text(chosen - rejected)}, acc: {_number_text(accuracy)}"
    )


def epoch_loss(epoch: int, epochs: int, loss: float) -> str:
    """Mean training loss of an epoch, counted from 1."""
    return f"Epoch {epoch}/{epochs} with loss {_number_text(loss)}"


def dpo_scores(chosen: float, rejected: float, loss: float) -> str:
    """Result of a DPO evaluation, after its header."""
    return (
        f"chosen: {_number_text(chosen)}, rejected: {_number_text(rejected)}, "
        f"loss: {_number_text(loss)}"
    )


@dataclass(frozen=True)
class PPOStep:
    """What PPO tells of one generation step; rewards and samples are over all ranks.

    `batch_size` and `samples_per_s` count the answers of all ranks; `parameters_b` are in billions,
    `bandwidth_gb_s` in GB/s.
    """

    epoch: int
    step: int
    ppo_epoch: int
    actor_loss: float
    critic_loss: float
    unsupervised_loss: float
    reward: float
    reward_ema: float
    e2e_s: float
    generate_s: float
    train_s: float
    tflops: float
    generate_tflops: float
    train_tflops: float
    batch_size: int
    sequence_length: int
    answer_length_limit: int
    bandwidth_gb_s: float | None = None
    actor_parameters_b: float | None = None
    critic_parameters_b: float | None = None

    def lines(self) -> list[str]:
        """The block of lines, the dashes that close it included."""
        actor, critic = (
            "NA" if parameters is None else f"{parameters:.3f} B"
            for parameters in (self.actor_parameters_b, self.critic_parameters_b)
        )
        bandwidth = -1.0 if self.bandwidth_gb_s is None else self.bandwidth_gb_s
        return [
            f"Epoch: {self.epoch} | Step: {self.step} | PPO Epoch: {self.ppo_epoch} | "
            f"Actor Loss: {_number_text(self.actor_loss)} | "
            f"Critic Loss: {_number_text(self.critic_loss)} | "
            f"Unsupervised Loss: {_number_text(self.unsupervised_loss)}",
            f"End-to-End => Latency: {self.e2e_s:.2f}s, TFLOPs: {self.tflops:.2f}, "
            f"Samples/sec: {self.batch_size / self.e2e_s:.2f}, "
            f"Time/seq {self.e2e_s / self.batch_size:.2f}s, "
            f"Batch Size: {self.batch_size}, Total Seq. Length: {self.sequence_length}",
            f"Generation => Latency: {self.generate_s:.2f}s, "
            f"Per-token Latency {self.generate_s / self.answer_length_limit * 1000:.2f} ms, "
            f"TFLOPs: {self.generate_tflops:.2f}, BW: {bandwidth:.2f} GB/sec, "
            f"Answer Seq. Length: {self.answer_length_limit}",
            f"Training   => Latency: {self.train_s:.2f}s, TFLOPs: {self.train_tflops:.2f}",
            f"Actor Model Parameters => {actor}, Critic Model Parameters => {critic}",
            f"Average reward score: {_number_text(self.reward)} | "
            f"EMA reward score: {_number_text(self.reward_ema)}",
            _SEPARATOR,
        ]


def skipped_both(actor: bool, critic: bool) -> str:
    """Notice that an overflow of either engine made both skip their step."""
    who = " and ".join(name for name, over in (("actor", actor), ("critic", critic)) if over)
    return f"OVERFLOW: {who} overflow, skipping both actor and critic steps"


def prompts_printed(step: int, rank: int, prompts: Sequence[str]) -> str:
    """A batch of prompts. Never read back: such text may hold anything, also our own lines."""
    return f"--- prompt --> step={step}, rank={rank}, {list(prompts)}"


def answers_printed(step: int, rank: int, answers: Sequence[str]) -> str:
    """The answers to `prompts_printed`, and like it never read back."""
    return f"--- ans    --> step={step}, rank={rank}, {list(answers)}"


def metrics(step: int, values: Mapping[str, float | None]) -> str:
    """Any quantities of a step, by their names in metrics.jsonl (lower case, underscores)."""
    pairs = [f"step: {step}", *(f"{name}: {_number_text(x)}" for name, x in values.items())]
    return f"Metrics => {', '.join(pairs)}"


def phase(name: str, percent: int | None = None) -> str:
    """What the step is busy with before or between training, such as `tokenising`."""
    return f"Phase => {_one_line(name)}" + ("" if percent is None else f" {percent} %")


def note(text: str) -> str:
    """Something a person should know."""
    return f"Note => {_one_line(text)}"


def warning(text: str) -> str:
    """Something a person should look after."""
    return f"Warning => {_one_line(text)}"


def step_finished(model: str) -> str:
    """The last line of a step, with the folder of its model."""
    return f"Step finished => model: {_one_line(model)}"
