"""Lines of a log to points of named series, events and a status."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter

from dschat_tui.logs.follow import Batch
from dschat_tui.logs.points import Gatherer, NotFinite
from dschat_tui.logs.quantities import NOT_MEASURED, QUANTITIES, title
from dschat_tui.logs.records import LINES_PER_MARK, Event, Status, Update
from engine.log import write
from engine.log.read import LogReader, Record

_TRAINING_BEGINS = write.running_training().removesuffix(" *****")
_OWN_KINDS = ("note", "phase", "metrics")
_KEYS_KEPT = 64
_TIMES = ("e2e_s", "other_s", "generate_s", "train_s", "samples_per_s")
_NO_QUANTITIES = {"kind", "step", "offset", "total_steps"}


# The names of quantities, and a function that returns their values.
Quantities = tuple[tuple[str, ...], Callable[[Record], tuple[float | None, ...]]]


class LogParser:
    """Turns the lines of one log, of any family, into updates.

    The step of a point is the log's own, counted on over epochs; where a log has none, as with the
    original's steps 1 and 2, micro batches are counted.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._reader = LogReader()
        self._gatherer = Gatherer()
        self._cut_from: float | None = None
        self._events: list[Event] = []
        self._is_own = False
        self._held: list[Record] = []
        self._step = -1
        self._base = 0
        self._step_in_epoch = -1
        self._epoch = 0
        self._relaunched = False
        self._untimed: tuple[Record, float] | None = None
        self._phase, self._percent = "", None
        self._total = 0
        self._model: str | None = None
        self._counters: dict[str, int] = {}
        self._not_finite: set[str] = set()
        # the quantities of a record by its keys, which are mostly those of the record before
        self._quantities: dict[tuple[str, ...], Quantities] = {}
        self._lines = 0
        self._size = 0

    def read(self, batch: Batch) -> Update:
        """The update that a batch of lines makes."""
        if batch.restarted:
            self._begin()
        start = 0
        for index, line in enumerate(batch.lines):
            if line[:5] == "*****" and line.startswith(_TRAINING_BEGINS):
                self._read_lines(batch, start, index + 1)
                start = index + 1
                self._relaunched = self._step >= 0
                self._events.append(Event("training", "training begins", batch.offsets[index]))
        self._read_lines(batch, start, len(batch.lines))
        marks = batch.offsets[-self._lines % LINES_PER_MARK :: LINES_PER_MARK]
        self._lines += len(batch.lines)
        if batch.lines:
            self._size = batch.offsets[-1] + len(batch.lines[-1].encode("utf-8", "replace")) + 1
        return self._update(marks, batch.restarted)

    def _read_lines(self, batch: Batch, start: int, end: int) -> None:
        for record in self._reader.feed_all(batch.lines[start:end], batch.offsets[start:end]):
            self._read(record)

    def finish(self) -> Update:
        """The update of what still waits for another line, at the end of a finished log."""
        for record in self._reader.finish():
            self._read(record)
        held, self._held = self._held, []
        for record in held:
            self._read_in_its_turn(record)
        return self._update([], False)

    def _update(self, marks: Sequence[int], restarted: bool) -> Update:
        self._count_events()
        points, not_finite = self._gatherer.take()
        for found in not_finite:
            self._note_not_finite(found)
        events, self._events = self._events, []
        cut_from, self._cut_from = self._cut_from, None
        return Update(points, events, marks, self._status(), restarted, cut_from)

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

    def _read(self, record: Record) -> None:
        kind = record["kind"]
        if kind in _OWN_KINDS:
            self._is_own = True
        # our own logs give the step in the line after these
        if self._is_own and kind in ("ppo", "throughput"):
            self._held.append(record)
        elif kind == "metrics":
            self._read_metrics(record)
        elif kind in ("ppo", "throughput"):
            self._read_in_its_turn(record)
        elif kind == "loss":
            self._read_loss(record)
        elif kind == "eval":
            self._event_of_epoch(record, f"perplexity {_measured(record['ppl'])}")
            self._add("ppl", record.get("ppl"), self._step + 1, record)
            self._add("eval_loss", record.get("loss"), self._step + 1, record)
        elif kind == "reward_eval":
            self._read_reward_eval(record)
        elif kind == "optimizer":
            self._read_optimizer(record)
        else:
            self._read_words(record)

    def _read_metrics(self, record: Record) -> None:
        step = record["step"]
        held, self._held = self._held, []
        if step < self._step and not self._relaunched:
            return
        self._advance(step)
        self._total = record.get("total_steps") or self._total
        for before in held[:-1]:
            self._add_all(before, step)
        # where both lines have a value, the metrics have more digits
        self._add_all(held[-1] | record if held else record, step, record)
        self._phase, self._percent = "training", None

    def _advance(self, step: int) -> None:
        if self._relaunched and step <= self._step:
            self._cut_from = step if self._cut_from is None else min(step, self._cut_from)
            self._gatherer.forget_from(step)
        self._relaunched = False
        self._step = step

    def _step_of(self, epoch: int, step: int) -> int | None:
        """The step over all epochs; None for one that was read before."""
        if self._relaunched:
            self._base, self._step_in_epoch, self._epoch = 0, -1, epoch
        if step <= self._step_in_epoch:
            if epoch <= self._epoch:
                return None
            self._base = self._step + 1 - step
        if self._base + step < self._step and not self._relaunched:
            return None
        self._step_in_epoch, self._epoch = step, epoch
        self._advance(self._base + step)
        return self._base + step

    def _read_in_its_turn(self, record: Record) -> None:
        if record["kind"] == "throughput":
            self._read_throughput(record, record["index"])
            return
        step = self._step_of(record["epoch"], record["step"])
        if step is not None:
            self._read_ppo(record, step)

    def _read_throughput(self, record: Record, step: float) -> None:
        self._step = max(self._step, int(step))
        self._phase = "training"
        latency = record["latency_s"]
        tokens = record["batch_size"] * record["sequence_length"] / latency if latency else None
        self._add_all({**record, "tokens_per_s": tokens}, step)

    def _read_ppo(self, record: Record, step: float) -> None:
        self._phase = "training"
        if self._untimed is not None:
            # the hybrid engine prints the times of a step only after its record was given
            untimed, its_step = self._untimed
            self._add_all({name: untimed.get(name) for name in ("offset", *_TIMES)}, its_step)
        self._untimed = (record, step) if record["e2e_s"] is None else None
        self._add_all(record, step)

    def _read_loss(self, record: Record) -> None:
        if record["step"] is None:
            text = f"mean loss {record['loss']:.4g}" if record["loss"] is not None else ""
            self._event_of_epoch(record, text)
            self._add("epoch_loss", record["loss"], self._step, record)
            return
        if self._is_own:  # the mean over all ranks follows
            return
        # every rank prints its own loss of the same step
        again = (record["epoch"], record["step"]) == (self._epoch, self._step_in_epoch)
        step = self._step if again else self._step_of(record["epoch"], record["step"])
        if step is not None:
            self._add("loss", record["loss"], step, record)

    def _read_reward_eval(self, record: Record) -> None:
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
        if accuracy is not None or chosen is None:  # the original's DPO has rewards alone
            self._event_of_epoch(record, f"accuracy {_measured(accuracy)}")

    def _read_optimizer(self, record: Record) -> None:
        if not self._is_own and record["lr"]:
            role = f"{record['engine']}_learning_rate"
            name = role if self._reader.step == "ppo" else "learning_rate"
            self._add(name, record["lr"][0], max(self._step, 0), record)

    def _read_words(self, record: Record) -> None:
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

    def _event_of_epoch(self, record: Record, text: str) -> None:
        if text and record.get("epoch") is not None:
            when = f"epoch {record['epoch']}" if record["epoch"] else "before training"
            self._events.append(Event("evaluation", f"{when}: {text}", record.get("offset", 0)))

    def _add(self, name: str, value: float | None, step: float, record: Record) -> None:
        self._gatherer.add((name,), (value,), step, record.get("offset", 0))

    def _add_all(self, record: Record, step: float, metrics: Record | None = None) -> None:
        """Add the described quantities of a record, and all that its line of metrics has."""
        _add_other(record)
        keys = tuple(record)
        if keys not in self._quantities:
            if len(self._quantities) == _KEYS_KEPT:  # a hostile log has new names in every line
                self._quantities.clear()
            wanted = QUANTITIES.keys() | (metrics or {}).keys() - _NO_QUANTITIES
            names = tuple(name for name in keys if name in wanted)
            self._quantities[keys] = names, _getter(names)
        names, values = self._quantities[keys]
        self._gatherer.add(names, values(record), step, (metrics or record).get("offset", 0))

    def _note_not_finite(self, found: NotFinite) -> None:
        if found.name not in self._not_finite:
            self._not_finite.add(found.name)
            text = f"{title(found.name)} is {found.value} at step {found.step:g}"
            self._events.append(Event("not_finite", text, found.offset))


def _add_other(record: Record) -> None:
    """Add the time of a step that is neither generation nor training, where both are known."""
    whole, generate, train = map(record.get, ("e2e_s", "generate_s", "train_s"))
    if whole is not None and generate is not None and train is not None:
        record["other_s"] = max(whole - generate - train, 0.0)


def _measured(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.4g}"


def _getter(names: tuple[str, ...]) -> Callable[[Record], tuple[float | None, ...]]:
    """A function that returns the values of these names as a tuple."""
    if len(names) > 1:
        return itemgetter(*names)
    return lambda record: tuple(record[name] for name in names)
