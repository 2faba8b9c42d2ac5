"""Curves in braille, blocks or ASCII, drawn from bounded series.

`plot` is a pure function to rows of styled text; `Chart` puts them on the screen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from rich.cells import cell_len

from dschat_tui.dashboard.widgets.rows import SERIES_STYLES, Row, Rows, Span, fit, row_text
from dschat_tui.logs.series import Column, Series
from dschat_tui.text import ASCII, UNICODE, Glyphs, short_number

AXIS_CELLS = 7
ROWS_FOR_STEPS = 6
ROWS_FOR_MORE_TICKS = 12
SMOOTHINGS = (0.0, 0.6, 0.9)
# outliers are cut off only where that gives the rest this many times the room
CLIP_GAIN = 3.0
COLUMNS_FOR_CLIPPING = 20
# curves of more values than this are redrawn once in LONG_SERIES_SECONDS
LONG_SERIES = 1000
LONG_SERIES_SECONDS = 1.0
# beyond this, differences overflow
_GREATEST = 1e300
_QUADRANTS = " ▘▝▀▖▌▞▛▗▚▐▜▄▙▟█"
_BRAILLE_BITS = ((1, 8), (2, 16), (4, 32), (64, 128))
# pixels of a line that are drawn and left out, to distinguish lines without colour
_PATTERNS = ((1, 0), (2, 2), (1, 3), (5, 1), (4, 4), (1, 1))


@dataclass(frozen=True, eq=False)
class Markers:
    """How many pixels a cell has, and the character for a set of them."""

    name: str
    across: int
    down: int

    def bit(self, x: int, y: int) -> int:
        """The bit of a pixel inside its cell."""
        return _BRAILLE_BITS[y][x] if self.down == 4 else 1 << (2 * y + x)

    def character(self, bits: int, series: int, is_band: bool, glyphs: Glyphs) -> str:
        """The character of a cell."""
        if self.name == "braille":
            return chr(0x2800 + bits)
        if self.name == "block":
            return "░" if is_band else _QUADRANTS[bits]
        return ":" if is_band else glyphs.lines[series % len(glyphs.lines)]


BRAILLE = Markers("braille", 2, 4)
BLOCK = Markers("block", 2, 2)
ASCII_MARKERS = Markers("ascii", 1, 1)
MARKERS = {markers.name: markers for markers in (BRAILLE, BLOCK, ASCII_MARKERS)}


@dataclass(frozen=True)
class View:
    """How all charts of a screen look at their series; steps are those of the log."""

    first_step: float = -math.inf
    last_step: float = math.inf
    cursor: float | None = None
    smoothing: float = 0.0
    log_scale: bool = False
    markers: Markers = BRAILLE
    patterned: bool = False
    banded: bool = True

    @property
    def glyphs(self) -> Glyphs:
        """The characters that go with the markers."""
        return ASCII if self.markers is ASCII_MARKERS else UNICODE


Named = Sequence[tuple[str, Series]]


class _Point(NamedTuple):
    """A column in pixels: no band where `bottom` is above `top`, no line where it is None."""

    x: int
    top: int
    bottom: int
    line: int | None
    bad: bool


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    pixels: int
    is_log: bool

    def pixel(self, value: float) -> int:
        """The pixel row of a value counted from above, beyond the edges for what is clipped."""
        if self.is_log:
            value = math.log10(value) if value > 0 else -math.inf
        y = (self.high - value) * (self.pixels - 1) / (self.high - self.low)
        return -1 if y < -0.5 else self.pixels if y > self.pixels - 0.5 else int(y + 0.5)

    def value(self, share: float) -> float:
        """The value at a share of the height, counted from above."""
        value = self.high * (1 - share) + self.low * share
        return 10**value if self.is_log else value


def plot(
    title: str, named: Named, width: int, height: int, view: View, empty: str = "no values yet"
) -> list[Row]:
    """A chart as rows: title with legend and readout, the curves, and, if high, the steps.

    `empty` is shown where there is no value.
    """
    all_columns = [_columns(series, width, view) for _, series in named]
    rows = [_title_row(title, named, all_columns, width, view)]
    step_rows = 1 if height >= ROWS_FOR_STEPS else 0
    plot_height = height - 1 - step_rows
    plot_width = width - AXIS_CELLS
    if plot_height < 1 or plot_width < 4:
        return rows[:height]
    columns = [column for part in all_columns for column in part]
    scale = _scale(columns, plot_height * view.markers.down, view)
    if scale is None:
        waiting = "no finite values" if columns else empty
        rows.append(fit([(" " * AXIS_CELLS + waiting, "muted")], width, view.glyphs.cut))
        return rows + [[] for _ in range(height - 2)]
    first, last = _range(all_columns, named, view)
    canvas = _Canvas(plot_width, plot_height, view, scale, first, last)
    placed = [canvas.place(part) for part in all_columns]
    for index, points in enumerate(placed if view.banded else ()):
        canvas.band(index, points)
    for index, points in enumerate(placed):
        canvas.line(index, points)
    canvas.marks([point for points in placed for point in points])
    rows += _with_axis(canvas, scale, plot_height, view.glyphs)
    if step_rows:
        newest = max(series.last_step for _, series in named if len(series))
        rows.append(_steps_row(first, min(newest, view.last_step), width, view))
    return rows


def _columns(series: Series, width: int, view: View) -> list[Column]:
    pixels = max((width - AXIS_CELLS) * view.markers.across, 2)
    columns = series.columns(pixels, view.first_step, view.last_step)
    if not view.smoothing:
        return columns
    smooth, level = [], math.nan
    for column in columns:
        if not math.isnan(column.mean):
            kept = view.smoothing
            level = column.mean if math.isnan(level) else kept * level + (1 - kept) * column.mean
            column = column._replace(mean=level)
        smooth.append(column)
    return smooth


def _range(
    all_columns: Sequence[Sequence[Column]], named: Named, view: View
) -> tuple[float, float]:
    first = min(columns[0].step for columns in all_columns if columns)
    last = first
    for (_, series), columns in zip(named, all_columns, strict=True):
        if not columns:
            continue
        end = series.last_step
        if len(columns) > 1 and len(columns) < len(series):
            # up to where the newest column will end, so that the others stay where they are
            end = max(end, 2 * columns[-1].step - columns[-2].step - 1)
        last = max(last, end)
    return max(first, view.first_step), max(min(last, view.last_step), first)


def _scale(columns: Sequence[Column], pixels: int, view: View) -> _Scale | None:
    def usable(value: float) -> bool:
        return abs(value) <= _GREATEST and (value > 0 or not view.log_scale)

    lows = sorted(c.low for c in columns if usable(c.low) and c.low <= c.high)
    highs = sorted(c.high for c in columns if usable(c.high) and c.low <= c.high)
    if not lows or not highs:
        return None
    low, high = lows[0], highs[-1]
    cut = max(len(lows) // 100, 1) if len(lows) >= COLUMNS_FOR_CLIPPING else 0
    clipped_low, clipped_high = lows[cut], highs[-1 - cut]
    if view.log_scale:
        low, high = math.log10(low), math.log10(high)
        clipped_low, clipped_high = math.log10(clipped_low), math.log10(clipped_high)
    if clipped_high > clipped_low and high - low > CLIP_GAIN * (clipped_high - clipped_low):
        low, high = clipped_low, clipped_high
    if high <= low:
        room = abs(high) * 0.01 or 0.5
        low, high = low - room, high + room
    return _Scale(low, high, pixels, view.log_scale)


class _Canvas:
    """Pixels of the plot by cell: their bits, and whose they are."""

    def __init__(
        self, width: int, height: int, view: View, scale: _Scale, first: float, last: float
    ) -> None:
        self.width, self.height, self.view, self.scale = width, height, view, scale
        self.first, self.last = first, last
        self.bits = [bytearray(width) for _ in range(height)]
        # 1 + 2 * series for a band, 2 + 2 * series for a line
        self.owner = [bytearray(width) for _ in range(height)]
        self.marked: dict[tuple[int, int], Span] = {}

    def x(self, step: float) -> int:
        """The pixel column of a step."""
        last = self.width * self.view.markers.across - 1
        span = self.last - self.first
        x = int((step - self.first) / span * last + 0.5) if span > 0 else 0
        return 0 if x < 0 else last if x > last else x

    def place(self, columns: Sequence[Column]) -> list[_Point]:
        """Where the columns of a series lie."""
        pixel, is_log = self.scale.pixel, self.scale.is_log
        points = []
        for low, high, mean, bad, step, _ in columns:
            line = None if mean != mean or (is_log and mean <= 0) else pixel(mean)
            is_hidden = low > high or (is_log and high <= 0)
            top, bottom = (0, -1) if is_hidden else (pixel(high), pixel(low))
            if is_log and low <= 0 < high:  # what has no logarithm is not called cut off
                bottom = self.scale.pixels - 1
            points.append(_Point(self.x(step), top, bottom, line, bad))
        return points

    def band(self, series: int, points: Sequence[_Point]) -> None:
        """Lightly, from the least to the greatest value."""
        last = self.scale.pixels - 1
        for x, top, bottom, _, _ in points:
            if bottom - top >= 2:
                self._band_column(x, max(top, 0), min(bottom, last), 1 + 2 * series)

    def line(self, series: int, points: Sequence[_Point]) -> None:
        """The means, joined; a gap where a stretch has no finite value."""
        drawn, left_out = _PATTERNS[series % len(_PATTERNS)] if self.view.patterned else (1, 0)
        owner, pixels = 2 + 2 * series, self.scale.pixels
        before: tuple[int, int] | None = None
        for point in points:
            if point.line is None:
                before = None
                continue
            here = (point.x, point.line)
            for x, y in _joined(before, here):
                if (x + y) % (drawn + left_out) < drawn and 0 <= y < pixels:
                    self._set(x, y, owner)
            before = here

    def _band_column(self, x: int, top: int, bottom: int, owner: int) -> None:
        markers = self.view.markers
        down, cell = markers.down, x // markers.across
        upper, lower, x = top // down, bottom // down, x % markers.across
        whole = _band_bits(markers, x, 0, down - 1)
        for row in range(upper, lower + 1):
            bits = whole
            if row in (upper, lower):
                first = top - row * down if row == upper else 0
                last = bottom - row * down if row == lower else down - 1
                bits = _band_bits(markers, x, first, last)
            self.bits[row][cell] |= bits
            self.owner[row][cell] = owner

    def _set(self, x: int, y: int, owner: int) -> None:
        markers = self.view.markers
        column, row = x // markers.across, y // markers.down
        own = self.owner[row]
        if own[column] != owner:
            if own[column] % 2:
                self.bits[row][column] = 0  # a line takes the cell of a band
            own[column] = owner
        self.bits[row][column] |= markers.bit(x % markers.across, y % markers.down)

    def marks(self, points: Sequence[_Point]) -> None:
        """What is not finite, what the scale cuts off, and the cursor."""
        glyphs, pixels, across = self.view.glyphs, self.scale.pixels, self.view.markers.across
        for x, top, bottom, _, _ in points:
            if top < 0:
                self.marked[0, x // across] = (glyphs.above, "warn")
            if bottom >= pixels:
                self.marked[self.height - 1, x // across] = (glyphs.below, "warn")
        for x, _, _, _, bad in points:
            if bad:
                self.marked[0, x // across] = (glyphs.bad, "bad")
        cursor = self.view.cursor
        if cursor is not None and self.first <= cursor <= self.last:
            cell = self.x(cursor) // self.view.markers.across
            for row in range(self.height):
                if not self.bits[row][cell]:
                    self.marked.setdefault((row, cell), (glyphs.cursor, "strong"))

    def row(self, y: int) -> Row:
        """A row of cells, neighbours of one style in one span."""
        spans: Row = []
        text, style = "", "text"
        bits, owner, markers, glyphs = (
            self.bits[y],
            self.owner[y],
            self.view.markers,
            self.view.glyphs,
        )
        has_marks = any(row == y for row, _ in self.marked)
        for x in range(self.width):
            if has_marks and (y, x) in self.marked:
                character, its_style = self.marked[y, x]
            elif bits[x]:
                series, is_band = (owner[x] - 1) // 2, owner[x] % 2 == 1
                character = markers.character(bits[x], series, is_band, glyphs)
                its_style = f"{'band' if is_band else 'line'}{series % SERIES_STYLES}"
            else:
                character, its_style = " ", style
            if its_style != style and text:
                spans.append((text, style))
                text = ""
            text, style = text + character, its_style
        spans.append((text, style))
        return spans


@lru_cache(maxsize=256)
def _band_bits(markers: Markers, x: int, top: int, bottom: int) -> int:
    """Every second pixel of a column inside a cell: lighter than a line."""
    pixels = range(top, bottom + 1)
    if markers is ASCII_MARKERS:
        return 1
    return sum(markers.bit(x, y) for y in pixels if (x + y) % 2 == 0)


def _joined(before: tuple[int, int] | None, here: tuple[int, int]) -> list[tuple[int, int]]:
    """The pixels from one point (itself left out) to the next."""
    if before is None:
        return [here]
    (x0, y0), (x1, y1) = before, here
    across, down = x1 - x0, y1 - y0
    if across > 1 and abs(down) <= across:
        return [(x0 + i, y0 + round(down * i / across)) for i in range(1, across + 1)]
    if abs(down) > 1:
        way = 1 if down > 0 else -1
        return [(x0 + round(across * i / abs(down)), y0 + way * i) for i in range(1, abs(down) + 1)]
    return [here]


def _with_axis(canvas: _Canvas, scale: _Scale, height: int, glyphs: Glyphs) -> list[Row]:
    shares = {0: 0.0, height - 1: 1.0}
    if height >= 5:
        shares[height // 2] = (height // 2) / (height - 1)
    if height >= ROWS_FOR_MORE_TICKS:
        for row in (height // 4, 3 * height // 4):
            shares[row] = row / (height - 1)
    rows = []
    for y in range(height):
        if y in shares:
            label = f"{short_number(scale.value(shares[y])):>{AXIS_CELLS - 1}}{glyphs.tick}"
        else:
            label = " " * (AXIS_CELLS - 1) + glyphs.axis
        rows.append([(label, "muted"), *canvas.row(y)])
    return rows


def _steps_row(first: float, last: float, width: int, view: View) -> Row:
    left = f"{first:.0f}" if view.cursor is None else f"at {view.cursor:.0f}"
    right = f"step {last:.0f}"
    room = width - AXIS_CELLS - len(right)
    row: Row = [(" " * AXIS_CELLS, "muted")]
    if len(left) < room:
        row.append((left.ljust(room), "muted" if view.cursor is None else "strong"))
    return fit([*row, (right, "muted")], width, view.glyphs.cut)


def _title_row(
    title: str, named: Named, all_columns: Sequence[Sequence[Column]], width: int, view: View
) -> Row:
    tags = " log" * view.log_scale + f" ~{view.smoothing:g}" * bool(view.smoothing)
    legend: Row = []
    titled = False
    for index, ((name, series), columns) in enumerate(zip(named, all_columns, strict=True)):
        if not len(series):
            continue
        value = series.last if view.cursor is None else _value_at(columns, view.cursor)
        glyph = view.glyphs.lines[index % len(view.glyphs.lines)]
        legend.append((f"  {glyph}", f"line{index % SERIES_STYLES}"))
        if name.casefold() == title.casefold():
            titled = True
        else:
            legend.append((f" {name}", "muted"))
        legend.append((f" {short_number(value)}", "text" if math.isfinite(value) else "bad"))
    row: Row = [(title, "strong"), (tags, "muted"), *legend]
    if cell_len(row_text(row)) > width and len(legend) > 3 and not titled:
        # the names of the quantities say what the title says
        first = legend[0]
        row = [(first[0].lstrip(), first[1]), *legend[1:], (tags, "muted")]
    return fit(row, width, view.glyphs.cut)


def _value_at(columns: Sequence[Column], step: float) -> float:
    found = math.nan
    for column in columns:
        if column.step > step:
            break
        found = column.mean
    return found


class Chart(Rows):
    """A panel with the curves of some series; it redraws only what changed."""

    DEFAULT_CSS = """
    Chart { height: 1fr; width: 1fr; }
    """

    def __init__(self, title: str, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.title = title
        self.empty = "no values yet"
        self.named: Named = ()
        self.view = View()
        self._seen: tuple[object, ...] = ()
        self._versions: list[int] = []
        self._drawn_at = 0.0

    def show(self, named: Named, view: View) -> None:
        """Show series with their names in the legend, if anything changed."""
        drawn = ((name, id(series)) for name, series in named)
        seen = (self.title, self.empty, view, self.size, *drawn)
        versions = [series.version for _, series in named]
        if seen == self._seen:
            if versions == self._versions:
                return
            # a new value moves less than a pixel of a long curve
            is_long = all(len(series) > LONG_SERIES for _, series in named)
            if is_long and time.monotonic() - self._drawn_at < LONG_SERIES_SECONDS:
                return
        self._seen, self._versions, self._drawn_at = seen, versions, time.monotonic()
        self.named, self.view = named, view
        self.redraw()

    def build(self, width: int, height: int) -> list[Row]:
        """The chart as rows."""
        return plot(self.title, self.named, width, height, self.view, self.empty)

    def steps(self) -> list[float]:
        """The steps that the columns on the screen begin at."""
        found = {c.step for _, s in self.named for c in _columns(s, self.size.width, self.view)}
        return sorted(found)

    def offset_at(self, step: float) -> int | None:
        """The byte in the log of the line that has the value at a step."""
        offsets = [
            column.offset
            for _, series in self.named
            for column in _columns(series, self.size.width, self.view)
            if column.step <= step
        ]
        return offsets[-1] if offsets else None


def moved(view: View, **changes: object) -> View:
    """The view with some things changed."""
    return replace(view, **changes)  # type: ignore[arg-type]
