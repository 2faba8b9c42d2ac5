"""Lines of a log to points of named series, events and a status: immutable, for another thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dschat_tui.logs.follow import Batch
from dschat_tui.logs.quantities import title
from engine import training_log

LINES_PER_MARK = 64
# in place of a series' name: from this step on, what came before is told again
CUT = ""

_TRAINING_BEGINS = training_log.running_training().removesuffix(" *****")
_OWN_KINDS = ("note", "phase", "metrics")
_SPEEDS = ("latency_s", "tflops", "samples_per_s")
_PPO_NAMES = (
    "reward", "reward_ema", "actor_loss", "critic_loss", "unsupervised_loss", "e2e_s",
    "generate_s", "train_s", "tflops", "generate_tflops", "train_tflops", "samples_per_s",
)  # fmt: skip
_NO_QUANTITIES = ("kind", "step", "offset", "total_steps")

Point = tuple[str, float, float, int]


class Event(NamedTuple):
    """Something that happened: its kind, the text for a person, the byte of its line."""

    kind: str
    text: str
    offset: int


@dataclass(frozen=True)
class Status:
    """What a log says of its step as a whole, so far."""

    step: str | None = None
    state: str = "unknown"
    returncode: int | None = None
    cause: dict[str, str] | None = None
    phase: str = ""
    percent: int | None = None
    done: int = 0
    total: int = 0
    model: str | None = None
    counters: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    size: int = 0


@dataclass(frozen=True)
class Update:
    """What some lines added: points in order, events, every 64th line's offset, the status."""

    points: Sequence[Point]
    events: Sequence[Event]
    marks: Sequence[int]
    status: Status
    restarted: bool = False


class LogParser:
    """Turns the lines of one log, of any family, into updates.

    The step of a point is the log's own, counted on over epochs; where a log has none, as with the
    original's steps 1 and 2, micro batches are counted.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._reader = training_log.LogReader()
        self._points: list[Point] = []
        self._events: list[Event] = []
        self._is_own = False
        self._held: list[dict[str, Any]] = []
        self._step = -1
        self._base = 0
        self._step_in_epoch = -1
        self._epoch = 0
        self._relaunched = False
        self._untimed: tuple[dict[str, Any], float] | None = None
        self._phase, self._percent = "", None
        self._total = 0
        self._model: str | None = None
        self._counters: dict[str, int] = {}
        self._nonfinite: set[str] = set()
        self._lines = 0
        self._size = 0

    def read(self, batch: Batch) -> Update:
        """The update that a batch of lines makes."""
        if batch.restarted:
            self._begin()
        feed, read = self._reader.feed, self._read
        for line, offset in zip(batch.lines, batch.offsets, strict=True):
            for record in feed(line, offset):
                read(record)
            if line[:5] == "*****" and line.startswith(_TRAINING_BEGINS):
                self._relaunched = self._step >= 0
                self._events.append(Event("training", "training begins", offset))
        marks = batch.offsets[-self._lines % LINES_PER_MARK :: LINES_PER_MARK]
        self._lines += len(batch.lines)
        if batch.lines:
            self._size = batch.offsets[-1] + len(batch.lines[-1].encode("utf-8", "replace")) + 1
        return self._update(marks, batch.restarted)

    def finish(self) -> Update:
        """The update of what waits for a line that will not come: at the end of a finished log."""
        for record in self._reader.finish():
            self._read(record)
        self._release_held(self._step + 1)
        return self._update([], False)

    def _update(self, marks: Sequence[int], restarted: bool) -> Update:
        self._count_events()
        points, self._points = self._points, []
        events, self._events = self._events, []
        return Update(points, events, marks, self._status(), restarted)

    def _status(self) -> Status:
        reader = self._reader
        total = self._total or (reader.batches_per_epoch or 0) * (reader.epochs or 0)
        return Status(
            step=reader.step,
            state=reader.state,
            returncode=reader.returncode,
            cause=reader.cause,
            phase=self._phase,
            percent=self._percent,
            done=self._step + 1,
            total=total,
            model=self._model,
            counters=self._counters,
            lines=self._lines,
            size=self._size,
        )

    def _count_events(self) -> None:
        counters = self._reader.events
        for name, count in counters.items():
            more = count - self._counters.get(name, 0)
            if more > 0:
                self._events.append(Event(name, f"{name.replace('_', ' ')}: {more}", self._size))
        self._counters = counters

    def _read(self, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind in _OWN_KINDS:
            self._is_own = True
        # our own logs tell the step in the line after these
        if self._is_own and kind in ("ppo", "throughput"):
            self._held.append(record)
            return
        if kind == "metrics":
            self._read_metrics(record)
        elif kind == "throughput":
            self._read_throughput(record, record["index"])
        elif kind == "ppo":
            step = self._step_of(record["epoch"], record["step"])
            if step is not None:
                self._read_ppo(record, step)
        elif kind == "loss":
            self._read_loss(record)
        elif kind == "eval":
            told = f"perplexity {record['ppl']:.4g}" if record.get("ppl") is not None else ""
            self._event_of_epoch(record, told)
            self._add("ppl", record.get("ppl"), self._step + 1, record)
            self._add("eval_loss", record.get("loss"), self._step + 1, record)
        elif kind == "reward_eval":
            self._read_reward_eval(record)
        elif kind == "optimizer":
            self._read_optimizer(record)
        else:
            self._read_words(record)

    def _read_metrics(self, record: dict[str, Any]) -> None:
        step = record["step"]
        self._advance(step)
        told = self._release_held(step)
        self._total = record.get("total_steps") or self._total
        for name, value in record.items():
            if name not in _NO_QUANTITIES and name not in told and value is not None:
                self._add(name, value, step, record)
        if "other_s" not in told and record.get("e2e_s") is not None:
            self._add_other(record, step)
        self._phase, self._percent = "training", None

    def _release_held(self, step: float) -> set[str]:
        held, self._held = self._held, []
        before = len(self._points)
        for record in held:
            if record["kind"] == "ppo":
                self._read_ppo(record, step)
            else:
                self._read_throughput(record, step)
        return {point[0] for point in self._points[before:]}

    def _advance(self, step: int) -> None:
        if self._relaunched and step <= self._step:
            self._points.append((CUT, math.nan, step, 0))
        self._relaunched = False
        self._step = step

    def _step_of(self, epoch: int, step: int) -> int | None:
        """The step over all epochs; None for one that was told before."""
        if self._relaunched:
            self._base, self._step_in_epoch, self._epoch = 0, -1, epoch
        if step <= self._step_in_epoch:
            if epoch <= self._epoch:
                return None
            self._base = self._step + 1 - step
        self._step_in_epoch, self._epoch = step, epoch
        self._advance(self._base + step)
        return self._base + step

    def _read_throughput(self, record: dict[str, Any], step: float) -> None:
        if not self._is_own:
            self._step = max(self._step, int(step))
            self._phase = "training"
            latency = record["latency_s"]
            if latency:
                tokens = record["batch_size"] * record["sequence_length"] / latency
                self._add("tokens_per_s", tokens, step, record)
        for name in _SPEEDS:
            self._add(name, record[name], step, record)

    def _read_ppo(self, record: dict[str, Any], step: float) -> None:
        self._phase = "training"
        if self._untimed is not None:
            # the hybrid engine told the times of the step before only after it was given
            untimed, its_step = self._untimed
            for name in ("e2e_s", "generate_s", "train_s", "samples_per_s"):
                self._add(name, untimed.get(name), its_step, untimed)
            self._add_other(untimed, its_step)
        self._untimed = (record, step) if record["e2e_s"] is None else None
        for name in _PPO_NAMES:
            value = record.get(name)
            if value is not None:
                self._add(name, value, step, record)
        self._add_other(record, step)

    def _add_other(self, record: dict[str, Any], step: float) -> None:
        times = [record.get(name) for name in ("e2e_s", "generate_s", "train_s")]
        if None not in times:
            whole, generate, train = (float(time or 0) for time in times)
            self._add("other_s", max(whole - generate - train, 0.0), step, record)

    def _read_loss(self, record: dict[str, Any]) -> None:
        if record["step"] is None:
            told = f"mean loss {record['loss']:.4g}" if record["loss"] is not None else ""
            self._event_of_epoch(record, told)
            self._add("epoch_loss", record["loss"], self._step, record)
            return
        if self._is_own:  # the mean over all ranks follows
            return
        # every rank tells its own loss of the same step
        again = (record["epoch"], record["step"]) == (self._epoch, self._step_in_epoch)
        step = self._step if again else self._step_of(record["epoch"], record["step"])
        if step is not None:
            self._add("loss", record["loss"], step, record)

    def _read_reward_eval(self, record: dict[str, Any]) -> None:
        step = record.get("step")
        step = self._step + 1 if step is None or self._step > step else step
        chosen, rejected, accuracy = (record.get(n) for n in ("chosen", "rejected", "accuracy"))
        for name, value in (
            ("eval_chosen", chosen),
            ("eval_rejected", rejected),
            ("eval_accuracy", accuracy),
            ("eval_loss", record.get("loss")),
        ):
            self._add(name, value, step, record)
        if chosen is not None and rejected is not None:
            self._add("eval_margin", chosen - rejected, step, record)
        if record.get("epoch") is not None:
            self._event_of_epoch(record, "" if accuracy is None else f"accuracy {accuracy:.4g}")

    def _read_optimizer(self, record: dict[str, Any]) -> None:
        if not self._is_own and record["lr"]:
            role = f"{record['engine']}_learning_rate"
            name = role if self._reader.step == "ppo" else "learning_rate"
            self._add(name, record["lr"][0], max(self._step, 0), record)

    def _read_words(self, record: dict[str, Any]) -> None:
        kind, offset = record["kind"], record.get("offset", 0)
        if kind == "phase":
            if record["name"] != self._phase:
                self._events.append(Event("phase", record["name"], offset))
            self._phase, self._percent = record["name"], record["percent"]
        elif kind == "finished":
            self._model = record["model"]
            self._events.append(Event("finished", f"model: {record['model']}", offset))
        else:
            self._events.append(Event(kind, record["text"], offset))

    def _event_of_epoch(self, record: dict[str, Any], text: str) -> None:
        if text and record.get("epoch") is not None:
            when = f"epoch {record['epoch']}" if record["epoch"] else "before training"
            self._events.append(Event("evaluation", f"{when}: {text}", record.get("offset", 0)))

    def _add(self, name: str, value: float | None, step: float, record: dict[str, Any]) -> None:
        if value is None:
            return
        offset = record.get("offset", 0)
        self._points.append((name, value, step, offset))
        if not math.isfinite(value) and name not in self._nonfinite:
            self._nonfinite.add(name)
            text = f"{title(name)} is {value} at step {step:g}"
            self._events.append(Event("not_finite", text, offset))
