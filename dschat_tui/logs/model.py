"""One log as the screen has it: its series, events, status, and where its lines begin."""

from __future__ import annotations

from array import array
from collections import deque

from dschat_tui.logs.records import Event, Status, Update
from dschat_tui.logs.series import Series

EVENTS_KEPT = 2000


class LogModel:
    """The sum of all updates of one log, in bounded memory except for 8 bytes per 64 lines."""

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
        if update.cut_from is not None:
            for series in self.series.values():
                series.forget_from(update.cut_from)
        for name, points in update.points.items():
            if name not in self.series:
                self.series[name] = Series()
            self.series[name].extend(*points)
        self.events.extend(update.events)
        self.marks.extend(update.marks)
        self.status = update.status
