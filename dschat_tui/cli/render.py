"""The renderers: events to a terminal, to a pipe, to JSON lines."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from typing import Protocol, TextIO

from dschat_tui.chat.events import Answer, Error, Event, Note, Quit, Ready, Table, Token
from dschat_tui.text import padded, visible


class Renderer(Protocol):
    """Shows events."""

    def show(self, event: Event) -> None:
        """Show one event."""
        ...


class TerminalRenderer:
    """For a user at a terminal: answers stream, everything else is set apart from them."""

    def __init__(self, out: TextIO, color: bool = True) -> None:
        self.out = out
        self.color = color
        self.name = "model"
        self._in_answer = False

    def show(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Ready():
                self.name = event.model
                self._line(f"Talking with {event.model}. /help lists the commands, quit ends.", "2")
            case Token():
                if not self._in_answer:
                    self._write(self._style(f"{self.name}> ", "1;36"))
                    self._in_answer = True
                self._write(visible(event.text))
            case Answer():
                self._write("\n" if self._in_answer else "")
                self._in_answer = False
            case Note():
                self._line(event.text, "2")
            case Error():
                self._line(event.text, "31")
            case Table():
                self._line(format_table(event))
            case Quit():
                pass

    def _line(self, text: str, style: str = "") -> None:
        self._write(("\n" if self._in_answer else "") + self._style(visible(text), style) + "\n")
        self._in_answer = False

    def _style(self, text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if self.color and style else text

    def _write(self, text: str) -> None:
        self.out.write(text)
        self.out.flush()


class PlainRenderer:
    """For a pipe: answers to one stream, everything else to the other."""

    def __init__(self, out: TextIO, notes: TextIO) -> None:
        self.out = out
        self.notes = notes

    def show(self, event: Event) -> None:
        """Show one event."""
        match event:
            case Token():
                self._write(self.out, visible(event.text))
            case Answer():
                self._write(self.out, "\n")
            case Note() | Error():
                self._write(self.notes, visible(event.text) + "\n")
            case Table():
                self._write(self.notes, visible(format_table(event)) + "\n")
            case Ready() | Quit():
                pass

    def _write(self, stream: TextIO, text: str) -> None:
        stream.write(text)
        stream.flush()


class JsonRenderer:
    """For another program: one JSON document per line and event."""

    def __init__(self, out: TextIO) -> None:
        self.out = out

    def show(self, event: Event) -> None:
        """Write one event."""
        row = {"event": event.kind, **asdict(event)}
        if isinstance(event, Answer):
            row["statistics"]["tokens_per_second"] = event.statistics.tokens_per_second
        self.out.write(json.dumps(row) + "\n")
        self.out.flush()


def format_table(table: Table) -> str:
    """Lay a table out in the width of the terminal; long texts take lines of their own."""
    if not table.rows:
        return f"{table.name}: nothing yet."
    columns = list(dict.fromkeys(key for row in table.rows for key in row))
    cells = [[str(row.get(column, "")) for column in columns] for row in table.rows]
    if not any("\n" in cell for row in cells for cell in row):
        text = padded([columns, *cells])
        if max(map(len, text.split("\n"))) <= shutil.get_terminal_size().columns:
            return text
    return "\n\n".join(
        "\n".join(
            f"{column}: " + cell.replace("\n", "\n  ")
            for column, cell in zip(columns, row, strict=True)
        )
        for row in cells
    )
