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
    "charts": "steps and charts",
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
        for display, description in keys.hints("pages"):
            shown += [(f"{display} ", "strong"), (f"{description}  ", "muted")]
        self.query_one("#pages-keys", Line).show(shown)
        listed = self.query_one("#pages-list", LineList)
        listed.show(self._source)
        listed.focus()

    def action_close(self) -> None:
        """Back to the screen below."""
        self.dismiss()


class HelpRows:
    """The keys of some scopes, what each metric means and where it is normally, what is judged."""

    def __init__(self, scopes: Iterable[str], metrics: Iterable[str], width: int) -> None:
        self._rows: list[Row] = []
        self._width = max(width, 40)
        for scope in scopes:
            self._heading(f"Keys: {SCOPE_TITLES.get(scope, scope)}")
            for key in keys.KEYS:
                if key.scope == scope:
                    self._entry(f"  {key.display:<{KEY_WIDTH}}", key.description)
        present = [name for name in metrics if name in QUANTITIES]
        if present:
            self._heading("Metrics of this log: what each means; where it is normally")
            self._metrics(present)
        others = [name for name in QUANTITIES if name not in present]
        self._heading("Metrics" + (" that it does not have" if present else ""))
        self._metrics(others)
        self._heading("Health: what is looked at")
        for rule in RULES:
            told = (rule.__doc__ or "").strip().splitlines()
            self._entry(f"  {rule.__name__.replace('_', ' '):<{NAME_WIDTH}}", " ".join(told[:1]))

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return self._rows[first : first + count]

    def _heading(self, text: str) -> None:
        if self._rows:
            self._rows.append([])
        self._rows.append([(text, "strong")])

    def _metrics(self, names: Iterable[str]) -> None:
        for name in names:
            quantity = QUANTITIES[name]
            unit = f" ({quantity.unit})" if quantity.unit else ""
            self._entry(f"  {quantity.title + unit:<{NAME_WIDTH}}", quantity.help)

    def _entry(self, head: str, text: str) -> None:
        """A name and its text, broken beside it."""
        lines = textwrap.wrap(text, self._width - len(head) - 1) or [""]
        for index, line in enumerate(lines):
            name = head if index == 0 else " " * len(head)
            self._rows.append([(name, "strong"), (f" {line}", "text")])
