"""The base of the dashboard's own widgets: rows of styled text, redrawn where they changed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from textual.app import App
from textual.color import Color
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from dschat_tui.text import ASCII, UNICODE, Glyphs

# a piece of a row: its text and the name of its style, one of `STYLES`
Span = tuple[str, str]
Row = list[Span]

# the number of series that have a style, and a style of their band
SERIES_STYLES = 6
# by style: a variable of the theme, its opacity over the background, and attributes
STYLES = {
    "text": ("foreground", 1.0, ""),
    "muted": ("foreground", 0.6, ""),
    "strong": ("foreground", 1.0, "bold"),
    "chosen": ("foreground", 1.0, "reverse"),
    "good": ("success", 1.0, ""),
    "warn": ("warning", 1.0, "bold"),
    "bad": ("error", 1.0, "bold"),
    "line0": ("primary", 1.0, ""),
    "line1": ("warning", 1.0, ""),
    "line2": ("success", 1.0, ""),
    "line3": ("accent", 1.0, ""),
    "line4": ("error", 1.0, ""),
    "line5": ("secondary", 1.0, ""),
    "band0": ("primary", 0.45, ""),
    "band1": ("warning", 0.45, ""),
    "band2": ("success", 0.45, ""),
    "band3": ("accent", 0.45, ""),
    "band4": ("error", 0.45, ""),
    "band5": ("secondary", 0.45, ""),
}


@lru_cache(maxsize=4)
def _palette(theme: tuple[tuple[str, str], ...]) -> dict[str, Style]:
    colours = {name: Color.parse(value) for name, value in theme}
    ground = colours["background"]
    return {
        name: Style.parse(attributes)
        + Style(color=ground.blend(colours[variable], share).rich_color)
        for name, (variable, share, attributes) in STYLES.items()
    }


def palette(variables: Mapping[str, str]) -> dict[str, Style]:
    """The styles by name in the colours of a theme, given its variables."""
    used = {"background", *(variable for variable, _, _ in STYLES.values())}
    return _palette(tuple((name, variables[name]) for name in sorted(used)))


def glyphs_of(app: App[Any]) -> Glyphs:
    """The characters that an app draws with."""
    return ASCII if app.has_class("-ascii") else UNICODE


def row_text(row: Iterable[Span]) -> str:
    """The text of a row, without its styles."""
    return "".join(text for text, _ in row)


def fit(row: Row, width: int, cut: str) -> Row:
    """A row of at most `width` cells; one that is cut ends with a character that says so."""
    if cell_len(row_text(row)) <= width:
        return row
    fitted: Row = []
    left = width - 1
    for text, style in row:
        if cell_len(text) > left:
            kept = text[: max(left, 0)]
            while cell_len(kept) > left:
                kept = kept[:-1]
            return [*fitted, (kept + cut, style)] if width > 0 else []
        fitted.append((text, style))
        left -= cell_len(text)
    return fitted


def wrapped(text: str, width: int, style: str) -> list[Row]:
    """A text wrapped at a width, its later rows indented by two cells."""
    lines = textwrap.wrap(text, max(width, 20), subsequent_indent="  ", break_on_hyphens=False)
    return [[(line, style)] for line in lines or [""]]


def changed_cells(old: Row, new: Row, width: int) -> tuple[int, int]:
    """First cell that differs between two rows, and the one after the last."""
    before, after = row_text(old), row_text(new)
    if not (before.isascii() or cell_len(before) == len(before)) or (
        not (after.isascii() or cell_len(after) == len(after))
    ):
        return 0, width
    a, b = ([(char, style) for text, style in row for char in text] for row in (old, new))
    shorter = min(len(a), len(b))
    start = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    if len(a) != len(b):
        return start, width
    end = next((i for i in range(shorter, start, -1) if a[i - 1] != b[i - 1]), start)
    return start, max(end, start + 1)


class Rows(Widget):
    """A widget that draws what `build` returns, and sends only what changed."""

    DEFAULT_CSS = """
    Rows { height: 1; width: 1fr; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: list[Row] | None = None
        self._strips: dict[int, Strip] = {}
        self._styles: dict[str, Style] = {}

    @property
    def cut(self) -> str:
        """The character at the end of a row that is cut."""
        return glyphs_of(self.app).cut

    def build(self, width: int, height: int) -> list[Row]:
        """What the widget shows at a size."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Build the rows again and send the cells that differ from those on the screen."""
        width, height = self.size
        if not width or not height:
            return
        before, self._rows = self._rows, self.build(width, height)
        if before is None or len(before) != len(self._rows):
            self._strips.clear()
            self.refresh()
            return
        regions = []
        for y, (old, new) in enumerate(zip(before, self._rows, strict=True)):
            if old != new:
                self._strips.pop(y, None)
                start, end = changed_cells(old, new, width)
                regions.append(Region(start, y, end - start, 1))
        if regions:
            self.refresh(*regions)

    def notify_style_update(self) -> None:
        """Forget what was drawn when the theme changes."""
        super().notify_style_update()
        self._strips.clear()
        self._styles.clear()

    def on_resize(self) -> None:
        """Build for the new size."""
        self._rows = None
        self._strips.clear()
        # Textual may have painted the new size with the old strips before it sent the event
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Row `y` as Textual draws it."""
        strip = self._strips.get(y)
        if strip is None:
            if self._rows is None:
                self._rows = self.build(*self.size)
            row = self._rows[y] if y < len(self._rows) else []
            strip = self._strips[y] = self.strip_of(row, self.size.width)
        return strip

    def strip_of(self, row: Row, width: int) -> Strip:
        """A row padded or cut to a width, in the colours of the theme."""
        if not self._styles:
            # kept, since Textual looks through all ancestors for each
            base = self.rich_style
            styles = palette(self.app.theme_variables)
            self._styles = {"": base, **{name: base + style for name, style in styles.items()}}
        segments = [Segment(text, self._styles[name]) for text, name in row if text]
        return Strip(segments).adjust_cell_length(width, self._styles[""])
