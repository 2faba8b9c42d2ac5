"""Pages over the screen: help on keys and metrics, and whatever else is longer than a question."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.lines import LineList, Source
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.health import RULES
from dschat_tui.logs.quantities import QUANTITIES

# the widest that pages get, as help.tcss has it
PAGES_WIDTH = 104
KEY_WIDTH = 11
NAME_WIDTH = 20
SCOPE_TITLES = {
    "app": "everywhere",
    "start": "new run",
    "form": "new run, on the options",
    "steps": "steps",
    "charts": "charts",
    "run": "a run",
    "runs": "the runs",
    "compare": "compared runs",
    "sweep": "a sweep",
    "chat": "a chat",
    "list": "in lists",
}


class Pages(ModalScreen[None]):
    """A title over a list; escape closes."""

    CSS_PATH = "help.tcss"
    BINDINGS = keys.bindings("pages")

    def __init__(self, title: str, source: Source) -> None:
        super().__init__()
        self._title = title
        self._source = source

    def compose(self) -> ComposeResult:
        """Title, list, keys."""
        with Vertical(id="pages"):
            yield Line(id="pages-title")
            yield LineList(id="pages-list")
            yield Line(id="pages-keys")

    def on_mount(self) -> None:
        """Fill it."""
        self.query_one("#pages-title", Line).show([(self._title, "strong")])
        shown: Row = []
        for display, description in keys.hints(type(self)):
            shown += [(f"{display} ", "strong"), (f"{description}  ", "muted")]
        self.query_one("#pages-keys", Line).show(shown)
        listed = self.query_one("#pages-list", LineList)
        listed.show(self._source)
        listed.focus()

    def action_close(self) -> None:
        """Back to the screen below."""
        self.dismiss()


def help_rows(bound: Iterable[keys.Key], metrics: Iterable[str], width: int) -> list[Row]:
    """The keys that are bound, what each metric means and its normal range, what is judged."""
    width = max(width, 40)
    rows: list[Row] = []
    scopes: dict[str, list[keys.Key]] = {}
    for key in bound:
        scopes.setdefault(key.scope, []).append(key)
    for scope, entries in scopes.items():
        rows += _heading(f"Keys: {SCOPE_TITLES.get(scope, scope)}")
        for key in entries:
            rows += _entry(f"  {key.display:<{KEY_WIDTH}}", key.description, width)
    present = [name for name in metrics if name in QUANTITIES]
    if present:
        rows += _heading("Metrics of this log: what each means, and its normal range")
        rows += _metrics(present, width)
    others = [name for name in QUANTITIES if name not in present]
    rows += _heading("Metrics" + (" that this log does not have" if present else ""))
    rows += _metrics(others, width)
    rows += _heading("Health: what is checked")
    for rule in RULES:
        first_line = (rule.__doc__ or "").strip().split("\n")[0]
        rows += _entry(f"  {rule.__name__.replace('_', ' '):<{NAME_WIDTH}}", first_line, width)
    return rows[1:]


def _heading(text: str) -> list[Row]:
    return [[], [(text, "strong")]]


def _metrics(names: Iterable[str], width: int) -> list[Row]:
    rows: list[Row] = []
    for name in names:
        quantity = QUANTITIES[name]
        unit = f" ({quantity.unit})" if quantity.unit else ""
        rows += _entry(f"  {quantity.title + unit:<{NAME_WIDTH}}", quantity.help, width)
    return rows


def _entry(head: str, text: str, width: int) -> list[Row]:
    """A name and its text, wrapped beside it."""
    lines = textwrap.wrap(text, width - len(head) - 1) or [""]
    heads = [head, *[" " * len(head)] * (len(lines) - 1)]
    return [
        [(name, "strong"), (f" {line}", "text")] for name, line in zip(heads, lines, strict=True)
    ]
