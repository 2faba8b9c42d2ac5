"""A list of any length with a cursor; only the rows on the screen are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from textual import events
from textual.message import Message

from dschat_tui.dashboard.keys import bindings
from dschat_tui.dashboard.widgets.rows import Row, Rows, fit
from dschat_tui.text import Glyphs

Item = TypeVar("Item")
SHIFT_CELLS = 16


class Source(Protocol):
    """Where rows come from: how many there are, and those that are asked for."""

    @property
    def count(self) -> int:
        """How many rows there are."""

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on, `count` at most, without their first `shift` cells."""


class Nothing:
    """An empty source, which says why it is empty."""

    count = 1

    def __init__(self, text: str) -> None:
        self.text = text

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """The one row that says so."""
        return [[(self.text, "muted")]]


class Lines:
    """A source of rows that are made already."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.count = len(rows)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return self._rows[first : first + count]


class Items(Generic[Item]):
    """A source with a row for each item."""

    def __init__(self, items: Sequence[Item], glyphs: Glyphs) -> None:
        self.items = items
        self.glyphs = glyphs

    @property
    def count(self) -> int:
        """How many items there are."""
        return len(self.items)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [self.row(item, shift) for item in self.items[first : first + count]]

    def row(self, item: Item, shift: int) -> Row:
        """The row of an item, its text without the first `shift` cells."""
        raise NotImplementedError


class LineList(Rows, can_focus=True):
    """The rows of a source around a cursor; `follow` keeps the last row visible."""

    DEFAULT_CSS = """
    LineList { height: 1fr; width: 1fr; }
    """
    BINDINGS = bindings("list")

    class Picked(Message):
        """Enter was pressed on a row, or it was clicked."""

        def __init__(self, list_id: str | None, index: int) -> None:
            super().__init__()
            self.list_id = list_id
            self.index = index

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, list_id: str | None, index: int) -> None:
            super().__init__()
            self.list_id = list_id
            self.index = index

    def __init__(self, *, id: str | None = None, follow: bool = False) -> None:
        super().__init__(id=id)
        self.source: Source = Nothing("")
        self.cursor = 0
        self.top = 0
        self.shift = 0
        self.follow = follow
        self._height = 0

    def show(self, source: Source) -> None:
        """Show a source, the cursor where it was."""
        self.source = source
        if self.follow:
            self.cursor = max(source.count - 1, 0)
        self.redraw()

    def go_to(self, index: int) -> None:
        """Put the cursor on a row."""
        last = max(self.source.count - 1, 0)
        self.cursor = min(max(index, 0), last)
        self.redraw()
        self.post_message(self.Moved(self.id, self.cursor))

    def build(self, width: int, height: int) -> list[Row]:
        """The rows on the screen, the cursor's reversed."""
        self._height = height
        last = max(self.source.count - 1, 0)
        self.cursor = min(self.cursor, last)
        lowest, highest = self.cursor - height + 1, self.cursor
        self.top = min(max(self.top, lowest, 0), highest, max(last - height + 1, 0))
        rows = self.source.rows(self.top, height, self.shift)
        for index, row in enumerate(rows):
            rows[index] = fit(row, width, self.cut)
            if self.top + index == self.cursor and self.has_focus:
                text = "".join(text for text, _ in rows[index])
                rows[index] = [(text or " ", "chosen")]
        return rows

    def on_focus(self) -> None:
        """Show the cursor."""
        self.redraw()

    def on_blur(self) -> None:
        """Hide the cursor."""
        self.redraw()

    def _move(self, rows: int) -> None:
        self.follow = False
        self.go_to(self.cursor + rows)

    def action_line(self, rows: int) -> None:
        """Move by rows."""
        self._move(rows)

    def action_page(self, pages: int) -> None:
        """Move by pages."""
        self._move(pages * max(self._height - 1, 1))

    def action_first(self) -> None:
        """Go to the first row."""
        self.follow = False
        self.go_to(0)

    def action_last(self) -> None:
        """Go to the last row."""
        self.go_to(self.source.count - 1)

    def action_follow(self) -> None:
        """Keep the last row visible, or stop doing so."""
        self.follow = not self.follow
        if self.follow:
            self.go_to(self.source.count - 1)

    def action_shift(self, steps: int) -> None:
        """Scroll to the right, or back."""
        self.shift = max(self.shift + steps * SHIFT_CELLS, 0)
        self.redraw()

    def action_pick(self) -> None:
        """Pick the row under the cursor."""
        self.post_message(self.Picked(self.id, self.cursor))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Three rows down."""
        event.stop()
        self._move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Three rows up."""
        event.stop()
        self._move(-3)

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the pointer is; on the cursor, pick."""
        index = self.top + event.y
        if index == self.cursor:
            self.action_pick()
        else:
            self.follow = False
            self.go_to(index)
