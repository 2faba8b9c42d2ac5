"""Following a run until its end, whoever started it, and asking it to stop."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dschat_tui.logs.follow import Follower
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.parse import LogParser
from dschat_tui.runs import control, stopping
from dschat_tui.runs.folder import RunFolder, RunIsHeld
from dschat_tui.runs.progress import Progress, progress_of
from dschat_tui.runs.state import DONE, RUNNING, STOPPED, unknown_run_state
from dschat_tui.text import duration
from engine.config.steps import STEPS, Step

DETACHED = "detached"
STARTING, TRAINING = "starting", "training"
POLL_SECONDS = 0.25


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
        self._was_gone = False

    def follow(self, show: Callable[[], None], ask: Callable[[], str] | None = None) -> str:
        """Call `show` after each look, until the run ends; its final state.

        A run whose supervisor died without an end stays `running` (or `pending`).

        Args:
            show: called after each look.
            ask: what to do after the first Ctrl-C: "detach", "stop" or "continue". Without it a
                Ctrl-C is a request to stop.
        """
        while True:
            ended = self.has_ended()
            self.look()
            show()
            if ended:
                return self._final_state()
            if self.interrupts:
                self.interrupts = 0
                answer = ask() if ask and not self.stop_requests else "stop"
                if answer == "detach":
                    return DETACHED
                if answer == "stop":
                    self.ask_to_stop()
            time.sleep(POLL_SECONDS)

    def has_ended(self) -> bool:
        """Whether its supervisor is gone, and no guard is ending what it left."""
        if control.is_supervised(self.run, self.supervisor):
            return False
        state = self.run.read_state()
        is_new, self._was_gone = not self._was_gone, True
        if is_new and state is not None and state["state"] == RUNNING:
            return False  # its guard may be about to take the lock
        try:
            with self.run.lock(wait=False):
                return True
        except RunIsHeld:  # the guard ends the processes, and then writes run.json
            return False

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
        asked_by_others = 1 if self.state["stop"] else 0
        self.stop_requests = max(self.stop_requests, asked_by_others) + 1
        with suppress(control.NotRunning):  # it has ended meanwhile, as the next look shows
            control.ask_to_stop(self.run, self.supervisor)

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
