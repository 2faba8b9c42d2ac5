"""The events tab: what happened besides training steps."""

from __future__ import annotations

from collections.abc import Sequence

from dschat_tui.dashboard.keys import Key, bind
from dschat_tui.dashboard.screens.run.model import RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.widgets.lines import LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.records import Event
from dschat_tui.text import ASCII, Glyphs, clean

_STYLES = {
    "warning": "warn",
    "not_finite": "bad",
    "overflow": "warn",
    "loss_scale_floor": "bad",
    "finished": "good",
    "evaluation": "strong",
}


class EventRows:
    """Events, oldest first."""

    def __init__(self, events: Sequence[Event], glyphs: Glyphs) -> None:
        self.events = events
        self._ascii = glyphs is ASCII

    @property
    def count(self) -> int:
        """How many events there are."""
        return len(self.events)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [
            [
                (f"{event.kind.replace('_', ' '):<11} ", _STYLES.get(event.kind, "muted")),
                (clean(event.text, self._ascii)[shift:], "text"),
            ]
            for event in self.events[first : first + count]
        ]


class EventsTab(LineList, RunTab):
    """The events of the log; each leads to its line."""

    tab_name = "events"
    letter = "e"
    BINDINGS = bind((Key("events", "events.follow", "f", "follow", "follow the last event", "f"),))

    def __init__(self) -> None:
        super().__init__(id=self.tab_name, follow=True)

    def update(self, run: RunModel) -> None:
        """List the events."""
        events = list(run.log.events)
        self.show(EventRows(events, self.glyphs) if events else Nothing("no events yet"))

    def action_pick(self) -> None:
        """Show the line of the event under the cursor."""
        if isinstance(self.source, EventRows):
            self.post_message(self.LineWanted(self.source.events[self.cursor].offset))
