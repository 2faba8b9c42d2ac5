"""A pause after each change of the screen, in which typed letters do nothing that counts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from textual import events

SETTLE_SECONDS = 1.0
TOO_SOON = "too soon after the screen changed: press it again"


class Settling:
    """A screen that can tell a key meant for it from the rest of what is typed into the last one.

    A sentence that was begun elsewhere consists of letters that start, stop and delete here. So a
    screen settles only when no letter came for a second.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)
    _unsettled_at = math.inf

    @property
    def is_settled(self) -> bool:
        """Whether a letter may start, stop or delete something now."""
        return self.clock() - self._unsettled_at >= SETTLE_SECONDS

    def unsettle(self) -> None:
        """Begin the pause, as whatever a person types into goes away."""
        self._unsettled_at = self.clock()

    def on_screen_resume(self) -> None:
        """The screen comes to the front."""
        self.unsettle()

    def on_key(self, event: events.Key) -> None:
        """Somebody is still typing."""
        if event.is_printable and not self.is_settled:
            self.unsettle()
