"""The runs of a folder, newest first; enter opens one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from textual.app import ComposeResult
from textual.screen import Screen

from dschat_tui import keys
from dschat_tui.logs.source import Source, find_source
from dschat_tui.widgets.bars import Line
from dschat_tui.widgets.lines import LineList, Nothing
from dschat_tui.widgets.rows import Row
from dschat_tui.widgets.text import clean

REFRESH_SECONDS = 2.0


class RunRows:
    """A row a run: its folder, state, steps, and when it changed."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources

    @property
    def count(self) -> int:
        """How many runs there are."""
        return len(self.sources)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [self._row(source) for source in self.sources[first : first + count]]

    def _row(self, source: Source) -> Row:
        state = source.read_state() or {}
        steps = ", ".join(
            f"{name} {record.get('state', '?')}" for name, record in state.get("steps", {}).items()
        )
        updated = state.get("updated")
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(updated)) if updated else ""
        return [
            (f" {clean(source.path.name):<24} ", "strong"),
            (f"{state.get('state', 'unknown')!s:<9} ", "text"),
            (f"{when:<17} {clean(steps)}", "muted"),
        ]


def find_runs(folder: Path) -> list[Source]:
    """The runs in a folder, the one that changed last first."""
    files = [(file.stat().st_mtime, file) for file in folder.glob("*/run.json")]
    return [find_source(file.parent) for _, file in sorted(files, reverse=True)]


class RunsScreen(Screen[None]):
    """The list of runs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def compose(self) -> ComposeResult:
        """A title, the list, the keys."""
        yield Line(id="runs-title")
        yield LineList(id="runs")
        yield Line(id="runs-keys")

    def on_mount(self) -> None:
        """Read the folder now and every two seconds."""
        self.set_interval(REFRESH_SECONDS, self.read)
        self.call_after_refresh(self.read)

    def on_screen_resume(self) -> None:
        """Read the folder when this screen comes back."""
        self.call_after_refresh(self.read)

    def read(self) -> None:
        """Show the runs that there are now."""
        sources = find_runs(self.folder)
        self.query_one("#runs-title", Line).show([(f" runs in {self.folder}", "strong")])
        shown: Row = [(" enter", "strong"), (" open ", "muted")]
        for display, description in keys.hints("app"):
            shown += [(f" {display}", "strong"), (f" {description} ", "muted")]
        self.query_one("#runs-keys", Line).show(shown)
        runs = self.query_one("#runs", LineList)
        none = f"no runs in {self.folder.absolute()}; `dschat run` makes one"
        runs.show(RunRows(sources) if sources else Nothing(none))
        if self.focused is None:
            runs.focus()

    def on_line_list_picked(self, message: LineList.Picked) -> None:
        """Open a run."""
        source = self.query_one("#runs", LineList).source
        if isinstance(source, RunRows):
            self.app.open_run(source.sources[message.index])  # type: ignore[attr-defined]
