"""A question over the screen, answered by one key, or by a line of text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from dschat_tui.widgets.bars import Line
from dschat_tui.widgets.rows import Row

if TYPE_CHECKING:
    from textual.widgets import Input

# cells of the box beside its text, and rows above and below it
FRAME_CELLS, FRAME_ROWS = 6, 4

# key, what it does, and the answer that it gives
Option = tuple[str, str, str]


class Question(ModalScreen[str]):
    """Asks; the answer is that of the option whose key is pressed, the last for escape."""

    CSS_PATH = "dialogs.tcss"

    def __init__(self, lines: Sequence[str], options: Sequence[Option]) -> None:
        super().__init__()
        self._lines = lines
        self._options = options

    def compose(self) -> ComposeResult:
        """The question in a box."""
        with Vertical(id="question"):
            yield Line(id="question-text")

    def on_mount(self) -> None:
        """Fill and size the box."""
        told = _broken(self._lines, self.app.size.width - FRAME_CELLS)
        room = self.app.size.height - FRAME_ROWS - len(self._options) - 1
        rows: list[Row] = [[(line, "text")] for line in told[: max(room, 1)]]
        rows.append([])
        rows += [[(f"[{key}] ", "strong"), (text, "text")] for key, text, _ in self._options]
        _fill(self, rows, 0)

    def on_key(self, event: events.Key) -> None:
        """Answer."""
        event.stop()
        if event.key == "escape":
            self.dismiss(self._options[-1][2])
        for key, _, answer in self._options:
            if event.key in (key, "enter" if key == self._options[0][0] else key):
                self.dismiss(answer)
                return


class Entry(ModalScreen[str]):
    """Asks for a line of text; the answer is empty for escape."""

    CSS_PATH = "dialogs.tcss"

    def __init__(self, lines: Sequence[str], placeholder: str) -> None:
        super().__init__()
        self._lines = lines
        self._placeholder = placeholder

    def compose(self) -> ComposeResult:
        """What is asked, and the field, in a box."""
        # here, not above: it takes long to load, and the first picture comes first
        from textual.widgets import Input

        with Vertical(id="question"):
            yield Line(id="question-text")
            yield Input(placeholder=self._placeholder, id="entry", compact=True)

    def on_mount(self) -> None:
        """Fill and size the box."""
        told = _broken(self._lines, self.app.size.width - FRAME_CELLS)
        rows: list[Row] = [[(line, "text")] for line in told]
        rows += [[("enter: go on    escape: leave it", "muted")]]
        _fill(self, rows[-(self.app.size.height - FRAME_ROWS - 1) :], 1)
        self.query_one("#entry").focus()

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Answer, once something was typed."""
        if message.value.strip():
            self.dismiss(message.value.strip())

    def on_key(self, event: events.Key) -> None:
        """Leave without an answer."""
        if event.key == "escape":
            event.stop()
            self.dismiss("")


def _broken(lines: Sequence[str], width: int) -> list[str]:
    """Lines broken at a width; an empty one stays."""
    return [part for line in lines for part in textwrap.wrap(line, max(width, 20)) or [""]]


def _fill(screen: ModalScreen[str], rows: list[Row], more_rows: int) -> None:
    """Show rows in the box of a question, and size it for them and so many rows more."""
    width = max(sum(len(text) for text, _ in row) for row in rows)
    box, text = screen.query_one("#question"), screen.query_one("#question-text", Line)
    box.styles.width = width + FRAME_CELLS
    box.styles.height = len(rows) + more_rows + FRAME_ROWS
    text.styles.height = len(rows)
    text.show(*rows)
    screen.call_after_refresh(text.show, *rows)
