"""The log tab: every line, followed, searched, and reached from charts and events."""

from __future__ import annotations

from textual import work

from dschat_tui.dashboard.keys import Key, bind
from dschat_tui.dashboard.screens.run.model import RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.widgets.lines import LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.lines import LogLines
from dschat_tui.text import ASCII, Glyphs, clean


class LogRows:
    """Lines of a log; what was searched for is marked."""

    def __init__(self, lines: LogLines, searched: str, glyphs: Glyphs) -> None:
        self.lines = lines
        self._searched = searched.lower()
        self._ascii = glyphs is ASCII

    @property
    def count(self) -> int:
        """How many lines there are."""
        return self.lines.count

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [
            self._row(clean(line, self._ascii)[shift:]) for line in self.lines.read(first, count)
        ]

    def _row(self, text: str) -> Row:
        at = text.lower().find(self._searched) if self._searched else -1
        # lower() may change the length of some letters: then nothing is marked
        if at < 0 or len(text.lower()) != len(text):
            return [(text, "text")]
        end = at + len(self._searched)
        return [(text[:at], "text"), (text[at:end], "chosen"), (text[end:], "text")]


class LogTab(LineList, RunTab):
    """The log of the step that is shown."""

    tab_name = "log"
    letter = "l"
    is_searchable = True
    BINDINGS = bind(
        (
            Key("log", "log.next_found", "n", "found(1)", "next match", "n"),
            Key("log", "log.previous_found", "N", "found(-1)", "previous match", "N"),
            Key("log", "log.follow", "f", "follow", "follow the end of the log", "f"),
        )
    )

    def __init__(self) -> None:
        super().__init__(id=self.tab_name, follow=True)
        self._run: RunModel | None = None
        self._searched = ""
        self._drawn: tuple[object, ...] = ()

    def update(self, run: RunModel) -> None:
        """List the lines."""
        self._run = run
        drawn = (run.key, run.log.version, self._searched)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        if run.log.status.lines:
            self.show(LogRows(run.lines, self._searched, self.glyphs))
        else:
            self.show(Nothing("no lines yet"))

    def reset(self) -> None:
        """Draw for the size that the tab has now."""
        self._drawn = ()

    def show_line(self, run: RunModel, offset: int) -> None:
        """Go to the line at a byte of the log."""
        self.follow = False
        self.update(run)
        self.go_to(run.lines.number_at(offset))

    def search(self, text: str) -> None:
        """Go to the next line that contains a text."""
        self._searched = text
        if text:
            self._find(text, self.cursor + 1, False)

    def action_found(self, direction: int) -> None:
        """Go to the next or previous line that contains what was searched for."""
        if self._searched:
            start = self.cursor + 1 if direction > 0 else self.cursor
            self._find(self._searched, start, direction < 0)

    @work(thread=True, exclusive=True, exit_on_error=False, group="search")
    def _find(self, text: str, start: int, backwards: bool) -> None:
        assert self._run is not None
        lines = self._run.lines
        number = lines.find(text, start, backwards)
        if number is None:  # wrap around
            number = lines.find(text, lines.count if backwards else 0, backwards)
        self.app.call_from_thread(self._go_to_found, self._run, number)

    def _go_to_found(self, run: RunModel, number: int | None) -> None:
        if number is None:
            self.show_message(f"no line holds '{self._searched}'")
            return
        self.follow = False
        self.update(run)
        self.go_to(number)
