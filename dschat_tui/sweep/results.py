"""What a cell measured, from the log of its last step; and its memory, sampled while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from dschat_tui.logs.quantities import title
from dschat_tui.machine import GIB, MIB, NoAnswer, query_gpus
from dschat_tui.sweep.state import Measured, Number
from engine.log import documents

# The first steps build caches, optimizer states and, with the hybrid engine, check it.
WARMUP_STEPS = 2

# Values of one record of a log, or of one row made of several, by name.
_Row = dict[str, float | None]


@dataclass(frozen=True)
class Quantity:
    """One result of a cell: its key in sweep.json and sweep.csv, and how a table shows it.

    A quantity that logs have too has the title that it has there.
    """

    key: str
    help: str
    own_title: str = ""
    scale: float = 1.0

    @property
    def title(self) -> str:
        """What a table calls it."""
        return self.own_title or title(self.key)


QUANTITIES = (
    Quantity("samples_per_s", "samples of all devices per second"),
    Quantity("step_s", "seconds per step, from end to end", "step s"),
    Quantity("generate_s", "seconds of a step in which answers are generated", "generate s"),
    Quantity("train_s", "seconds of a step in which models are updated", "train s"),
    Quantity("other_s", "the rest of a step: scores, log-probabilities, collecting", "other s"),
    Quantity(
        "tokens_per_s",
        "step 3: answer tokens per second of generation; steps 1 and 2: tokens read per second",
    ),
    Quantity("tflops", "per device, from end to end"),
    Quantity(
        "peak_device_bytes",
        "most memory used on one device, less what was used before",
        "device GiB",
        GIB,
    ),
    Quantity("peak_host_bytes", "most memory of all processes together", "host GiB", GIB),
    Quantity("reward", "of the last step"),
    Quantity("actor_loss", "of the last step", "actor loss"),
    Quantity("critic_loss", "of the last step", "critic loss"),
    Quantity("loss", "steps 1 and 2: of the last step"),
    Quantity("measured_steps", "steps measured, without the first ones", "steps"),
    Quantity("seconds", "the whole cell, from its start to its end"),
)


def measure(log: Path, step: str, ranks: int) -> Measured:
    """The quantities of a cell by its log, of the steps after the first ones.

    Rates are totals over totals: all samples by all seconds. The losses and the reward are those
    of the last step. A log without steps gives no quantities.

    Args:
        log: training.log of the step.
        step: sft, reward or ppo.
        ranks: over which SFT and reward model training spread their samples.
    """
    if not log.is_file():
        return {}
    records = documents.read_document(log)["records"]
    metrics = [record for record in records if record["kind"] == "metrics"]
    rows = _ppo_rows(records, metrics) if step == "ppo" else _rows(records, metrics, ranks)
    if not rows:
        return {}
    kept = rows[min(WARMUP_STEPS, len(rows) - 1) :]
    last = kept[-1]
    found: dict[str, float | None] = {
        "measured_steps": len(kept),
        "samples_per_s": _ratio(_sum(kept, "samples"), _sum(kept, "step_s")),
        "tokens_per_s": _ratio(_sum(kept, "tokens"), _sum(kept, "tokens_s")),
        "tflops": _ratio(_sum(kept, "operations"), _sum(kept, "step_s")),
    }
    for name in ("step_s", "generate_s", "train_s", "other_s"):
        total = _sum(kept, name)
        found[name] = None if total is None else total / len(kept)
    for name in ("reward", "actor_loss", "critic_loss", "loss"):
        found[name] = last.get(name)
    return {name: _in_json(value) for name, value in found.items() if value is not None}


def _ppo_rows(records: Sequence[_Row], metrics: Sequence[_Row]) -> list[_Row]:
    """A row per generation step, from its block of lines and its line of metrics."""
    # of a step that was repeated, the last attempt counts
    blocks = {record["step"]: record for record in records if record["kind"] == "ppo"}
    exact = {record["step"]: record for record in metrics}
    rows = []
    for step, block in sorted(blocks.items()):
        # the block has two decimals, the line of metrics six digits
        row = {**block, **{k: v for k, v in exact.get(step, {}).items() if v is not None}}
        seconds, generate, train = (row.get(n) for n in ("e2e_s", "generate_s", "train_s"))
        if not seconds or generate is None or train is None:
            continue
        tokens_per_s, tflops = row.get("tokens_per_s"), row.get("tflops")
        rows.append(
            {
                "samples": block.get("batch_size"),
                "step_s": seconds,
                "generate_s": generate,
                "train_s": train,
                "other_s": seconds - generate - train,
                "tokens": None if tokens_per_s is None else tokens_per_s * generate,
                "tokens_s": generate,
                "operations": None if tflops is None else tflops * seconds,
                **{name: row.get(name) for name in ("reward", "actor_loss", "critic_loss")},
            }
        )
    return rows


def _rows(records: Sequence[_Row], metrics: Sequence[_Row], ranks: int) -> list[_Row]:
    """A row per optimizer step of steps 1 and 2."""
    timed = [record for record in records if record["kind"] == "throughput"]
    rows = []
    for index, record in enumerate(timed):
        values = metrics[index] if index < len(metrics) else {}
        seconds, samples_per_s = record["latency_s"], record["samples_per_s"]
        if not seconds or samples_per_s is None:
            # the log has two decimals: 0.00 is a step below 5 ms
            continue
        tokens_per_s, tflops = values.get("tokens_per_s"), record["tflops"]
        rows.append(
            {
                "samples": samples_per_s * seconds * ranks,
                "step_s": seconds,
                "train_s": seconds,
                "tokens": None if tokens_per_s is None else tokens_per_s * seconds,
                "tokens_s": seconds,
                "operations": None if tflops is None else tflops * seconds,
                "loss": values.get("loss"),
            }
        )
    return rows


def _sum(rows: Sequence[_Row], name: str) -> float | None:
    values = [row.get(name) for row in rows]
    known = [value for value in values if value is not None]
    return math.fsum(known) if len(known) == len(values) else None


def _ratio(total: float | None, by: float | None) -> float | None:
    return total / by if total is not None and by else None


def _in_json(value: float) -> Number:
    return value if math.isfinite(value) else str(value)


class MemorySampler:
    """The peak memory of a process with its descendants, and of the devices they may use.

    Host memory is proportional where Linux reports it: pages that processes share count once.
    """

    def __init__(self, pid: int, devices: Sequence[str]) -> None:
        self.pid = pid
        self.devices = devices
        self.peak_host_bytes: int | None = None
        self.peak_device_bytes: int | None = None
        self._before = device_bytes(devices)

    def look(self) -> None:
        """Take a sample."""
        used = tree_bytes(self.pid)
        if used:
            self.peak_host_bytes = max(used, self.peak_host_bytes or 0)
        for device, value in device_bytes(self.devices).items():
            own = max(0, value - self._before.get(device, 0))
            self.peak_device_bytes = max(own, self.peak_device_bytes or 0)

    def peaks(self) -> Measured:
        """What was seen."""
        found = {
            "peak_host_bytes": self.peak_host_bytes,
            "peak_device_bytes": self.peak_device_bytes,
        }
        return {name: value for name, value in found.items() if value is not None}


def tree_bytes(pid: int) -> int:
    """Host memory of a process and all its descendants; 0 where it is gone."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    total = 0
    for process in processes:
        try:
            memory = process.memory_full_info()
            total += getattr(memory, "pss", 0) or memory.rss
        except psutil.Error:
            continue
    return total


def device_bytes(devices: Sequence[str]) -> Mapping[str, int]:
    """Memory in use on GPUs by their numbers; empty without GPUs."""
    if not devices:
        return {}
    try:
        rows = query_gpus("index,memory.used")
    except NoAnswer:
        return {}
    return {index: int(used) * MIB for index, used in rows if index in devices and used.isdigit()}


def gpu_numbers() -> list[str]:
    """The numbers of all GPUs of this machine."""
    try:
        return [index for (index,) in query_gpus("index") if index.isdigit()]
    except NoAnswer:
        return []
