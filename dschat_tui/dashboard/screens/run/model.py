"""What is known of a run: its logs, its answers, run.json, and which of its steps is shown."""

from __future__ import annotations

import time

from dschat_tui.logs.feed import Feed, History, NewRows, News, Problem
from dschat_tui.logs.lines import LogLines
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.replay import Replay
from dschat_tui.logs.rollouts import Rollouts
from dschat_tui.logs.source import ONE_LOG, Source
from dschat_tui.runs.state import (
    RUNNING,
    RunState,
    StepState,
    has_state,
    read_run_state,
    unknown_run_state,
)
from engine.log.causes import Cause

# a log without an end that has not grown for so long is not called running
QUIET_SECONDS = 120.0


class Every:
    """Something that is due again a number of seconds after it was last done."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._next = 0.0

    def is_due(self) -> bool:
        """Whether it is to be done now; the caller then does it."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True

    def reset(self) -> None:
        """Make it due at once."""
        self._next = 0.0


class RunModel:
    """A run as the tabs show it.

    Attributes:
        speed: how fast a finished log is played again, None when the run is followed.
        logs: what was read of each log, by step.
        changed: when each log was last written, in seconds since the epoch.
        state: run.json as last read, None where there is none.
        chosen: the step that a person selected, None for the running one.
        stop_requests: how often this screen has asked the run to stop.
        problem: why a log cannot be read, if so.
    """

    def __init__(self, source: Source, speed: float | None = None) -> None:
        self.source = source
        self.speed = speed
        self.feed: Feed | Replay = (
            Feed(source.logs, source.rollouts) if speed is None else Replay(source.logs, speed)
        )
        self.logs: dict[str, LogModel] = {}
        self.changed: dict[str, float] = {}
        self.rollouts = Rollouts(source.rollouts)
        self.state: RunState | None = None
        self.chosen: str | None = None
        self.stop_requests = 0
        self.problem = ""

    def drain(self) -> None:
        """Take what the feed has read."""
        for message in self.feed.take():
            if isinstance(message, History):
                self.logs[message.key] = message.model
                self.changed[message.key] = message.changed
            elif isinstance(message, News):
                self.logs[message.key].apply(message.update)
                self.changed[message.key] = message.changed
            elif isinstance(message, NewRows):
                self.rollouts.extend(message.rows, message.restarted)
            elif isinstance(message, Problem):
                self.problem = message.text

    def read_state(self) -> None:
        """Read run.json, which says nothing about the time that a replay shows."""
        if self.speed is None:
            self.state = read_run_state(self.source.state_file)
            if not self.is_running:
                self.stop_requests = 0

    @property
    def has_all(self) -> bool:
        """Whether the history of every log has been read."""
        return len(self.logs) == len(self.source.logs)

    @property
    def run_state(self) -> RunState:
        """run.json, or a state that says nothing."""
        return self.state or unknown_run_state()

    @property
    def is_running(self) -> bool:
        """Whether run.json says that the run is running."""
        return self.run_state["state"] == RUNNING

    @property
    def is_stopping(self) -> bool:
        """Whether the run is running, and this or another process has asked it to stop."""
        return self.is_running and bool(self.stop_requests or self.run_state["stop"])

    @property
    def key(self) -> str:
        """The log that is shown: the selected one, else that of the running or latest step."""
        keys = list(self.source.logs)
        if self.chosen in self.source.logs:
            return str(self.chosen)
        for key in keys:
            if has_state(self.run_state, key, RUNNING):
                return key
        written = [key for key in keys if key in self.logs and self.logs[key].status.lines]
        latest = max((self.changed.get(key, 0.0) for key in written), default=0.0)
        return next((key for key in reversed(written) if self.changed.get(key) == latest), keys[0])

    @property
    def log(self) -> LogModel:
        """What was read of the log that is shown."""
        return self.logs.get(self.key) or LogModel()

    @property
    def lines(self) -> LogLines:
        """The lines of the log that is shown."""
        log = self.log
        return LogLines(self.source.logs[self.key], log.marks, log.status.lines)

    @property
    def step(self) -> str:
        """The step that is shown."""
        return self.step_of(self.key)

    def step_of(self, key: str) -> str:
        """The step of a log: of a log alone, by what its lines say."""
        log = self.logs.get(key)
        step = None if log is None else log.status.step
        return step or ("sft" if key == ONE_LOG else key)

    def record(self, key: str) -> StepState | None:
        """What run.json has of a step."""
        return self.run_state["steps"].get(key)

    def state_of(self, key: str) -> str:
        """The state of a step by run.json, else by its log."""
        record = self.record(key)
        if record is not None:
            return record["state"]
        log = self.logs.get(key)
        if log is None or not log.status.lines:
            return "pending"
        if log.status.state != "unknown":
            return {"ok": "done"}.get(log.status.state, log.status.state)
        if log.status.model is not None:
            return "done"
        quiet = time.time() - self.changed.get(key, 0.0) > QUIET_SECONDS
        return "unknown" if quiet else "running"

    def cause(self) -> Cause | None:
        """Why the step that is shown failed, where that is known."""
        key = self.key
        if self.state_of(key) != "failed":
            return None
        record = self.record(key)
        cause = (record["cause"] if record else None) or self.log.status.cause
        return cause if cause and {"id", "line", "advice"} <= set(cause) else None

    def silent_seconds(self) -> float | None:
        """For how long a running step has written nothing; None for another one."""
        changed = self.changed.get(self.key)
        is_running = self.state_of(self.key) == "running"
        return time.time() - changed if is_running and changed else None

    def processes(self) -> list[int]:
        """The pids of the supervisor and of the steps while the run is running."""
        state = self.run_state
        found = [state["supervisor"], *(step["process"] for step in state["steps"].values())]
        return [process["pid"] for process in found if process and self.is_running]
