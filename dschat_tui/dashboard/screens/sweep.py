"""The sweep screen: the matrix filling in, cell by cell; enter opens a cell as a run."""

from __future__ import annotations

import time
from pathlib import Path
from textwrap import wrap

from rich.cells import set_cell_size
from textual.app import ComposeResult

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.lines import Items, LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.source import SourceError, find_source
from dschat_tui.sweep.report import (
    bar_text,
    fastest,
    measured_quantities,
    shown,
    smallest,
)
from dschat_tui.sweep.results import QUANTITIES
from dschat_tui.sweep.state import (
    CellRecord,
    SweepError,
    SweepFolder,
    SweepState,
    counted,
    is_running,
    measured,
    number,
)
from dschat_tui.text import ASCII, Glyphs, clean, duration

REFRESH_SECONDS = 1.0
STATE_CELLS, TIME_CELLS, NUMBER_CELLS = 9, 8, 11
LEAST_NAME_CELLS = 24
LEAST_BAR_CELLS, MOST_BAR_CELLS = 10, 40
MOST_DETAIL_ROWS = 2
STYLES = {
    "done": "good",
    "running": "strong",
    "failed": "bad",
    "oom": "bad",
    "timeout": "warn",
    "pending": "muted",
    "pruned": "muted",
}
COLUMNS = ("samples_per_s", "peak_device_bytes", "peak_host_bytes", "reward", "loss")


class CellRows(Items[CellRecord]):
    """A row per cell: its name, state, time, what it measured, and the bar of its step."""

    def __init__(self, state: SweepState, width: int, glyphs: Glyphs) -> None:
        super().__init__(state["cells"], glyphs)
        self._columns = [q for q in measured_quantities(state) if q.key in COLUMNS]
        longest = max((number(cell, "step_s") or 0.0 for cell in self.items), default=0.0)
        self._longest = longest or 1.0
        names = max((len(cell["name"]) for cell in self.items), default=0)
        left = width - 3 - STATE_CELLS - TIME_CELLS - 1
        # the name first, then the numbers; the bar gets the rest
        self._name_cells = max(LEAST_NAME_CELLS, min(names, left))
        left -= self._name_cells
        self._columns = self._columns[: max(0, left // NUMBER_CELLS)]
        left -= NUMBER_CELLS * len(self._columns) + 2
        self._bar_cells = min(MOST_BAR_CELLS, left) if left >= LEAST_BAR_CELLS else 0

    @property
    def head(self) -> Row:
        """The titles over the columns."""
        titles = "".join(f"{quantity.title:>{NUMBER_CELLS}}" for quantity in self._columns)
        bar = "generate, train, other" if self._bar_cells >= 22 else ""
        text = f"   {'cell':<{self._name_cells}} {'state':<{STATE_CELLS}}{'time':>{TIME_CELLS}}"
        return [(f"{text}{titles}  {bar}".rstrip(), "muted")]

    def row(self, item: CellRecord, shift: int) -> Row:
        """One cell."""
        state = item["state"]
        seconds = item["seconds"]
        if state == "running" and item["started"]:
            seconds = time.time() - item["started"]
        name = set_cell_size(clean(item["name"], self.glyphs is ASCII), self._name_cells)
        took = duration(seconds) if seconds else ""
        style = STYLES.get(state, "text")
        row: Row = [
            (f" {self._glyph(state)} ", style),
            (f"{name} ", "text"),
            (f"{state:<{STATE_CELLS}}", style),
            (f"{took:>{TIME_CELLS}}", "text"),
        ]
        if state != "done":
            return row
        numbers = "".join(
            f"{shown(quantity, measured(item, quantity.key)):>{NUMBER_CELLS}}"
            for quantity in self._columns
        )
        row.append((numbers, "text"))
        if self._bar_cells:
            bar = bar_text(item, self._longest, self._bar_cells, self.glyphs.parts)
            row.append((f"  {bar}", "line0"))
        return row

    def _glyph(self, state: str) -> str:
        glyphs = self.glyphs
        by_state = {
            "done": glyphs.done,
            "running": glyphs.running,
            "pending": glyphs.pending,
            "pruned": glyphs.dot,
            "timeout": glyphs.stopped,
        }
        return by_state.get(state, glyphs.failed)


class SweepScreen(DashboardScreen):
    """One sweep, read from its sweep.json once a second."""

    CSS_PATH = "sweep.tcss"
    BINDINGS = keys.bindings("sweep")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.folder = SweepFolder(path)
        self.state: SweepState | None = None

    @property
    def chosen(self) -> CellRecord | None:
        """The cell under the cursor."""
        cells = self.state["cells"] if self.state else []
        cursor = self.query_one("#cells", LineList).cursor
        return cells[cursor] if cursor < len(cells) else None

    def compose(self) -> ComposeResult:
        """A title, the matrix, the cell under the cursor, the keys."""
        yield Line(id="sweep-title")
        yield Line(id="sweep-head")
        yield LineList(id="cells")
        yield Line(id="sweep-details")
        yield Line(id="sweep-keys")

    def on_mount(self) -> None:
        """Read the sweep now and every second."""
        self.query_one("#cells", LineList).focus()
        self.set_interval(REFRESH_SECONDS, self.read)
        self.call_after_refresh(self.read)

    def on_screen_resume(self) -> None:
        """Read the sweep when this screen comes back."""
        self.call_after_refresh(self.read)

    def read(self) -> None:
        """Read the sweep as it is now."""
        if not self.is_current:
            return
        try:
            self.state = self.folder.read() or self.state
        except (OSError, SweepError) as error:
            # the title has the folder already, and little room
            self.show_message(str(error).removeprefix(f"{self.folder.path}/"))
        self.draw()

    def draw(self) -> None:
        """Draw what has changed."""
        if not self.can_draw:
            return
        enter: Row = [(" enter", "strong"), (" open the cell ", "muted")]
        self.query_one("#sweep-keys", Line).show(enter + self.key_hints(type(self.app)))
        title: Row = [(" sweep", "strong")]
        place: Row = [(f"  {clean(str(self.folder.path), self.ascii_only)}", "muted")]
        if self.message:
            place.insert(0, (f"  {self.message}", "warn"))
        listed = self.query_one("#cells", LineList)
        if self.state is None:
            self.query_one("#sweep-title", Line).show(title + place)
            listed.show(Nothing("no sweep.json yet"))
            return
        standing = self.state["state"]
        if standing == "running" and not is_running(self.state):
            standing = "stopped"
        title.append((f"  {standing}  {counted(self.state)}", "text"))
        self.query_one("#sweep-title", Line).show(title + place)
        rows = CellRows(self.state, self.size.width, self.glyphs)
        self.query_one("#sweep-head", Line).show(rows.head)
        listed.show(rows)
        self._draw_details()

    def _draw_details(self) -> None:
        cell = self.chosen
        if cell is None or self.state is None:
            return
        lines = [f"{cell['name']}: {cell['state']}"]
        if cell["reason"]:
            lines.append(cell["reason"])
        if cell["cause"]:
            lines.append(cell["cause"]["advice"])
        figures = [
            f"{quantity.title} {shown(quantity, value)}"
            for quantity in QUANTITIES
            if (value := measured(cell, quantity.key)) is not None
        ]
        half = -(-len(figures) // 2)
        lines += [", ".join(part) for part in (figures[:half], figures[half:]) if part]
        best, small = fastest(self.state), smallest(self.state)
        if best is not None:
            lines.append(f"fastest: {best['name']}")
        if small is not None:
            lines.append(f"smallest: {small[0]['name']}")
        shown_rows: list[Row] = [
            [(f" {part}", "text")]
            for line in lines
            for part in wrap(clean(line, self.ascii_only), self.size.width - 2)[:MOST_DETAIL_ROWS]
        ]
        self.query_one("#sweep-details", Line).show(*shown_rows)

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """Show the cell under the cursor in detail."""
        self._draw_details()

    def on_line_list_picked(self, message: LineList.Picked) -> None:
        """Open a cell as a run."""
        cell = self.chosen
        if cell is None:
            return
        try:
            source = find_source(self.folder.path / cell["name"])
        except SourceError:
            self.show_message(f"no run: it is {cell['state']}")
            return
        self.app.open_run(source)  # type: ignore[attr-defined]

    def action_back(self) -> None:
        """Go back to the previous screen."""
        self.leave()
