"""The events tab: what happened besides training steps."""

from __future__ import annotations

from dschat_tui.dashboard.keys import Key, bind
from dschat_tui.dashboard.screens.run.model import RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.widgets.lines import Items, LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.records import Event
from dschat_tui.text import ASCII, clean

_STYLES = {
    "warning": "warn",
    "not_finite": "bad",
    "overflow": "warn",
    "loss_scale_floor": "bad",
    "finished": "good",
    "evaluation": "strong",
}


class EventRows(Items[Event]):
    """Events, oldest first."""

    def row(self, item: Event, shift: int) -> Row:
        """Kind and text of an event."""
        kind = f"{item.kind.replace('_', ' '):<11} "
        text = clean(item.text, self.glyphs is ASCII)[shift:]
        return [(kind, _STYLES.get(item.kind, "muted")), (text, "text")]


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
            self.post_message(self.LineWanted(self.source.items[self.cursor].offset))
