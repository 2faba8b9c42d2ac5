"""A pause after each change of the screen, in which keys that act are refused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from textual import events

SETTLE_SECONDS = 1.0
TOO_SOON = "too soon after the screen changed: press it again"


class Settling:
    """A screen that distinguishes keys meant for it from text typed for the screen before.

    The letters of a sentence that was begun elsewhere start, stop and delete things here. So a
    screen settles only after a second without a letter.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    _unsettled_at = math.inf

    @property
    def is_settled(self) -> bool:
        """Whether a letter may start, stop or delete something now."""
        return self.clock() - self._unsettled_at >= SETTLE_SECONDS

    def unsettle(self) -> None:
        """Begin the pause, as what a person was typing into disappears."""
        self._unsettled_at = self.clock()

    def on_screen_resume(self) -> None:
        """The screen comes to the front."""
        self.unsettle()

    def on_key(self, event: events.Key) -> None:
        """Extend the pause while somebody is typing."""
        if event.is_printable and not self.is_settled:
            self.unsettle()
