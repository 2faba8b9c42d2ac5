"""A finished log played again, as if it grew now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from dschat_tui.logs.feed import History, LogThread, News, Problem
from dschat_tui.logs.follow import Batch, Follower
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.records import Update

# Where a log does not say how long a step took.
SECONDS_PER_STEP = 1.0
TIMES = ("e2e_s", "latency_s")
_LONGEST_WAIT = 0.05


class Replay(LogThread):
    """Gives what a `Feed` gives, one log after another, `speed` times as fast as it happened.

    Time passes by the seconds per step that the log reports; what is between them takes none.
    """

    def __init__(self, logs: Mapping[str, Path], speed: float) -> None:
        super().__init__("dschat-replay")
        self.logs = logs
        self.speed = speed

    def run(self) -> None:
        """Play until the end or until stopped."""
        for key in self.logs:
            self._messages.put(History(key, LogModel(), 0.0))
        for key, path in self.logs.items():
            try:
                self._play(key, path)
            except Exception as error:
                self._messages.put(Problem(key, f"{path}: {error!r}"))
                raise

    def _play(self, key: str, path: Path) -> None:
        # here, not above: the grammar takes a moment to load, and the first picture comes first
        from dschat_tui.logs.parse import LogParser

        parser = LogParser()
        due, done = time.monotonic(), 0
        for batch in _lines(path):
            update = parser.read(batch)
            due += self._seconds(update, done) / self.speed
            done = update.status.done
            while (left := due - time.monotonic()) > 0:
                if self._stopped.wait(min(left, _LONGEST_WAIT)):
                    return
            self._messages.put(News(key, update, time.time()))
        self._messages.put(News(key, parser.finish(), time.time()))

    def _seconds(self, update: Update, done_before: int) -> float:
        seconds = sum(
            value
            for name in TIMES
            if name in update.points
            for value in update.points[name].values
            if value > 0
        )
        return seconds or SECONDS_PER_STEP * max(update.status.done - done_before, 0)


def _lines(path: Path) -> Iterator[Batch]:
    follower = Follower(path)
    more = True
    while more:
        batch = follower.read()
        more = batch.more
        for line, offset in zip(batch.lines, batch.offsets, strict=True):
            yield Batch([line], [offset])
