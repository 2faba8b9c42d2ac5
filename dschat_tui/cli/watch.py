"""How a run is watched in a terminal: a live picture or lines, a question on Ctrl-C, the end."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from dschat_tui import hangup
from dschat_tui.run_text import result_line, summary
from dschat_tui.runs import gates
from dschat_tui.runs.failures import last_line
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.state import DONE, FAILED, PAUSED, RUNNING, STOPPED, RunState, steps_of
from dschat_tui.runs.watch import DETACHED, POLL_SECONDS, STARTING, Watch
from dschat_tui.text import duration, plain, shown_path

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_CODES = {DONE: 0, FAILED: 1, PAUSED: 1, STOPPED: 130}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
QUESTION = "[d]etach and leave it running, [s]top it (saves a checkpoint), or [c]ontinue watching? "
SECONDS_BETWEEN_LINES = 10.0


def watch(run: RunFolder, supervisor: subprocess.Popen[bytes] | None, json_output: bool) -> int:
    """Show a run until its end, then its summary; the exit code of the command.

    On a terminal Ctrl-C asks whether to detach or to stop.
    """
    watched = Watch(run, supervisor)
    on_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if on_terminal:
        hangup.watch_terminal()

    def note(number: int, frame: object) -> None:
        watched.interrupts += 1

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        display = _display(watched)
        with display as show:
            pause = display.paused if isinstance(display, LivePicture) else nullcontext

            def ask() -> str:
                with pause():
                    return _ask(watched)

            outcome = watched.follow(show, ask if on_terminal else None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if json_output:
        print(json.dumps({"path": str(run.path), **watched.state}, indent=2))
    elif outcome != DETACHED:
        print(summary(watched.state))
    if outcome == DETACHED:
        print_detached(run)
        return 0
    if outcome == DONE:
        if can_talk(watched.state) and not json_output:
            print(f"\nTalk with it: dschat chat --path {shlex.quote(shown_path(run.path))}")
        return EXIT_CODES[DONE]
    print(_explain(run, watched.state), file=sys.stderr)
    return EXIT_CODES.get(outcome, EXIT_CODES[FAILED])


def print_detached(run: RunFolder) -> None:
    """Say that a run continues although nobody watches it any more."""
    shown = shlex.quote(shown_path(run.path))
    print(f"The run continues. Watch it: dschat runs attach {shown}", file=sys.stderr)


def can_talk(state: RunState) -> bool:
    """Whether a step is done whose model can be talked with."""
    return any(step.chat_models and record["state"] == DONE for step, record in steps_of(state))


def _ask(watched: Watch) -> str:
    """The user's answer after Ctrl-C; a second Ctrl-C means stop, end of input means detach."""
    print(f"\n{QUESTION}", end="", file=sys.stderr, flush=True)
    while not watched.interrupts:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        if not ready:
            continue
        line = sys.stdin.readline()
        answer = line.strip().lower()[:1]
        if not line or answer == "d":
            return "detach"
        if answer in ("s", "c"):
            return "stop" if answer == "s" else "continue"
        print(QUESTION, end="", file=sys.stderr, flush=True)
    watched.interrupts = 0
    print(file=sys.stderr)
    return "stop"


def _explain(run: RunFolder, state: RunState) -> str:
    """One line on stderr: why the run is not done."""
    for step, record in steps_of(state):
        cause = record["cause"]
        if record["state"] == FAILED and cause is not None:
            return (
                f"dschat: step {step.number} ({step.title}) failed, {cause['id']}: "
                f"{plain(cause['line'])} -- {cause['advice']} Log: {run.training_log(step)}"
            )
    if state["state"] == PAUSED:
        missed = "; ".join(gates.told(record) for record in gates.waiting(state))
        shown = shlex.quote(shown_path(run.path))
        return (
            f"dschat: paused: {missed}. Details: dschat runs show {shown}. To continue, "
            f'give a reason: dschat runs resume {shown} --accept "REASON"'
        )
    if state["state"] == STOPPED:
        return (
            "dschat: stopped; nothing of the run is left running. Resume it: dschat run --resume "
            + shlex.quote(shown_path(run.path))
        )
    running = [r["process"] for r in state["steps"].values() if r["state"] == RUNNING]
    leader = next(filter(None, running), None)
    left = f"; its process group {leader['pid']} may still run" if leader else ""
    said = plain(last_line(run.supervisor_log))
    return f"dschat: the run's supervisor is gone ({said}){left}. See {run.supervisor_log}"


def _display(watched: Watch) -> AbstractContextManager[Callable[[], None]]:
    """A live picture on a terminal, else lines; both on stderr."""
    if sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return LivePicture(watched)
    return nullcontext(Lines(watched))


class Lines:
    """One line whenever a step or its phase changes, and every so many seconds while training."""

    def __init__(self, watched: Watch) -> None:
        self.watched = watched
        self.shown = ("", "")
        self.warnings = 0
        self.gates = len(gates.known(watched.state))
        self.last = 0.0
        print(f"run: {watched.run.path}", file=sys.stderr)

    def __call__(self) -> None:
        step_watch = self.watched.step_watch
        missed = gates.known(self.watched.state)
        for record in missed[self.gates :]:
            print(f"gate: {gates.told(record)}", file=sys.stderr)
        self.gates = len(missed)
        if self.watched.is_stopping():
            current = ("", f"stopping {self.watched.stop_requests > 1}")
            if self.shown != current:
                self.shown = current
                print(self.watched.stopping_text(), file=sys.stderr, flush=True)
            return
        if step_watch is None:
            return
        now = time.monotonic()
        current = (step_watch.step.name, step_watch.progress.phase or STARTING)
        if current[0] != self.shown[0]:
            self.warnings = 0
        for text in step_watch.warnings[self.warnings :]:
            print(f"warning: {plain(text)}", file=sys.stderr)
        self.warnings = len(step_watch.warnings)
        if current == self.shown and now - self.last < SECONDS_BETWEEN_LINES:
            return
        self.shown, self.last = current, now
        step = step_watch.step
        print(f"step {step.number} {step.title}: {step_watch.line()}", file=sys.stderr, flush=True)


class LivePicture:
    """A row per step, redrawn in place: state, time, bar, metrics, time left."""

    def __init__(self, watched: Watch) -> None:
        from rich.console import Console
        from rich.live import Live

        self.watched = watched
        console = Console(stderr=True)
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Callable[[], None]:
        self.live.start()
        return lambda: self.live.update(self.picture(), refresh=True)

    def __exit__(self, *details: object) -> None:
        self.live.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to a question for a while."""
        self.live.stop()
        try:
            yield
        finally:
            self.live.start()

    def picture(self) -> RenderableType:
        """The run as it is now."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        watched = self.watched
        grid = Table.grid(padding=(0, 2))
        colours = {DONE: "green", RUNNING: "cyan", FAILED: "red", STOPPED: "yellow"}
        for step, record in steps_of(watched.state):
            started = record["started"]
            seconds = (record["ended"] or time.time()) - started if started else None
            bar: RenderableType = ""
            text = result_line(step.name, record["metrics"])
            followed = watched.step_watch
            if record["state"] == RUNNING and followed is not None and followed.step == step:
                progress = followed.progress
                bar = ProgressBar(total=progress.total or 1, completed=progress.done, width=20)
                text = followed.line()
            grid.add_row(
                Text(f"{step.number} {step.title}"),
                Text(record["state"], style=colours.get(record["state"], "dim")),
                Text(duration(seconds) if seconds is not None else ""),
                bar,
                Text(text),
            )
        lines: list[RenderableType] = [Text(f"run: {watched.run.path}", style="dim"), grid]
        if watched.step_watch is not None and watched.step_watch.warnings:
            lines.append(Text(plain(watched.step_watch.warnings[-1]), style="yellow"))
        lines += [
            Text(f"gate: {gates.told_whole(gate)}", style="yellow")
            for gate in gates.known(watched.state)
        ]
        if watched.is_stopping():
            lines.append(Text(watched.stopping_text(), style="yellow"))
        return Group(*lines)
