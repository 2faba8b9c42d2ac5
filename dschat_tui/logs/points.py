"""Points of many series, gathered a record at a time and handed over a series at a time."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

_GREATEST = sys.float_info.max


class Points(NamedTuple):
    """Values of one series in the order of the log, each with its step and its line's byte."""

    values: list[float]
    steps: list[float]
    offsets: list[int]


class NotFinite(NamedTuple):
    """A value that is NaN or infinite, and where."""

    name: str
    value: float
    step: float
    offset: int


class Gatherer:
    """Gathers rows of values; those of the same names are turned into columns at once.

    A history has hundreds of thousands of values: to touch each of them in Python takes longer
    than to read the log.
    """

    def __init__(self) -> None:
        self._points: dict[str, Points] = {}
        self._names: tuple[str, ...] = ()
        self._rows: list[Sequence[float | None]] = []
        self._steps: list[float] = []
        self._offsets: list[int] = []
        self._not_finite: list[NotFinite] = []

    def add(
        self, names: tuple[str, ...], values: Sequence[float | None], step: float, offset: int
    ) -> None:
        """Add a record's values by name; None means that it does not have one."""
        if names != self._names:
            self._flush()
            self._names = names
        self._rows.append(values)
        self._steps.append(step)
        self._offsets.append(offset)

    def forget_from(self, step: float) -> None:
        """Drop what was gathered of that step and later ones."""
        self._flush()
        for name, points in self._points.items():
            self._points[name] = _chosen(points, [at < step for at in points.steps])

    def take(self) -> tuple[dict[str, Points], list[NotFinite]]:
        """What was gathered since the last call, and which of it is not finite."""
        self._flush()
        points, self._points = self._points, {}
        not_finite, self._not_finite = self._not_finite, []
        return points, not_finite

    def _flush(self) -> None:
        """Turn the rows into columns."""
        rows, steps, offsets = self._rows, self._steps, self._offsets
        self._rows, self._steps, self._offsets = [], [], []
        if not rows:
            return
        for name, column in zip(self._names, zip(*rows, strict=True), strict=True):
            points = Points(list(column), steps, offsets)
            if None in column:
                points = _chosen(points, [value is not None for value in column])
            if not _is_finite(points.values):
                self._note_not_finite(name, points)
            if name in self._points:
                gathered = self._points[name]
                gathered.values.extend(points.values)
                gathered.steps.extend(points.steps)
                gathered.offsets.extend(points.offsets)
            elif points.values:
                self._points[name] = Points(points.values, list(points.steps), list(points.offsets))

    def _note_not_finite(self, name: str, points: Points) -> None:
        """Note what is not finite; an integer beyond all floats becomes infinite."""
        for index, value in enumerate(points.values):
            if not -_GREATEST <= value <= _GREATEST:
                points.values[index] = found = value if isinstance(value, float) else math.inf
                where = points.steps[index], points.offsets[index]
                self._not_finite.append(NotFinite(name, found, *where))


def _is_finite(values: Sequence[float]) -> bool:
    """Whether all are finite; mostly they are, and their sum shows it at once."""
    try:
        return -_GREATEST <= sum(values) <= _GREATEST
    except OverflowError:  # an integer beyond all floats
        return False


def _chosen(points: Points, wanted: Sequence[bool]) -> Points:
    values, steps, offsets = points
    return Points(
        list(compress(values, wanted)),
        list(compress(steps, wanted)),
        list(compress(offsets, wanted)),
    )
