"""What the reading thread hands to the screen: points, events, status. Immutable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dschat_tui.logs.points import Points
from engine.log.causes import Cause

LINES_PER_MARK = 64


class Event(NamedTuple):
    """Something that happened: its kind, its text, and the byte offset of its line."""

    kind: str
    text: str
    offset: int


@dataclass(frozen=True)
class Status:
    """What a log says of its step as a whole, so far."""

    step: str | None = None
    state: str = "unknown"
    returncode: int | None = None
    cause: Cause | None = None
    phase: str = ""
    percent: int | None = None
    done: int = 0
    total: int = 0
    model: str | None = None
    counters: dict[str, int] = field(default_factory=dict)
    lines: int = 0
    size: int = 0


@dataclass(frozen=True)
class Update:
    """What some lines added: points by the name of their series, events, every 64th line's offset.

    With `cut_from`, a resumed run reports again what series held from that step on.
    """

    points: Mapping[str, Points]
    events: Sequence[Event]
    marks: Sequence[int]
    status: Status
    restarted: bool = False
    cut_from: float | None = None
