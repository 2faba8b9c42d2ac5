"""What every screen of the dashboard has: its signs, its row of keys, a text told for a while."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.screen import Screen

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.settling import TOO_SOON, Settling
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.text import ASCII, UNICODE, Glyphs, clean

TOLD_SECONDS = 6.0
# smaller screens show one panel at a time
SMALL_WIDTH, SMALL_HEIGHT = 80, 20


class DashboardScreen(Settling, Screen[None]):
    """A screen that draws itself anew when its size has changed."""

    AUTO_FOCUS: ClassVar[str | None] = None
    _told, _told_until = "", 0.0

    @property
    def ascii_only(self) -> bool:
        """Whether it draws with ASCII alone."""
        return self.app.has_class("-ascii")

    @property
    def glyphs(self) -> Glyphs:
        """The signs to draw with."""
        return ASCII if self.ascii_only else UNICODE

    @property
    def is_small(self) -> bool:
        """Whether there is room for one panel alone."""
        return self.size.width < SMALL_WIDTH or self.size.height < SMALL_HEIGHT

    @property
    def can_draw(self) -> bool:
        """Whether its widgets are there, and have a size."""
        return self.is_mounted and bool(self.size.width)

    def draw(self) -> None:
        """Draw what has changed."""
        raise NotImplementedError

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Refuse a key that starts, stops or deletes while it may be meant for another screen."""
        if action in keys.ACTING and not self.is_settled:
            self.tell(TOO_SOON)
            return False
        return True

    def take_typed(self, sign: str) -> bool:
        """Put a sign into the line that is typed into; False where there is no such line."""
        return False

    def tell(self, text: str) -> None:
        """Show a text for some seconds."""
        self._told, self._told_until = text, time.monotonic() + TOLD_SECONDS
        self.draw()
        self.set_timer(TOLD_SECONDS + 0.1, self.draw)

    @property
    def told(self) -> str:
        """What is to be told now, if anything."""
        return clean(self._told, self.ascii_only) if time.monotonic() < self._told_until else ""

    def key_hints(self, *scopes: str) -> Row:
        """The most useful keys of some scopes, for the last row."""
        row: Row = []
        for display, description in keys.hints(*scopes):
            row += [(f" {display}", "strong"), (f" {description} ", "muted")]
        return row

    def leave(self) -> None:
        """Go back to the screen before, where there is one."""
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()
