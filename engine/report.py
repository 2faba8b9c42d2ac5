"""What a step writes while it runs: training.log (its stdout), metrics.jsonl, TensorBoard."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from deepspeed import DeepSpeedEngine

from engine.distributed import rank
from engine.log import write
from engine.log.entries import Entry, Values


class Report:
    """Writes for rank 0; on other ranks everything but `every_rank` is silent."""

    def __init__(self, folder: Path, tensorboard: Path | None = None) -> None:
        self._metrics_file = folder / "metrics.jsonl"
        self._silent = rank() != 0
        self._events = None
        if tensorboard is not None and not self._silent:
            # Takes seconds to import, so only if it is used.
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(tensorboard))

    def line(self, line: str) -> None:
        """Write a line into the log."""
        if not self._silent:
            self.every_rank(line)

    def every_rank(self, line: str) -> None:
        """Write a line into the log from any rank."""
        write.write_line(sys.stdout, line)

    def phase(self, name: str, percent: int | None = None) -> None:
        """Name what the step is busy with."""
        self.line(write.phase(name, percent))

    def note(self, text: str) -> None:
        """Log information for the reader of the log."""
        self.line(write.note(text))

    def warning(self, text: str) -> None:
        """Log something that needs attention."""
        self.line(write.warning(text))

    def write(self, entry: Entry) -> None:
        """Write what a step reports into the log and metrics.jsonl."""
        for line in entry.lines():
            self.line(line)
        self.record(entry.record())

    def optimizer(self, engine: DeepSpeedEngine) -> None:
        """Write an engine's steps, skipped steps and learning rates, in DeepSpeed's wording."""
        groups = engine.optimizer.param_groups
        self.line(
            write.optimizer_step(
                engine.global_steps,
                engine.skipped_steps,
                [group["lr"] for group in groups],
                [group["betas"] for group in groups],
            )
        )

    def record(self, values: Values) -> None:
        """Append one JSON object to metrics.jsonl; nan and infinities become strings."""
        if self._silent:
            return
        plain = {name: _finite(value) for name, value in values.items()}
        append(self._metrics_file, json.dumps(plain) + "\n")

    def events(self, step: int, values: Mapping[str, float]) -> None:
        """Write scalars of the pipeline to TensorBoard, where it is on."""
        if self._events is None:
            return
        for name, value in values.items():
            self._events.add_scalar(name, value, global_step=step)
        self._events.flush()


def append(file: Path, text: str) -> None:
    """Add whole lines to a file; on a full disk, wait for room."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        write.write_all(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
