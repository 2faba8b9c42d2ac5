"""What the tabs of the run screen list, as rows: verdicts, answers, lines of the log, events."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.health import CHECK, NOTE, OK, Verdict
from dschat_tui.logs.lines import LogLines
from dschat_tui.logs.records import Event
from dschat_tui.logs.rollouts import Rollouts
from dschat_tui.text import ASCII, Glyphs, clean, short_number

LONGEST_SNIPPET = 300
_EVENT_STYLES = {
    "warning": "warn",
    "not_finite": "bad",
    "overflow": "warn",
    "loss_scale_floor": "bad",
    "finished": "good",
    "evaluation": "strong",
}


class VerdictRows:
    """Verdicts: the reading, then the rule and where it is normally, broken at a width."""

    def __init__(self, verdicts: Sequence[Verdict], width: int, glyphs: Glyphs) -> None:
        self._rows: list[Row] = []
        signs = {
            OK: (glyphs.done, "good"),
            NOTE: (glyphs.dot, "strong"),
            CHECK: (glyphs.check, "warn"),
        }
        for verdict in verdicts:
            sign, style = signs[verdict.level]
            told = " check this:" if verdict.level == CHECK else ""
            self._rows += [
                [
                    (f"{sign}{told} ", style),
                    (verdict.title, "strong"),
                    (f": {verdict.reading}", "text"),
                ],
            ]
            behind = f"rule: {verdict.rule}; normally {verdict.normal}"
            indent = " " * 4
            self._rows += [
                [(line, "muted")]
                for line in textwrap.wrap(
                    behind, max(width, 20), initial_indent=indent, subsequent_indent=indent
                )
            ]
        if not self._rows:
            self._rows = [[("no numbers to judge by yet", "muted")]]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return self._rows[first : first + count]


class EventRows:
    """Events, oldest first."""

    def __init__(self, events: Sequence[Event], glyphs: Glyphs) -> None:
        self.events = events
        self._ascii = glyphs is ASCII

    @property
    def count(self) -> int:
        """How many events there are."""
        return len(self.events)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [
            [
                (f"{event.kind.replace('_', ' '):<11} ", _EVENT_STYLES.get(event.kind, "muted")),
                (clean(event.text, self._ascii)[shift:], "text"),
            ]
            for event in self.events[first : first + count]
        ]


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


class AnswerRows:
    """Answers in an order, a row each: numbers, then prompt and answer."""

    def __init__(self, rollouts: Rollouts, order: Sequence[int], glyphs: Glyphs) -> None:
        self.rollouts = rollouts
        self.order = order
        self._glyphs = glyphs

    @property
    def count(self) -> int:
        """How many answers there are."""
        return len(self.order)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [self._row(index, shift) for index in self.order[first : first + count]]

    def _row(self, index: int, shift: int) -> Row:
        row = self.rollouts.row(index)
        prompt, answer = (self._line(text) for text in self.rollouts.text(row.offset))
        numbers = (
            f"{row.step:>6} {short_number(row.reward):>7} {short_number(row.kl):>7} {row.length:>5}"
            f" {'end' if row.ended else 'cut'}  "
        )
        text = f"{prompt} {self._glyphs.arrow} {answer}"[shift:]
        return [(numbers, "strong" if row.ended else "warn"), (text, "text")]

    def _line(self, text: str) -> str:
        short = " ".join(text[:LONGEST_SNIPPET].split())
        return clean(short, self._glyphs is ASCII)


ANSWER_COLUMNS = f"{'step':>6} {'reward':>7} {'KL':>7} {'len':>5} end  prompt and answer"


def answer_detail(rollouts: Rollouts, index: int, width: int, glyphs: Glyphs) -> list[Row]:
    """One answer whole, as its text is broken at a width."""
    row = rollouts.row(index)
    prompt, answer = rollouts.text(row.offset)
    numbers = (
        f"step {row.step}  reward {short_number(row.reward)}  score {short_number(row.score)}  "
        f"KL {short_number(row.kl)}  {row.length} tokens  "
        f"{'ended by itself' if row.ended else 'cut off'}"
    )
    rows: list[Row] = [[(numbers, "strong")]]
    for text, style in ((prompt, "muted"), (answer, "text")):
        for line in text.strip().split("\n"):
            harmless = clean(line, glyphs is ASCII)
            rows += [[(part, style)] for part in textwrap.wrap(harmless, max(width, 10))]
    return rows
