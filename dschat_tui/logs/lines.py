"""Lines of a log of any length, read from the file where they are shown."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

from dschat_tui.logs.records import LINES_PER_MARK

LONGEST_SHOWN_BYTES = 4096
_MARKS_A_BLOCK = 64


class LogLines:
    """A log's lines by number, from 0: `marks` are the bytes at which every 64th line begins."""

    def __init__(self, path: Path, marks: Sequence[int], count: int) -> None:
        self.path = path
        self._marks = marks
        self.count = count

    def read(self, first: int, count: int) -> list[str]:
        """Lines from `first` on, each cut at 4 KiB; fewer where the file is shorter or gone."""
        first = max(first, 0)
        count = min(count, self.count - first)
        if count <= 0:
            return []
        lines = []
        try:
            with self.path.open("rb") as file:
                file.seek(self._marks[first // LINES_PER_MARK])
                for number in range(first // LINES_PER_MARK * LINES_PER_MARK, first + count):
                    line = file.readline(LONGEST_SHOWN_BYTES)
                    rest = line
                    while rest and not rest.endswith(b"\n"):
                        rest = file.readline(1 << 20)
                    if not line:
                        break
                    if number >= first:
                        lines.append(line.rstrip(b"\n").decode("utf-8", "replace"))
        except OSError:
            return lines
        return lines

    def number_at(self, offset: int) -> int:
        """The number of the line at byte `offset`."""
        mark = max(bisect_right(self._marks, offset) - 1, 0)
        if not self._marks:
            return 0
        try:
            with self.path.open("rb") as file:
                file.seek(self._marks[mark])
                before = file.read(max(offset - self._marks[mark], 0))
        except OSError:
            return 0
        return min(mark * LINES_PER_MARK + before.count(b"\n"), max(self.count - 1, 0))

    def find(self, text: str, start: int, backwards: bool = False) -> int | None:
        """Number of the next line from `start` on (or before it) that holds a text, or None.

        Letters of either case are the same, as far as they are ASCII.
        """
        wanted = text.encode("utf-8", "replace").lower()
        marks = self._marks
        blocks = range(0, len(marks), _MARKS_A_BLOCK)
        own = start // LINES_PER_MARK // _MARKS_A_BLOCK * _MARKS_A_BLOCK
        order = (
            [b for b in blocks if b <= own][::-1] if backwards else [b for b in blocks if b >= own]
        )
        try:
            with self.path.open("rb") as file:
                for block in order:
                    file.seek(marks[block])
                    after = block + _MARKS_A_BLOCK
                    size = marks[after] - marks[block] if after < len(marks) else -1
                    content = file.read(size).lower()
                    if wanted not in content:
                        continue
                    number = block * LINES_PER_MARK
                    found = [
                        number + i
                        for i, line in enumerate(content.split(b"\n"))
                        if wanted in line and number + i < self.count
                    ]
                    if backwards:
                        found = [n for n in reversed(found) if n < start]
                    else:
                        found = [n for n in found if n >= start]
                    if found:
                        return found[0]
        except OSError:
            return None
        return None
