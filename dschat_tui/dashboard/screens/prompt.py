"""A line to type into, in place of the row of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from textual.containers import Container

from dschat_tui.dashboard.screens.base import DashboardScreen

if TYPE_CHECKING:
    from textual.widgets import Input


class Prompt(Container):
    """Hidden until something is asked. Its screen is `-asking` then, and unsettled afterwards."""

    def __init__(self) -> None:
        super().__init__(id="prompt")
        self._input: Input | None = None
        self._take: Callable[[str], str] | None = None
        self._follow: Callable[[str], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether something is asked."""
        return self._take is not None

    def load(self) -> Input:
        """Make the line; it takes long to load, so it is not composed: the first picture is."""
        if self._input is None:
            from textual.widgets import Input

            self._input = Input(id="line", compact=True, select_on_focus=False)
            self.mount(self._input)
        return self._input

    def ask(
        self,
        placeholder: str,
        text: str,
        take: Callable[[str], str],
        follow: Callable[[str], None] | None = None,
    ) -> None:
        """Ask for a line.

        Args:
            placeholder: what is asked for.
            text: what the line contains at first.
            take: gets the line, and returns what is wrong with it; the prompt stays open then.
            follow: gets the line whenever it changes.
        """
        self._take, self._follow = take, follow
        self.screen.add_class("-asking")
        line = self.load()
        line.value, line.placeholder, line.cursor_position = text, placeholder, len(text)
        # at once: focus() waits, and keys typed ahead do not
        self.screen.set_focus(line)

    def close(self) -> None:
        """Ask for nothing any longer."""
        if self.is_open:
            self._take = self._follow = None
            self.screen.remove_class("-asking")
            assert isinstance(self.screen, DashboardScreen)
            self.screen.unsettle()

    def take_typed(self, character: str) -> bool:
        """See DashboardScreen."""
        if self.is_open:
            self.load().insert_text_at_cursor(character)
        return self.is_open

    def on_input_changed(self, message: Input.Changed) -> None:
        """Pass on what the line contains now."""
        if self._follow is not None:
            self._follow(message.value)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Close it, or leave the line there and say what is wrong with it."""
        if self._take is None:
            return
        assert isinstance(self.screen, DashboardScreen)
        self.screen.hide_message()
        if problem := self._take(message.value):
            self.screen.show_message(problem)
        else:
            self.close()
            self.screen.focus_again()
