"""Renderers: what reaches the screen, the pipe, the other program."""

from __future__ import annotations

import io
import json
import re

from hypothesis import given
from hypothesis import strategies as st

from dschat_tui.chat.events import Answer, Error, Note, Ready, Statistics, Table, Token
from dschat_tui.cli.render import (
    JsonRenderer,
    PlainRenderer,
    TerminalRenderer,
    format_table,
    visible,
)

EVIL = "\x1b[2J\x1b]0;title\x07[bold]x[/bold]\r\x9b31m\u202e"
STATISTICS = Statistics(10, 4, 3, 0.1, 0.3)


def events(text: str) -> list:
    """An event of each kind with the same text."""
    return [
        Ready(text, text, 512, ["/help"]),
        Token(text),
        Note(text),
        Token(text),
        Answer(text, "stop", STATISTICS),
        Error(text),
        Table("compare", [{"model": "a", "answer": text}, {"model": "b", "answer": "x" * 300}]),
    ]


@given(st.text())
def test_nothing_shown_can_steer_the_terminal(text: str) -> None:
    for color in (True, False):
        out, notes = io.StringIO(), io.StringIO()
        for event in events(text):
            TerminalRenderer(out, color).show(event)
            PlainRenderer(out, notes).show(event)
        shown = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()) if color else out.getvalue()
        for stream in (shown, notes.getvalue()):
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", stream)


def test_escapes_and_markup_are_shown_as_text() -> None:
    shown = visible(EVIL)
    assert "␛[2J" in shown
    assert "[bold]x[/bold]" in shown
    assert "\\u202e" in shown
    assert visible("Grüße\n\t世界") == "Grüße\n\t世界"


def test_a_pipe_gets_answers_and_nothing_else() -> None:
    out, notes = io.StringIO(), io.StringIO()
    renderer = PlainRenderer(out, notes)
    for event in [
        Ready("m", "p", 1, []),
        Token("It is "),
        Token("Paris."),
        Answer("It is Paris.", "stop", STATISTICS),
        Note("a note"),
        Error("an error"),
        Table("stats", [{"a": 1}]),
    ]:
        renderer.show(event)
    assert out.getvalue() == "It is Paris.\n"
    for text in ("a note", "an error", "a"):
        assert text in notes.getvalue()


def test_json_is_a_document_a_line() -> None:
    out = io.StringIO()
    for event in events(EVIL):
        JsonRenderer(out).show(event)
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["event"] for row in rows] == [
        "ready",
        "token",
        "note",
        "token",
        "answer",
        "error",
        "table",
    ]
    assert rows[1]["text"] == EVIL
    assert rows[4]["statistics"]["tokens_per_second"] == 10.0
    assert "\x1b" not in out.getvalue()


def test_tables_show_every_cell(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    narrow = format_table(Table("t", [{"a": 1, "b": "two"}, {"a": 3, "b": "four"}]))
    assert [line.split() for line in narrow.splitlines()] == [
        ["a", "b"],
        ["1", "two"],
        ["3", "four"],
    ]
    wide = format_table(Table("t", [{"a": 1, "b": "word " * 30}]))
    assert "a: 1" in wide
    assert ("word " * 30).strip() in wide
