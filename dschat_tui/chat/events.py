"""What happens in a conversation, as plain records that every renderer shows in its own way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

# A row of a table, by the titles of its columns.
TableRow = Mapping[str, object]


@dataclass(frozen=True)
class Ready:
    """The model is loaded; the person may ask."""

    kind: ClassVar[str] = "ready"
    model: str
    path: str
    context: int
    commands: list[str]


@dataclass(frozen=True)
class Token:
    """The next piece of an answer, as text."""

    kind: ClassVar[str] = "token"
    text: str


@dataclass(frozen=True)
class Statistics:
    """Work behind one answer; seconds are wall time.

    Attributes:
        prompt_tokens: tokens of the rendered conversation.
        kept_tokens: those of them whose keys and values the cache still held.
        new_tokens: tokens generated, the end of the answer included.
        first_token_seconds: from the question to the first token.
        seconds: from the question to the end of the answer.
    """

    prompt_tokens: int
    kept_tokens: int
    new_tokens: int
    first_token_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token; 0 where there was no second one."""
        rest = self.seconds - self.first_token_seconds
        return (self.new_tokens - 1) / rest if self.new_tokens > 1 and rest > 0 else 0.0


@dataclass(frozen=True)
class Answer:
    """A finished answer.

    Attributes:
        finish: stop (the model ended it), length (no room or no tokens left), interrupted.
    """

    kind: ClassVar[str] = "answer"
    text: str
    finish: Literal["stop", "length", "interrupted"]
    statistics: Statistics


@dataclass(frozen=True)
class Note:
    """Information for the user."""

    kind: ClassVar[str] = "note"
    text: str


@dataclass(frozen=True)
class Error:
    """Something that was refused: what, the value, what to do."""

    kind: ClassVar[str] = "error"
    text: str


@dataclass(frozen=True)
class Table:
    """Rows with the same keys, such as the answers of several models."""

    kind: ClassVar[str] = "table"
    name: str
    rows: Sequence[TableRow] = field(default_factory=list)


@dataclass(frozen=True)
class Quit:
    """The conversation is over."""

    kind: ClassVar[str] = "quit"


class EventKind(TypedDict):
    """What kind of event a line of `dschat chat --json` is."""

    event: str


class EventRecord(EventKind, total=False):
    """A line of `dschat chat --json`, with the keys that the dashboard reads."""

    text: str
    context: int
    statistics: dict[str, float]
    rows: list[TableRow]


Event = Ready | Token | Answer | Note | Error | Table | Quit
