"""One-row widgets: a row that its owner sets, and the row of tabs."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.message import Message

from dschat_tui.dashboard.widgets.rows import Row, Rows, fit, row_text


class Line(Rows):
    """Rows that the owner sets."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._content: list[Row] = []

    def show(self, *rows: Row) -> None:
        """Show these rows, cut to the width, in place of those before."""
        self._content = list(rows)
        self.redraw()

    def build(self, width: int, height: int) -> list[Row]:
        """The rows that fit."""
        return [fit(row, width, self.cut) for row in self._content[:height]]


class TabBar(Rows):
    """The names of tabs, the chosen one reversed and in brackets; a click chooses."""

    class Chosen(Message):
        """A tab was clicked."""

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(
        self, names: Sequence[str], hint: str = "first letter opens", *, id: str | None = None
    ) -> None:
        super().__init__(id=id)
        self.names = names
        self.hint = f"  {hint}"
        self.chosen = names[0]
        self.badges: dict[str, str] = {}

    def show(self, chosen: str, badges: dict[str, str]) -> None:
        """Mark a tab; badges are short texts behind names."""
        self.chosen, self.badges = chosen, badges
        self.redraw()

    def _labels(self) -> list[tuple[str, str]]:
        labels = []
        for name in self.names:
            badge = self.badges.get(name, "")
            text = f"{name} {badge}".strip()
            labels.append((name, f"[{text}]" if name == self.chosen else f" {text} "))
        return labels

    def build(self, width: int, height: int) -> list[Row]:
        """The names in one row."""
        row: Row = []
        for name, text in self._labels():
            style = "chosen" if name == self.chosen else "muted"
            row.append((text, "warn" if name in self.badges and style == "muted" else style))
        if len(row_text(row)) + len(self.hint) <= width:
            row.append((self.hint, "muted"))
        return [fit(row, width, self.cut)]

    def on_click(self, event: events.Click) -> None:
        """Choose the tab under the pointer."""
        x = 0
        for name, text in self._labels():
            x += len(row_text([(text, "")]))
            if event.x < x:
                self.post_message(self.Chosen(name))
                return
