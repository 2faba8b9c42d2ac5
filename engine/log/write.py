"""The lines that we write into training.log.

With the wording of DeepSpeed-Chat where it has the line, so that its users' scripts keep working;
`metrics`, `phase`, `note`, `warning` and `step_finished` are ours. `engine.log.read` reads them,
and `engine.log.entries` puts those of a step or an evaluation together.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

# Between two attempts to write on a full disk.
_SECONDS_BETWEEN_LOOKS = 5.0


SEPARATOR = "-" * 85
METRIC_NAME = re.compile(r"[a-z_][a-z0-9_]*(/[A-Za-z0-9_.-]+)*")


def write_line(stream: TextIO, line: str) -> None:
    """Put one line into the log by a single write, so that ranks never tear each other's lines."""
    text = _one_line(line) + "\n"
    try:
        descriptor = stream.fileno()
    except (AttributeError, OSError):  # An in-memory stream.
        stream.write(text)
        return
    stream.flush()
    write_all(descriptor, text.encode("utf-8", "replace"))


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of `content`; on a full disk wait for space: the run pauses instead of failing."""
    while content:
        try:
            content = content[os.write(descriptor, content) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            time.sleep(_SECONDS_BETWEEN_LOOKS)


def _one_line(text: str) -> str:
    return r"\n".join(text.splitlines())


def exact(value: float | None) -> str:
    if value is None:
        return "NA"
    return str(int(value)) if isinstance(value, int) else repr(float(value))


def six_digits(value: float | None) -> str:
    return exact(value) if value is None or isinstance(value, int) else f"{value:.6g}"


def rate_text(value: float) -> str:
    """Operations per second; "NA" for nan, of families without a known shape."""
    return "NA" if math.isnan(value) else f"{value:.2f}"


def running_training(total_iters: int | None = None) -> str:
    """Header of the training loop; PPO gives its number of optimizer steps."""
    steps = "" if total_iters is None else f" (total_iters={total_iters})"
    return f"***** Running training{steps} *****"


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
    rates = ", ".join(exact(float(rate)) for rate in learning_rates)
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


def perplexity(perplexity: float | None, loss: float | None) -> str:
    """Result of an SFT evaluation, after its header; None where no row was held out."""
    return f"ppl: {exact(perplexity)}, loss: {exact(loss)}"


def step_loss(epoch: int, step: int, rank: int, loss: float) -> str:
    """One rank's loss in one SFT step; epoch and step count from 0."""
    return f"Epoch: {epoch}, Step: {step}, Rank: {rank}, loss = {exact(loss)}"


def throughput(
    parameters_b: float | None,
    latency_s: float,
    tflops: float,
    samples_per_s: float,
    batch_size: int,
    sequence_length: int,
) -> str:
    """Speed of a micro batch in step 1 or 2; samples per second are those of one device.

    `tflops` may be nan, where it is not known.
    """
    parameters = "NA" if parameters_b is None else f"{parameters_b:.3f} B"
    return (
        f"Model Parameters: {parameters}, Latency: {latency_s:.2f}s, TFLOPs: {rate_text(tflops)}, "
        f"Samples/sec: {samples_per_s:.2f}, Time/seq {latency_s / batch_size:.2f}s, "
        f"Batch Size: {batch_size}, Sequence Length: {sequence_length}"
    )


def reward_scores(chosen: float | None, rejected: float | None, accuracy: float | None) -> str:
    """Result of a reward evaluation, after its header; None where no pair was held out."""
    return (
        f"chosen_last_scores (higher is better) : {exact(chosen)}, "
        f"rejected_last_scores (lower is better) : {exact(rejected)}, "
        f"acc (higher is better) : {exact(accuracy)}"
    )


def reward_scores_at(
    step: int, chosen: float | None, rejected: float | None, accuracy: float | None
) -> str:
    """Result of a reward evaluation in the middle of an epoch, at an optimizer step."""
    margin = None if chosen is None or rejected is None else chosen - rejected
    return (
        f"Iter {step}: c_scores: {exact(chosen)}, r_scores: {exact(rejected)}, "
        f"diff: {exact(margin)}, acc: {exact(accuracy)}"
    )


def epoch_loss(epoch: int, epochs: int, loss: float) -> str:
    """Mean training loss of an epoch, counted from 1."""
    return f"Epoch {epoch}/{epochs} with loss {exact(loss)}"


def dpo_scores(chosen: float | None, rejected: float | None, loss: float | None) -> str:
    """Result of a DPO evaluation, after its header; None where no pair was held out."""
    return f"chosen: {exact(chosen)}, rejected: {exact(rejected)}, loss: {exact(loss)}"


def skipped_both(actor: bool, critic: bool) -> str:
    """Notice that an overflow of either engine made both skip their step."""
    who = " and ".join(name for name, over in (("actor", actor), ("critic", critic)) if over)
    return f"OVERFLOW: {who} overflow, skipping both actor and critic steps"


def prompts_printed(step: int, rank: int, prompts: Sequence[str]) -> str:
    """A batch of prompts. Never read back: such text may hold anything, even our own lines."""
    return f"--- prompt --> step={step}, rank={rank}, {list(prompts)}"


def answers_printed(step: int, rank: int, answers: Sequence[str]) -> str:
    """The answers to `prompts_printed`, and like it never read back."""
    return f"--- ans    --> step={step}, rank={rank}, {list(answers)}"


def metrics(step: int, values: Mapping[str, float | None]) -> str:
    """Any quantities of a step, by their names in metrics.jsonl, such as `rewards/correct/mean`.

    Six digits are enough for a log; metrics.jsonl has them all.

    Raises:
        ValueError: a name that would not be read back.
    """
    for name in values:
        if not METRIC_NAME.fullmatch(name) or name in ("kind", "step", "offset"):
            raise ValueError(
                f"metric {name!r}: use lower case and underscores, not kind, step or offset; "
                "after a / also capitals, dots and hyphens"
            )
    pairs = [f"step: {step}", *(f"{name}: {six_digits(x)}" for name, x in values.items())]
    return f"Metrics => {', '.join(pairs)}"


def phase(name: str, percent: int | None = None) -> str:
    """What the step does before or between training, such as `tokenising`."""
    return f"Phase => {_one_line(name)}" + ("" if percent is None else f" {percent} %")


def note(text: str) -> str:
    """Information for the reader of the log."""
    return f"Note => {_one_line(text)}"


def warning(text: str) -> str:
    """Something that needs attention."""
    return f"Warning => {_one_line(text)}"


def step_finished(model: str) -> str:
    """The last line of a step, with the folder of its model."""
    return f"Step finished => model: {_one_line(model)}"
