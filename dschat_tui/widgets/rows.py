"""The base of the dashboard's own widgets: rows of styled text, redrawn where they changed."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from dschat_tui.widgets.text import ASCII, UNICODE

# a piece of a row: its text and the name of its style, one of `STYLES`
Span = tuple[str, str]
Row = list[Span]

STYLES = (
    "text", "muted", "strong", "good", "warn", "bad", "chosen",
    "line0", "line1", "line2", "band0", "band1", "band2",
)  # fmt: skip


def row_text(row: Iterable[Span]) -> str:
    """The text of a row, without its styles."""
    return "".join(text for text, _ in row)


def fit(row: Row, width: int, cut: str) -> Row:
    """A row of at most `width` cells; what is cut off ends with a sign."""
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


class Rows(Widget):
    """A widget that draws what `build` gives, and sends only the rows that changed."""

    COMPONENT_CLASSES = {f"rows--{name}" for name in STYLES}  # noqa: RUF012 (Textual's own way)
    DEFAULT_CSS = """
    Rows { height: 1; width: 1fr; }
    Rows .rows--text { color: $foreground; }
    Rows .rows--muted { color: $foreground 60%; }
    Rows .rows--strong { color: $foreground; text-style: bold; }
    Rows .rows--good { color: $text-success; }
    Rows .rows--warn { color: $text-warning; text-style: bold; }
    Rows .rows--bad { color: $text-error; text-style: bold; }
    Rows .rows--chosen { color: $foreground; text-style: reverse; }
    Rows .rows--line0 { color: $primary; }
    Rows .rows--line1 { color: $warning; }
    Rows .rows--line2 { color: $success; }
    Rows .rows--band0 { color: $primary 45%; }
    Rows .rows--band1 { color: $warning 45%; }
    Rows .rows--band2 { color: $success 45%; }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._rows: list[Row] | None = None
        self._strips: dict[int, Strip] = {}

    @property
    def cut(self) -> str:
        """The sign at the end of what is cut off."""
        return (ASCII if self.app.has_class("-ascii") else UNICODE).cut

    def build(self, width: int, height: int) -> list[Row]:
        """What the widget shows at a size."""
        raise NotImplementedError

    def redraw(self) -> None:
        """Build the rows anew and send those that differ from what is on the screen."""
        width, height = self.size
        if not width or not height:
            return
        before, self._rows = self._rows, self.build(width, height)
        if before is None or len(before) != len(self._rows):
            self._strips.clear()
            self.refresh()
            return
        changed = [
            y for y, (old, new) in enumerate(zip(before, self._rows, strict=True)) if old != new
        ]
        for y in changed:
            self._strips.pop(y, None)
        if changed:
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def notify_style_update(self) -> None:
        """Forget what was drawn when the theme changes."""
        super().notify_style_update()
        self._strips.clear()

    def on_resize(self) -> None:
        """Build for the new size."""
        self._rows = None
        self._strips.clear()

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
        style = self.get_component_rich_style
        segments = [Segment(text, style(f"rows--{name}")) for text, name in row if text]
        return Strip(segments).adjust_cell_length(width, self.rich_style)
