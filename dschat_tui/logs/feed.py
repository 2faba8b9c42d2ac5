"""A thread that reads logs and rollouts, and a queue of what it found, for the screen to drain."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from dschat_tui.logs.follow import Batch, Follower
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.records import Update
from dschat_tui.logs.rollouts import Row, parse_rows

if TYPE_CHECKING:
    from dschat_tui.logs.parse import LogParser

POLL_SECONDS = 0.05
RETRY_SECONDS = 1.0
# a log that does not grow is read at most after so many polls
IDLE_POLLS = 10
# after so long without a new line, the last step's lines are taken as complete
FINISHED_SECONDS = 5.0


@dataclass(frozen=True)
class History:
    """A log as it was when it was first read whole; `changed` is when it last grew (epoch)."""

    key: str
    model: LogModel
    changed: float


@dataclass(frozen=True)
class News:
    """What was added to a log since."""

    key: str
    update: Update
    changed: float


@dataclass(frozen=True)
class NewRows:
    """Answers that were written into rollouts.jsonl; `restarted`: earlier ones no longer count."""

    rows: list[Row]
    restarted: bool


@dataclass(frozen=True)
class Problem:
    """A file that cannot be read, and why."""

    key: str
    text: str


Message = History | News | NewRows | Problem


class LogThread(threading.Thread):
    """A thread whose messages the screen takes when it draws."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._stopped = threading.Event()

    def take(self) -> list[Message]:
        """All messages that have come since the last call, in order."""
        taken = []
        try:
            while True:
                taken.append(self._messages.get_nowait())
        except Empty:
            return taken

    def stop(self) -> None:
        """Let the thread end; it checks 20 times per second."""
        self._stopped.set()


class Feed(LogThread):
    """Follows the logs of a run: the history of each at once, then new lines as they come."""

    def __init__(self, logs: Mapping[str, Path], rollouts: Path | None = None) -> None:
        super().__init__("dschat-feed")
        self._logs = [_FollowedLog(key, path) for key, path in logs.items()]
        self._rollouts = None if rollouts is None else Follower(rollouts)

    def run(self) -> None:
        """Read until stopped; what goes wrong is a message."""
        try:
            self._read_on()
        except Exception as error:
            self._messages.put(Problem("", f"reading ended: {error!r}"))
            raise

    def _read_on(self) -> None:
        # the log that grew last is the one on the screen
        for log in sorted(self._logs, key=_FollowedLog.changed, reverse=True):
            self._poll(log)
        while not self._stopped.wait(POLL_SECONDS):
            for log in self._logs:
                if log.is_due():
                    self._poll(log)
            self._read_rollouts()

    def _poll(self, log: _FollowedLog) -> None:
        try:
            message = log.read(self._stopped)
        except OSError as error:
            log.rest(RETRY_SECONDS)
            self._messages.put(Problem(log.key, f"{log.path}: {error.strerror or error}"))
            return
        if message is not None:
            self._messages.put(message)

    def _read_rollouts(self) -> None:
        if self._rollouts is None:
            return
        try:
            batch = self._rollouts.read()
        except OSError as error:
            self._messages.put(Problem("rollouts", f"{self._rollouts.path}: {error.strerror}"))
            self._rollouts = None
            return
        if batch.lines or batch.restarted:
            self._messages.put(NewRows(parse_rows(batch), batch.restarted))


class _FollowedLog:
    def __init__(self, key: str, path: Path) -> None:
        self.key = key
        self.path = path
        self._follower = Follower(path)
        self._parser: LogParser | None = None
        self._next = 0.0
        self._idle_polls = 0
        self._is_finished = False

    def changed(self) -> float:
        """When the file last grew, in seconds since the epoch; 0 where there is none."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def rest(self, seconds: float) -> None:
        self._next = time.monotonic() + seconds

    def read(self, stopped: threading.Event) -> History | News | None:
        if self._parser is None:
            return History(self.key, self._read_history(stopped), self.changed())
        batch = self._follower.read()
        if batch.lines or batch.restarted:
            self._idle_polls, self._is_finished = 0, False
            return News(self.key, self._parser.read(batch), time.time())
        self._idle_polls += 1
        self.rest(min(self._idle_polls, IDLE_POLLS) * POLL_SECONDS)
        if self._is_finished or time.time() - self.changed() < FINISHED_SECONDS:
            return None
        self._is_finished = True
        return News(self.key, self._parser.finish(), self.changed())

    def _read_history(self, stopped: threading.Event) -> LogModel:
        # here, not above: the grammar takes a moment to load, and the first picture comes first
        from dschat_tui.logs.parse import LogParser

        parser, model = LogParser(), LogModel()
        batch = Batch(more=True)
        while batch.more and not stopped.is_set():
            batch = self._follower.read()
            model.apply(parser.read(batch))
        self._is_finished = time.time() - self.changed() > FINISHED_SECONDS
        if self._is_finished:
            model.apply(parser.finish())
        self._parser = parser
        return model
