"""What every screen of the dashboard has: glyphs, the row of keys, a message for some seconds."""

from __future__ import annotations

import time
from typing import ClassVar

from textual.screen import Screen

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.settling import TOO_SOON, Settling
from dschat_tui.dashboard.widgets.rows import Row, glyphs_of
from dschat_tui.text import Glyphs, clean

MESSAGE_SECONDS = 6.0
# smaller screens show one panel at a time
SMALL_WIDTH, SMALL_HEIGHT = 80, 20


class DashboardScreen(Settling, Screen[None]):
    """A screen that redraws itself when its size has changed."""

    AUTO_FOCUS: ClassVar[str | None] = None
    _message, _message_until = "", 0.0

    @property
    def ascii_only(self) -> bool:
        """Whether it draws with ASCII alone."""
        return self.app.has_class("-ascii")

    @property
    def glyphs(self) -> Glyphs:
        """The characters to draw with."""
        return glyphs_of(self.app)

    @property
    def is_small(self) -> bool:
        """Whether there is room for one panel only."""
        return self.size.width < SMALL_WIDTH or self.size.height < SMALL_HEIGHT

    @property
    def can_draw(self) -> bool:
        """Whether its widgets are mounted and have a size."""
        return self.is_mounted and bool(self.size.width)

    def draw(self) -> None:
        """Draw what has changed."""
        raise NotImplementedError

    def on_resize(self) -> None:
        """Draw for the new size."""
        self.call_after_refresh(self.draw)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Refuse a key that starts, stops or deletes while it may be meant for another screen."""
        return self.may_act(type(self), action)

    def may_act(self, kind: type, action: str) -> bool:
        """Whether an action of the screen, or of a widget on it, may happen now; else say why."""
        if action in keys.acting(kind) and not self.is_settled:
            self.show_message(TOO_SOON)
            return False
        return True

    def focus_again(self) -> None:
        """Give the focus back to what had it before the prompt."""

    def take_typed(self, character: str) -> bool:
        """Put a character into the prompt; False where there is none."""
        return False

    def show_message(self, text: str) -> None:
        """Show a text for some seconds."""
        self._message, self._message_until = text, time.monotonic() + MESSAGE_SECONDS
        self.draw()
        self.set_timer(MESSAGE_SECONDS + 0.1, self.draw)

    def hide_message(self) -> None:
        """Show no text any longer, from the next drawing on."""
        self._message_until = 0.0

    @property
    def message(self) -> str:
        """The text to show now, if any."""
        is_due = time.monotonic() < self._message_until
        return clean(self._message, self.ascii_only) if is_due else ""

    def key_hints(self, *kinds: type) -> Row:
        """The most useful keys of the screen and of some classes more, for the bottom row."""
        row: Row = []
        for display, description in keys.hints(type(self), *kinds):
            row += [(f" {display}", "strong"), (f" {description} ", "muted")]
        return row

    def leave(self) -> None:
        """Go back to the previous screen, where there is one."""
        if len(self.app.screen_stack) > 2:
            self.app.pop_screen()
