"""What `dschat run` shows while a run goes on, and how it ends."""

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
from pathlib import Path
from typing import TYPE_CHECKING

from dschat_tui import hangup
from dschat_tui.cli import tables
from dschat_tui.logs.follow import Follower
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.parse import LogParser
from dschat_tui.runs import control, gates, stopping
from dschat_tui.runs.failures import last_line
from dschat_tui.runs.folder import RunFolder, RunIsHeld
from dschat_tui.runs.progress import Progress, progress_of
from dschat_tui.runs.state import (
    DONE,
    FAILED,
    PAUSED,
    RUNNING,
    STOPPED,
    RunState,
    steps_of,
    unknown_run_state,
)
from dschat_tui.text import duration, shown_path
from engine.config.steps import STEPS, Step

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_CODES = {DONE: 0, FAILED: 1, PAUSED: 1, STOPPED: 130}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
DETACHED = "detached"
STARTING, TRAINING = "starting", "training"
QUESTION = "[d]etach and leave it running, [s]top it (saves a checkpoint), or [c]ontinue watching? "
POLL_SECONDS = 0.25
SECONDS_BETWEEN_LINES = 10.0


class StepWatch:
    """Follows the log of one step; `warnings` are those of the log, in order."""

    def __init__(self, step: Step, folder: Path) -> None:
        self.step = step
        self.model = LogModel()
        self.warnings: list[str] = []
        self._log = Follower(folder / "training.log")
        self._parser = LogParser()

    def update(self) -> None:
        """Read what was written since the last call."""
        more = True
        while more:
            batch = self._log.read()
            update = self._parser.read(batch)
            self.model.apply(update)
            self.warnings += [event.text for event in update.events if event.kind == "warning"]
            more = batch.more

    @property
    def progress(self) -> Progress:
        """How far the step is."""
        return progress_of(self.model)

    def line(self) -> str:
        """Phase, step, metrics and time left in one line."""
        progress = self.progress
        parts = []
        if not progress.done or progress.phase != TRAINING:
            parts.append(progress.phase_text() or STARTING)
        if progress.done:
            total = progress.total
            parts.append(f"{progress.done}/{total}" if total else f"step {progress.done}")
        for name in self.step.live_metrics:
            if name in self.model.series:
                parts.append(f"{name} {self.model.series[name].last:.4g}")
        if progress.remaining_seconds is not None:
            parts.append(f"ETA {duration(progress.remaining_seconds)}")
        return ", ".join(parts)


class Watch:
    """Follows a run until its end. It only reads the folder, and may ask the run to stop.

    `supervisor` is the process that was just started; None: the one that run.json names.
    """

    def __init__(self, run: RunFolder, supervisor: subprocess.Popen[bytes] | None = None) -> None:
        self.run = run
        self.supervisor = supervisor
        self.state = run.read_state() or unknown_run_state()
        self.step_watch: StepWatch | None = None
        self.stop_requests = 0
        self.interrupts = 0

    def follow(self, show: Callable[[], None], ask: Callable[[], str] | None = None) -> str:
        """Call `show` after each look, until the run ends; its final state.

        A run whose supervisor died without an end stays `running` (or `pending`).

        Args:
            show: is called after each look.
            ask: what to do after the first Ctrl-C: "detach", "stop" or "continue". Without it a
                Ctrl-C is a request to stop.
        """
        while True:
            ended = not self._supervised()
            self.look()
            show()
            if ended and not self._is_guarded():
                self.look()
                return self._final_state()
            if self.interrupts:
                self.interrupts = 0
                answer = ask() if ask and not self.stop_requests else "stop"
                if answer == "detach":
                    return DETACHED
                if answer == "stop":
                    self.ask_to_stop()
            time.sleep(POLL_SECONDS)

    def _supervised(self) -> bool:
        if self.supervisor is not None:
            return self.supervisor.poll() is None
        return control.has_supervisor(self.run.read_state())

    def _is_guarded(self) -> bool:
        """Whether a guard is ending what a killed supervisor left, and will write run.json."""
        if self.state["state"] != RUNNING:
            return False
        try:
            with self.run.lock(wait=False):
                return False
        except RunIsHeld:
            return True

    def look(self) -> None:
        """Read run.json and what the running step wrote."""
        self.state = self.run.read_state() or self.state
        step = self.running_step()
        if step is None:
            return
        if self.step_watch is None or self.step_watch.step != step:
            self.step_watch = StepWatch(step, self.run.step_folder(step))
        self.step_watch.update()

    def running_step(self) -> Step | None:
        """The step that runs now."""
        states = {name: record["state"] for name, record in self.state["steps"].items()}
        return next((step for step in STEPS if states.get(step.name) == RUNNING), None)

    def ask_to_stop(self) -> None:
        """Ask for a stop with a checkpoint; then for one without; then without the grace."""
        self.stop_requests += 1
        try:
            if self.stop_requests == 1:
                self.run.request_stop(control.SAVE_SECONDS)
            elif self.supervisor is None:
                control.end_now(self.run)
            elif self.supervisor.poll() is None:
                self.supervisor.send_signal(signal.SIGTERM)
        except control.NotRunning:
            return  # it has ended meanwhile, as the next look tells

    def stopping_text(self) -> str:
        """What happens to a run that was asked to stop, and what another Ctrl-C does."""
        return stopping.stopping_text(self.state, self.stop_requests, "Ctrl-C")

    def is_stopping(self) -> bool:
        """Whether this or another process asked the run to stop."""
        return self.stop_requests > 0 or self.state["stop"] is not None

    def _final_state(self) -> str:
        # a request may reach the supervisor before it has begun anything, and end it
        if self.stop_requests and self.running_step() is None and self.state["state"] != DONE:
            self.state["state"] = STOPPED
            self.run.write_state(self.state)
        return self.state["state"]


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
            pause = display.paused if isinstance(display, _LivePicture) else nullcontext

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
        print(tables.summary(watched.state))
    if outcome == DETACHED:
        tell_detached(run)
        return 0
    if outcome == DONE:
        if can_talk(watched.state) and not json_output:
            print(f"\nTalk with it: dschat chat --path {shlex.quote(shown_path(run.path))}")
        return EXIT_CODES[DONE]
    print(_explain(run, watched.state), file=sys.stderr)
    return EXIT_CODES.get(outcome, EXIT_CODES[FAILED])


def tell_detached(run: RunFolder) -> None:
    """Say that a run goes on although nobody watches it any more."""
    shown = shlex.quote(shown_path(run.path))
    print(f"The run goes on. See it: dschat runs attach {shown}", file=sys.stderr)


def can_talk(state: RunState) -> bool:
    """Whether a step is done whose model can be talked with."""
    return any(step.chat_models and record["state"] == DONE for step, record in steps_of(state))


def _ask(watched: Watch) -> str:
    """What a person wants after Ctrl-C; a second Ctrl-C is a stop, an end of input a detach."""
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
                f"{tables.plain(cause['line'])} -- {cause['advice']} Log: {run.training_log(step)}"
            )
    if state["state"] == PAUSED:
        told = "; ".join(gates.told(record) for record in gates.waiting(state))
        shown = shlex.quote(shown_path(run.path))
        return (
            f"dschat: paused: {told}. Look at it: dschat runs show {shown}. To go on say why: "
            f'dschat runs resume {shown} --accept "REASON"'
        )
    if state["state"] == STOPPED:
        return (
            "dschat: stopped; nothing of the run is left running. Go on: dschat run --resume "
            + shlex.quote(shown_path(run.path))
        )
    running = [r["process"] for r in state["steps"].values() if r["state"] == RUNNING]
    leader = next(filter(None, running), None)
    left = f"; its process group {leader['pid']} may still run" if leader else ""
    said = tables.plain(last_line(run.supervisor_log))
    return f"dschat: the run's supervisor is gone ({said}){left}. See {run.supervisor_log}"


def _display(watched: Watch) -> AbstractContextManager[Callable[[], None]]:
    """A live picture on a terminal, else lines; both on stderr."""
    if sys.stderr.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return _LivePicture(watched)
    return nullcontext(_Lines(watched))


class _Lines:
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
            told = ("", f"stopping {self.watched.stop_requests > 1}")
            if self.shown != told:
                self.shown = told
                print(self.watched.stopping_text(), file=sys.stderr, flush=True)
            return
        if step_watch is None:
            return
        now = time.monotonic()
        current = (step_watch.step.name, step_watch.progress.phase or STARTING)
        if current[0] != self.shown[0]:
            self.warnings = 0
        for text in step_watch.warnings[self.warnings :]:
            print(f"warning: {tables.plain(text)}", file=sys.stderr)
        self.warnings = len(step_watch.warnings)
        if current == self.shown and now - self.last < SECONDS_BETWEEN_LINES:
            return
        self.shown, self.last = current, now
        step = step_watch.step
        print(f"step {step.number} {step.title}: {step_watch.line()}", file=sys.stderr, flush=True)


class _LivePicture:
    """A row a step, redrawn in place: state, time, bar, metrics, time left."""

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
            told = tables.summary_text(step.name, record["metrics"])
            followed = watched.step_watch
            if record["state"] == RUNNING and followed is not None and followed.step == step:
                progress = followed.progress
                bar = ProgressBar(total=progress.total or 1, completed=progress.done, width=20)
                told = followed.line()
            grid.add_row(
                Text(f"{step.number} {step.title}"),
                Text(record["state"], style=colours.get(record["state"], "dim")),
                Text(duration(seconds) if seconds is not None else ""),
                bar,
                Text(told),
            )
        lines: list[RenderableType] = [Text(f"run: {watched.run.path}", style="dim"), grid]
        if watched.step_watch is not None and watched.step_watch.warnings:
            lines.append(Text(tables.plain(watched.step_watch.warnings[-1]), style="yellow"))
        lines += [
            Text(f"gate: {gates.told_whole(gate)}", style="yellow")
            for gate in gates.known(watched.state)
        ]
        if watched.is_stopping():
            lines.append(Text(watched.stopping_text(), style="yellow"))
        return Group(*lines)
