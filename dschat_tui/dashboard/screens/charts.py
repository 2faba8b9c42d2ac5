"""Charts side by side, laid out by their number, and the keys that act on them."""

from __future__ import annotations

from collections.abc import Callable

from textual.app import ComposeResult
from textual.containers import Container

from dschat_tui.dashboard.keys import Key
from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.screens.panels import PanelSpec
from dschat_tui.dashboard.widgets.chart import BRAILLE, MARKERS, SMOOTHINGS, Chart, View, moved
from dschat_tui.dashboard.widgets.rows import Row, glyphs_of
from dschat_tui.dashboard.widgets.split import split_rows
from dschat_tui.logs.model import LogModel
from dschat_tui.text import ASCII

# a quantity that is not in the log after so many steps is not expected any more
STEPS_TO_JUDGE = 20
WIDE_COLUMNS, NARROW_COLUMNS = 3, 2

KEYS = (
    Key("charts", "charts.next", "tab", "panel(1)", "panel", "tab", 30),
    Key("charts", "charts.previous", "shift+tab", "panel(-1)", "previous panel", "shift+tab"),
    Key("charts", "charts.maximise", "m", "maximise", "maximise", "m", 31),
    Key("charts", "charts.left", "left", "cursor(-1)", "cursor to the left", "left"),
    Key("charts", "charts.right", "right", "cursor(1)", "cursor", "right", 40),
    Key("charts", "charts.far_left", "shift+left", "cursor(-10)", "ten columns", "shift+left"),
    Key("charts", "charts.far_right", "shift+right", "cursor(10)", "ten columns", "shift+right"),
    Key("charts", "charts.smooth", "o", "smooth", "smoothing", "o", 43),
    Key("charts", "charts.log_scale", "g", "log_scale", "log scale", "g", 44),
    Key("charts", "charts.markers", "b", "markers", "braille, blocks or ASCII", "b"),
)


class Panel(Chart):
    """A chart, or how the time of a step splits."""

    def __init__(self, index: int) -> None:
        super().__init__("", id=f"panel-{index}")
        self.add_class("panel")
        self.split_of: LogModel | None = None
        self._drawn: tuple[object, ...] = ()

    def show_spec(self, spec: PanelSpec, model: LogModel, view: View) -> None:
        """Show a panel of a log."""
        self.title = spec.heading(model.series)
        self.empty = "not in this log" if model.status.done >= STEPS_TO_JUDGE else "no values yet"
        if spec.is_split:
            self.split_of, self.view = model, view
            drawn = (model.version, id(model), self.size, view.glyphs)
            if drawn != self._drawn:
                self._drawn = drawn
                self.redraw()
            return
        if self.split_of is not None:
            self.split_of, self._drawn, self._seen = None, (), ()
        self.show(spec.named(model.series), view)

    def build(self, width: int, height: int) -> list[Row]:
        """The chart or the split bar; the title of the panel that keys act on is reversed."""
        if self.split_of is not None:
            glyphs = self.view.glyphs
            rows = split_rows(self.title, self.split_of.series, width, height, glyphs)
        else:
            rows = super().build(width, height)
        if self.has_class("-current") and rows and rows[0]:
            rows[0] = [(rows[0][0][0], "chosen"), *rows[0][1:]]
        return rows


class ChartGrid(Container):
    """Charts that share one view. Keys act on the current one, and on the view."""

    def __init__(self, count: int, view: View, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.view = view
        self.index = 0
        self.is_maximised = False
        self._panels = [Panel(index) for index in range(count)]
        self._laid_out: tuple[int, int] = (0, 0)

    def compose(self) -> ComposeResult:
        """The panels of the step that is shown first; others are mounted when they are needed."""
        yield from self._panels

    def on_mount(self) -> None:
        """Choose the markers for the terminal."""
        is_ascii = glyphs_of(self.app) is ASCII
        self.view = moved(
            self.view,
            markers=MARKERS["ascii"] if is_ascii else BRAILLE,
            patterned=self.app.no_color or is_ascii,
        )

    def on_resize(self) -> None:
        """Lay the panels out before they are first drawn."""
        self.lay_out(self.count or len(self._panels))

    @property
    def screen_of_charts(self) -> DashboardScreen:
        """The screen, which is redrawn when the view has changed."""
        assert isinstance(self.screen, DashboardScreen)
        return self.screen

    @property
    def is_alone(self) -> bool:
        """Whether one panel has all the room."""
        return self.is_maximised or self.screen_of_charts.is_small

    def panel(self, index: int) -> Panel:
        """A panel by its place."""
        return self._panels[index]

    @property
    def current(self) -> Panel:
        """The panel that keys act on."""
        return self._panels[self.index]

    @property
    def count(self) -> int:
        """How many panels are shown."""
        return self._laid_out[0]

    def lay_out(self, count: int) -> None:
        """Divide the room among `count` panels; the others disappear."""
        columns, rows = grid_of(count, self.screen.has_class("-wide"))
        self.set_class(self.is_alone, "-alone")
        if (count, columns) == self._laid_out:
            return
        self._laid_out = (count, columns)
        missing = [Panel(index) for index in range(len(self._panels), count)]
        self._panels += missing
        self.mount_all(missing)
        self.styles.grid_size_columns, self.styles.grid_size_rows = columns, rows
        for index, panel in enumerate(self._panels):
            panel.set_class(index >= count, "-unused")
            # the last one takes what its row has left
            panel.styles.column_span = columns * rows - count + 1 if index == count - 1 else 1
        self.go_to(min(self.index, max(count - 1, 0)))

    def go_to(self, index: int) -> None:
        """Let keys act on another panel."""
        self.index = index
        for place, panel in enumerate(self._panels):
            panel.set_class(place == index, "-current")
            panel.redraw()

    def draw_each(self, show: Callable[[int, Panel], None]) -> None:
        """Draw the visible panels, the current one first: the others once it is on the screen."""
        for index in range(self.count):
            if index == self.index:
                show(index, self._panels[index])
            elif not self.is_alone:
                self.call_after_refresh(show, index, self._panels[index])

    def look(self, **changes: object) -> None:
        """Change how the charts show their series."""
        self.view = moved(self.view, **changes)
        self.screen_of_charts.draw()

    def action_panel(self, by: int) -> None:
        """Go to another panel."""
        self.go_to((self.index + by) % max(self.count, 1))
        self.call_after_refresh(self.screen_of_charts.draw)

    def action_maximise(self) -> None:
        """Give all the room to the panel, or give it back."""
        self.is_maximised = not self.is_maximised
        self.set_class(self.is_alone, "-alone")
        self.call_after_refresh(self.screen_of_charts.draw)

    def action_cursor(self, columns: int) -> None:
        """Move the chart cursor by columns of the panel."""
        steps = self.current.steps()
        if not steps:
            return
        at = len(steps) - 1
        if self.view.cursor is not None:
            before = sum(step <= self.view.cursor for step in steps) - 1
            at = min(max(before + columns, 0), len(steps) - 1)
        self.look(cursor=steps[at])

    def action_smooth(self) -> None:
        """Use the next smoothing."""
        after = SMOOTHINGS.index(self.view.smoothing) + 1
        self.look(smoothing=SMOOTHINGS[after % len(SMOOTHINGS)])

    def action_log_scale(self) -> None:
        """Draw logarithmic values, or as they are."""
        self.look(log_scale=not self.view.log_scale)

    def action_markers(self) -> None:
        """Use the next markers, where the terminal has more than ASCII."""
        names = ["ascii"] if glyphs_of(self.app) is ASCII else list(MARKERS)
        after = names.index(self.view.markers.name) + 1
        self.look(markers=MARKERS[names[after % len(names)]])


def grid_of(count: int, is_wide: bool) -> tuple[int, int]:
    """Columns and rows for a number of charts: the fewest rows, evenly filled."""
    most = WIDE_COLUMNS if is_wide else NARROW_COLUMNS
    rows = max(-(-count // most), 1)
    return max(-(-count // rows), 1), rows
