"""What `dschat sweep` prints: while cells run, and tables of a matrix, results, two sweeps."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from dschat_tui.runs.state import DONE, FAILED, RUNNING
from dschat_tui.runs.watch import STARTING
from dschat_tui.sweep.report import (
    BY_KEY,
    COMPARED,
    MEMORY,
    Compared,
    Comparison,
    bar_text,
    change_text,
    measured_quantities,
    shown,
)
from dschat_tui.sweep.results import QUANTITIES, Quantity
from dschat_tui.sweep.runner import Display, Event, Kind, Runner
from dschat_tui.sweep.state import (
    OOM,
    PRUNED,
    TIMEOUT,
    RunRecord,
    SweepState,
    counted,
    measured,
    number,
)
from dschat_tui.text import aligned, duration, one_line, plain

if TYPE_CHECKING:
    from rich.console import RenderableType

IN_TERMINAL = ("samples_per_s", "generate_s", "train_s", "tflops", *MEMORY, "reward", "loss")
SECONDS_BETWEEN_LINES = 15.0
SECONDS_BETWEEN_PICTURES = 0.5
BAR_CELLS = 20
IN_LINES = ("samples_per_s", "generate_s", "train_s", "tokens_per_s", "peak_host_bytes")
COLOURS = {
    DONE: "green",
    RUNNING: "cyan",
    FAILED: "red",
    OOM: "red",
    TIMEOUT: "yellow",
    PRUNED: "dim",
}


def display_for(state: SweepState, json_events: bool) -> AbstractContextManager[Display]:
    """Events on stdout, a live table on a terminal, else lines; the latter two on stderr."""
    if json_events:
        return nullcontext(Events())
    if sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return LiveTable(state)
    return nullcontext(Lines(state))


def emit(event: str, **content: object) -> None:
    """One event as a line of JSON on stdout."""
    print(json.dumps({"event": event, "time": time.time(), **content}), flush=True)


class Events:
    """Events as JSON, one per line."""

    def report(self, event: Event, kind: Kind, record: RunRecord) -> None:
        """A run of the sweep started or ended."""
        emit(event, kind=kind, **record)

    def tick(self, runner: Runner) -> None:
        """Progress is no event."""


class Lines:
    """A line whenever a run starts or ends, and its progress every so many seconds."""

    def __init__(self, state: SweepState) -> None:
        self.state = state
        self.last = time.monotonic()
        self.shown_stop = 0

    def report(self, event: Event, kind: Kind, record: RunRecord) -> None:
        """A run of the sweep started or ended."""
        self.last = time.monotonic()
        self._say(event_text(event, record))

    def tick(self, runner: Runner) -> None:
        """Report a stop at once, progress now and then."""
        if runner.interrupts and runner.tasks and runner.interrupts != self.shown_stop:
            self.shown_stop = runner.interrupts
            self._say(stopping_text(runner))
        now = time.monotonic()
        if now - self.last < SECONDS_BETWEEN_LINES or runner.is_stopping:
            return
        self.last = now
        for task in runner.tasks:
            followed = task.watch.step_watch
            if followed is not None:
                self._say(f"  {task.record['name']}: {followed.line()}")

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


def event_text(event: Event, record: RunRecord) -> str:
    """An event as one line."""
    line = f"{record['name']}: {'started' if event == 'started' else record['state']}"
    if event == "started":
        return line
    if record["seconds"]:
        line += f" in {duration(record['seconds'])}"
    numbers = [
        f"{quantity.title} {shown(quantity, value)}"
        for quantity in QUANTITIES
        if quantity.key in IN_LINES and (value := measured(record, quantity.key)) is not None
    ]
    if record["state"] == DONE and numbers:
        line += f"; {', '.join(numbers)}"
    return line + (f" ({one_line(record['reason'])})" if record["reason"] else "")


def stopping_text(runner: Runner) -> str:
    """What a stop is doing, and what another Ctrl-C does."""
    names = ", ".join(task.record["name"] for task in runner.tasks)
    if runner.interrupts > 1:
        return f"ending {names} at once"
    return f"ending {names} (Ctrl-C once more: at once); done cells are kept"


class LiveTable:
    """The matrix, redrawn in place while it fills in."""

    def __init__(self, state: SweepState) -> None:
        from rich.console import Console
        from rich.live import Live

        self.state = state
        console = Console(stderr=True)
        self.live = Live(
            console=console, auto_refresh=False, transient=True, vertical_overflow="ellipsis"
        )
        self.due = 0.0

    def __enter__(self) -> LiveTable:
        self.live.start()
        return self

    def __exit__(self, *details: object) -> None:
        self.live.stop()

    def report(self, event: Event, kind: Kind, record: RunRecord) -> None:
        """Draw at the next tick."""
        self.due = 0.0

    def tick(self, runner: Runner) -> None:
        """Draw now and then."""
        if time.monotonic() >= self.due:
            self.due = time.monotonic() + SECONDS_BETWEEN_PICTURES
            self.live.update(self.picture(runner), refresh=True)

    def picture(self, runner: Runner) -> RenderableType:
        """The sweep as it is now."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        cells = self.state["cells"]
        longest = max((number(cell, "step_s") or 0.0 for cell in cells), default=0.0) or 1.0
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        speed, memory = (
            next(q for q in QUANTITIES if q.key == key)
            for key in ("samples_per_s", "peak_host_bytes")
        )
        for title in ("cell", "state", "time", speed.title, "generate, train, other", memory.title):
            table.add_column(title, no_wrap=True)
        for cell in cells:
            seconds = cell["seconds"]
            if cell["state"] == RUNNING and cell["started"]:
                seconds = time.time() - cell["started"]
            table.add_row(
                Text(cell["name"]),
                Text(cell["state"], style=COLOURS.get(cell["state"], "")),
                Text(duration(seconds) if seconds else ""),
                Text(shown(speed, measured(cell, speed.key)) if cell["state"] == DONE else ""),
                Text(bar_text(cell, longest, BAR_CELLS) if cell["state"] == DONE else ""),
                Text(shown(memory, measured(cell, memory.key)) if cell["state"] == DONE else ""),
            )
        lines: list[RenderableType] = [table, Text(counted(self.state), style="bold")]
        for task in runner.tasks:
            followed = task.watch.step_watch
            how_far = followed.line() if followed is not None else STARTING
            lines.append(Text(f"{task.record['name']}: {plain(how_far)}", style="cyan"))
        if runner.is_stopping and runner.tasks:
            lines.append(Text(stopping_text(runner), style="yellow"))
        return Group(*lines)


def matrix_text(state: SweepState) -> str:
    """The cells before they run: name, whether it will, and why not."""
    rows = [[cell["name"], cell["state"], one_line(cell["reason"])] for cell in state["cells"]]
    return aligned(["cell", "state", "reason"], rows)


def result_text(state: SweepState) -> str:
    """The cells after they ran, with what a line has room for."""
    quantities = [q for q in measured_quantities(state) if q.key in IN_TERMINAL]
    rows = [
        [cell["name"], cell["state"], *(shown(q, measured(cell, q.key)) for q in quantities)]
        for cell in state["cells"]
    ]
    return aligned(["cell", "state", *(q.title for q in quantities)], rows)


def comparison_text(compared: Comparison) -> str:
    """Two sweeps side by side: a row per cell, what changed, and the mean over all pairs."""
    pairs = compared["pairs"]
    keys = [key for key in (*COMPARED, *MEMORY) if any(key in p["quantities"] for p in pairs)]
    rows = []
    for pair in pairs:
        row = [pair["name"], " → ".join(dict.fromkeys(pair["states"]))]
        row += [_compared_text(BY_KEY[key], pair["quantities"].get(key)) for key in keys]
        rows.append(row)
    means = []
    for key in keys:
        changes = [p["quantities"][key]["change"] for p in pairs if key in p["quantities"]]
        means.append(change_text([change for change in changes if change is not None]))
    if pairs:
        rows.append(["all", "", *means])
    lines = [aligned(["cell", "state", *(BY_KEY[key].title for key in keys)], rows)]
    for names, where in ((compared["only_first"], "first"), (compared["only_second"], "second")):
        if names:
            lines.append(f"only in the {where}: {', '.join(names)}")
    return "\n".join(lines)


def _compared_text(quantity: Quantity, compared: Compared | None) -> str:
    if compared is None:
        return "- → -"
    text = f"{shown(quantity, compared['first'])} → {shown(quantity, compared['second'])}"
    change = compared["change"]
    return text if change is None else f"{text} ({100 * change:+.1f} %)"
