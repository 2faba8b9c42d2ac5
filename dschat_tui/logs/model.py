"""One log as the screen has it: its series, events, status, and where its lines begin."""

from __future__ import annotations

from array import array
from collections import deque

from dschat_tui.logs.parse import CUT, Event, Status, Update
from dschat_tui.logs.series import Series

EVENTS_KEPT = 2000


class LogModel:
    """What all updates of one log add up to; in bounded memory but for 8 bytes every 64 lines."""

    def __init__(self) -> None:
        self.version = 0
        self._begin()

    def _begin(self) -> None:
        self.series: dict[str, Series] = {}
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.status = Status()
        self.marks = array("q")

    def apply(self, update: Update) -> None:
        """Add an update; one that restarts forgets what was before."""
        self.version += 1
        if update.restarted:
            self._begin()
        series = self.series
        for name, value, step, offset in update.points:
            if name in series:
                series[name].append(value, step, offset)
            elif name == CUT:
                for one in series.values():
                    one.forget_from(step)
            else:
                series[name] = Series()
                series[name].append(value, step, offset)
        self.events.extend(update.events)
        self.marks.extend(update.marks)
        self.status = update.status
