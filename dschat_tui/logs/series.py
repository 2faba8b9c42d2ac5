"""A quantity over a log of any length, in constant memory: what a chart draws."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

CAPACITY = 512
_GREATEST = sys.float_info.max


class Column(NamedTuple):
    """A stretch of values: `mean` is NaN, `low` above `high`, where none of them was finite."""

    low: float
    high: float
    mean: float
    has_nonfinite: bool
    step: float
    offset: int


class Series:
    """Values by step, kept as at most 512 buckets of equally many values.

    When all are full, pairs merge and their width doubles. A bucket has the least, greatest and
    mean finite value, whether any was NaN or infinite, and the step and the log's byte offset of
    its first value.
    """

    def __init__(self) -> None:
        self.total = 0
        self.nonfinite = 0
        self.minimum = math.inf
        self.maximum = -math.inf
        self.last = math.nan
        self.last_step = math.nan
        self.version = 0
        self._low = array("d")
        self._high = array("d")
        self._sum = array("d")
        self._count = array("q")
        self._nonfinite = bytearray()
        self._step = array("d")
        self._offset = array("q")
        self._width = 1
        self._in_last_bucket = 0
        # charts ask for the same columns again whenever something else about them changes
        self._asked: tuple[float, ...] = ()
        self._given: list[Column] = []

    def __len__(self) -> int:
        return self.total

    def append(self, value: float, step: float, offset: int = 0) -> None:
        """Add the value of a step, from the line at byte `offset` of the log."""
        self.extend((value,), (step,), (offset,))

    def extend(
        self, values: Sequence[float], steps: Sequence[float], offsets: Sequence[int]
    ) -> None:
        """Add values, with the step and the byte of its line of each."""
        start, count = 0, len(values)
        if not count:
            return
        room = self._width - self._in_last_bucket if self._low else 0
        while start < count:
            if not room:
                if len(self._low) == CAPACITY:
                    self._merge_pairs()
                self._begin_bucket(steps[start], offsets[start])
                room = self._width
            added = values[start : start + room]
            self._add_to_last_bucket(added)
            room -= len(added)
            start += len(added)
        self._in_last_bucket = self._width - room
        self.last, self.last_step = values[-1], steps[-1]
        self.total += count
        self.version += 1

    def _add_to_last_bucket(self, values: Sequence[float]) -> None:
        total = sum(values, 0.0)
        if not -_GREATEST <= total <= _GREATEST:  # mostly false; checking each value takes time
            finite = [value for value in values if -_GREATEST <= value <= _GREATEST]
            if len(finite) < len(values):
                self.nonfinite += len(values) - len(finite)
                self._nonfinite[-1] = 1
            if not finite:
                return
            values, total = finite, sum(finite, 0.0)
        lowest, highest = min(values), max(values)
        self._low[-1] = min(self._low[-1], lowest)
        self._high[-1] = max(self._high[-1], highest)
        self.minimum = min(self.minimum, lowest)
        self.maximum = max(self.maximum, highest)
        self._sum[-1] += total
        self._count[-1] += len(values)

    def _begin_bucket(self, step: float, offset: int) -> None:
        self._low.append(math.inf)
        self._high.append(-math.inf)
        self._sum.append(0.0)
        self._count.append(0)
        self._nonfinite.append(0)
        self._step.append(step)
        self._offset.append(offset)

    def _merge_pairs(self) -> None:
        low, high = self._low, self._high
        self._low = array("d", map(min, low[::2], low[1::2]))
        self._high = array("d", map(max, high[::2], high[1::2]))
        self._sum = array("d", map(sum, zip(self._sum[::2], self._sum[1::2], strict=True)))
        self._count = array("q", map(sum, zip(self._count[::2], self._count[1::2], strict=True)))
        self._nonfinite = bytearray(map(max, self._nonfinite[::2], self._nonfinite[1::2]))
        self._step = self._step[::2]
        self._offset = self._offset[::2]
        self._width *= 2

    def forget_from(self, step: float) -> None:
        """Drop the buckets that begin at `step` or later: a resumed run reports them again."""
        kept = bisect_left(self._step, step)
        for column in (self._low, self._high, self._sum, self._count, self._step, self._offset):
            del column[kept:]
        del self._nonfinite[kept:]
        self._in_last_bucket = self._width
        self.version += 1
        self.total = min(self.total, kept * self._width)
        self.minimum = min(self._low, default=math.inf)
        self.maximum = max(self._high, default=-math.inf)
        self.nonfinite = min(self.nonfinite, sum(self._nonfinite) * self._width)

    def columns(
        self, count: int, first_step: float = -math.inf, last_step: float = math.inf
    ) -> list[Column]:
        """The buckets from `first_step` to `last_step`, merged into at most `count` columns."""
        asked = (self.version, count, first_step, last_step)
        if asked != self._asked:
            self._asked, self._given = asked, self._merged(count, first_step, last_step)
        return self._given

    def _merged(self, count: int, first_step: float, last_step: float) -> list[Column]:
        start = max(bisect_right(self._step, first_step) - 1, 0)
        end = bisect_right(self._step, last_step)
        buckets = max(end - start, 0)
        columns = min(buckets, count)
        if columns <= 0:
            return []
        bounds = [start + i * buckets // columns for i in range(columns + 1)]
        return [self._column(a, b) for a, b in pairwise(bounds)]

    def _column(self, start: int, end: int) -> Column:
        count = sum(self._count[start:end])
        return Column(
            low=min(self._low[start:end]),
            high=max(self._high[start:end]),
            mean=sum(self._sum[start:end]) / count if count else math.nan,
            has_nonfinite=any(self._nonfinite[start:end]),
            step=self._step[start],
            offset=self._offset[start],
        )

    def take(self, other: Series) -> None:
        """Become `other`, which was filled elsewhere and is not used any more."""
        version = self.version + other.version + 1
        self.__dict__.update(other.__dict__)
        self.version = version
