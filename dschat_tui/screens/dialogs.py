"""A question over the screen, answered by one key."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from dschat_tui.widgets.bars import Line
from dschat_tui.widgets.rows import Row

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
        rows: list[Row] = [[(line, "text")] for line in self._lines]
        rows.append([])
        rows += [[(f"[{key}] ", "strong"), (text, "text")] for key, text, _ in self._options]
        width = max(sum(len(text) for text, _ in row) for row in rows)
        box, text = self.query_one("#question"), self.query_one("#question-text", Line)
        box.styles.width, box.styles.height = width + 6, len(rows) + 4
        text.styles.height = len(rows)
        text.show(*rows)
        self.call_after_refresh(text.show, *rows)

    def on_key(self, event: events.Key) -> None:
        """Answer."""
        event.stop()
        if event.key == "escape":
            self.dismiss(self._options[-1][2])
        for key, _, answer in self._options:
            if event.key in (key, "enter" if key == self._options[0][0] else key):
                self.dismiss(answer)
                return
