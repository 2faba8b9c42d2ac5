"""Follow a growing file by polling, which also works on a network file system."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

BLOCK_BYTES = 256 * 1024
LONGEST_LINE_BYTES = 1024 * 1024
_REMEMBERED_BYTES = 64


@dataclass(frozen=True)
class Batch:
    """Lines that were finished, with the byte at which each begins.

    `restarted` means that they begin a new file and the old one's lines no longer count; `more`
    that another read gives more at once.
    """

    lines: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    restarted: bool = False
    more: bool = False


class Follower:
    """Reads what others append to a file, block by block, in bounded memory.

    A file that is replaced, truncated or rewritten is read from its beginning; one that is not
    there yet is waited for. Of a line of more than 1 MiB the middle is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._forget()

    def _forget(self) -> None:
        self._identity = (0, 0)
        self._position = 0
        self._last_bytes = b""
        self._unfinished = b""
        self._line_start = 0
        self._dropped = 0

    @property
    def unfinished(self) -> str:
        """The last line so far, whose newline has not come."""
        return self._unfinished.decode("utf-8", "replace")

    def read(self) -> Batch:
        """What has come since the last read, at most one block.

        Raises:
            OSError: the file exists but cannot be read.
        """
        restarted = self._descriptor is not None and self._is_another_file()
        if restarted:
            self.close()
        if self._descriptor is None and not self._open():
            return Batch(restarted=restarted)
        assert self._descriptor is not None
        try:
            block = os.pread(self._descriptor, BLOCK_BYTES, self._position)
        except OSError as error:
            if error.errno != errno.ESTALE:  # replaced on a network file system
                raise
            self.close()
            return Batch(restarted=True)
        self._position += len(block)
        self._last_bytes = (self._last_bytes + block)[-_REMEMBERED_BYTES:]
        lines, offsets = self._split(block)
        return Batch(lines, offsets, restarted, more=len(block) == BLOCK_BYTES)

    def close(self) -> None:
        """Close the file; the next read starts over."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self._forget()

    def _open(self) -> bool:
        try:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)
        return True

    def _is_another_file(self) -> bool:
        assert self._descriptor is not None
        try:
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._position:
                return True
            # truncated, and meanwhile grown beyond where we were
            start = self._position - len(self._last_bytes)
            return os.pread(self._descriptor, len(self._last_bytes), start) != self._last_bytes
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return True

    def _split(self, block: bytes) -> tuple[list[str], list[int]]:
        head, newline, rest = (self._unfinished + block).rpartition(b"\n")
        self._unfinished = rest[:LONGEST_LINE_BYTES]
        dropped_before = self._dropped
        if not newline:
            self._dropped += len(rest) - len(self._unfinished)
            return [], []
        self._dropped = len(rest) - len(self._unfinished)
        lengths = [len(line) + 1 for line in head.split(b"\n")]
        lengths[0] += dropped_before
        *offsets, self._line_start = accumulate(lengths, initial=self._line_start)
        return head.decode("utf-8", "replace").split("\n"), offsets
