"""A conversation with one model as rows of a width; it grows with the events of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.cells import cell_len, chop_cells

from dschat_tui.chat.events import EventRecord, TableRow
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.text import clean, visible

LOADING, READY, ANSWERING, ENDED, FAILED = "loading", "ready", "answering", "ended", "failed"
_STYLES = {"you": "strong", "answer": "text", "note": "muted", "error": "bad", "table": "text"}
_WORD = re.compile(r"\S+\s*|\s+")


@dataclass
class _Entry:
    """A piece of the conversation, and its rows as last laid out."""

    kind: str
    text: str
    laid_out: tuple[int, int] = (0, 0)
    rows: list[Row] = field(default_factory=list)


class Transcript:
    """The rows of a conversation with one model, for a `LineList`, and the state of the model.

    Attributes:
        state: loading, ready, answering, ended or failed.
        detail: about the state: what is being loaded, how fast the last answer was, why
            it failed.
        version: grows with every change.
    """

    def __init__(self, name: str, ascii_only: bool = False) -> None:
        self.name = name
        self.state = LOADING
        self.detail = "starting"
        self.version = 0
        self._ascii = ascii_only
        self._width = 80
        self._entries: list[_Entry] = []
        self._rows: list[Row] = []
        self._drawn: tuple[int, int] = (-1, 0)
        self._growing = False
        self._last_note = ""

    def ask(self, text: str) -> None:
        """Add what the person sent."""
        if self._entries:
            self._add("you", "")
        self._add("you", f"> {text}")
        if self.state == READY:
            self.state = ANSWERING

    def note(self, line: str) -> None:
        """Take a line that the model's process wrote between its events."""
        if line.strip():
            self._last_note = line
            self.version += 1
        if self.state == LOADING:
            self.detail = self._last_note

    def end(self, code: int) -> None:
        """Say that the model's process is gone."""
        if code == 0 or self.state == ENDED:
            self.state, self.detail = ENDED, ""
        else:
            how = f"exit code {code}" if code > 0 else f"ended by signal {-code}"
            self.state, self.detail = FAILED, how
            self._add("error", f"{self.name}: {how}. {self._last_note}")
        self.version += 1

    def apply(self, event: EventRecord) -> None:
        """Take an event of `dschat chat --json`."""
        kind, text = event["event"], str(event.get("text", ""))
        if kind == "ready":
            self.state, self.detail = READY, f"{event.get('context', '?')} tokens of context"
        elif kind == "token":
            if not self._growing:
                self._add("answer", "")
            self._growing = True
            self._entries[-1].text += text
            self.state = ANSWERING
        elif kind == "answer":
            self._growing = False
            self.detail = _speed(event.get("statistics") or {})
            self._settle()
        elif kind in ("note", "error"):
            self._add(kind, text)
            self._settle()
        elif kind == "table":
            self._add("table", "\n".join(_table_lines(event["rows"])))
            self._settle()
        elif kind == "quit":
            self.state = ENDED
        self.version += 1

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self._all())

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return self._all()[first : first + count]

    def lay_out(self, width: int) -> None:
        """Break the rows at another width."""
        self._width = max(width, 8)

    def _settle(self) -> None:
        if self.state == ANSWERING:
            self.state = READY

    def _add(self, kind: str, text: str) -> None:
        self._growing = False
        self._entries.append(_Entry(kind, text))
        self.version += 1

    def _all(self) -> list[Row]:
        drawn = (self.version, self._width)
        if drawn != self._drawn:
            self._drawn = drawn
            self._rows = [row for entry in self._entries for row in self._entry_rows(entry)]
        return self._rows

    def _entry_rows(self, entry: _Entry) -> list[Row]:
        key = (self._width, len(entry.text))
        if entry.laid_out != key:
            style = _STYLES[entry.kind]
            parts = [clean(visible(part), self._ascii) for part in entry.text.split("\n")]
            lines = [line for part in parts for line in wrapped(part, self._width)]
            entry.laid_out, entry.rows = key, [[(line, style)] for line in lines]
        return entry.rows


def wrapped(text: str, width: int) -> list[str]:
    """A line of text in rows of at most `width` cells, broken between words where it can be."""
    rows: list[str] = []
    used = 0
    for word in _WORD.findall(text):
        if rows and used + cell_len(word.rstrip()) <= width:
            rows[-1] += word
            used += cell_len(word)
        else:
            rows += chop_cells(word, width)
            used = cell_len(rows[-1])
    return [row.rstrip() for row in rows] or [""]


def _speed(statistics: dict[str, float]) -> str:
    first, speed = statistics.get("first_token_seconds"), statistics.get("tokens_per_second")
    if not isinstance(first, (int, float)) or not isinstance(speed, (int, float)):
        return ""
    return f"{speed:.1f} tokens/s, first {1000 * first:.0f} ms"


def _table_lines(rows: Sequence[TableRow]) -> Iterator[str]:
    """One line per row: its first value, then the others, named where there are several."""
    for row in rows:
        (_, first), *others = row.items()
        if len(others) == 1:
            yield f"{first}: {others[0][1]}"
        else:
            yield "  ".join([str(first), *(f"{name} {value}" for name, value in others)])
