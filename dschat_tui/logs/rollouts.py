"""The answers of PPO as the screen lists them: numbers in memory, text read where it is shown."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dschat_tui.logs.follow import LONGEST_LINE_BYTES, Batch

ROWS_KEPT = 200_000
FOUND_KEPT = 10_000
SORTS = ("newest", "best", "worst", "kl", "longest", "shortest")


class Row(NamedTuple):
    """The numbers of one answer, and the byte of its line in rollouts.jsonl."""

    step: int
    reward: float
    score: float
    kl: float
    length: int
    ended: bool
    offset: int


def parse_rows(batch: Batch) -> list[Row]:
    """The answers in lines of rollouts.jsonl; other lines are left out."""
    rows = []
    for line, offset in zip(batch.lines, batch.offsets, strict=True):
        record = _parse(line)
        if record is not None:
            reward, score, kl = (_number(record.get(name)) for name in ("reward", "score", "kl"))
            step, length = (_whole(record.get(name)) for name in ("step", "length"))
            ended = record.get("ended") is True
            rows.append(Row(step, reward, score, kl, length, ended, offset))
    return rows


def _parse(line: str | bytes) -> dict[str, object] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _whole(value: object) -> int:
    return value if isinstance(value, int) and abs(value) < 2**31 else 0


class Rollouts:
    """The newest 200,000 answers of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, array[float]] = {
            name: array(code) for name, code in zip(Row._fields, "ifffiBq", strict=True)
        }

    def __len__(self) -> int:
        return len(self._columns["step"])

    def extend(self, rows: Sequence[Row], restarted: bool = False) -> None:
        """Add answers, in the order of the file; the oldest beyond the bound are dropped."""
        self.version += 1
        if restarted:
            self._clear()
        for name, values in zip(Row._fields, zip(*rows, strict=True), strict=False):
            self._columns[name].extend(values)
        too_many = len(self) - ROWS_KEPT
        if too_many > ROWS_KEPT // 10 or too_many > len(rows) > ROWS_KEPT:
            for column in self._columns.values():
                del column[:too_many]

    def row(self, index: int) -> Row:
        """The numbers of one answer."""
        step, reward, score, kl, length, ended, offset = (
            column[index] for column in self._columns.values()
        )
        return Row(int(step), reward, score, kl, int(length), bool(ended), int(offset))

    def order(self, sort: str, among: set[int] | None = None) -> list[int]:
        """Indices sorted by one of `SORTS`, only those whose offset is `among`; NaN comes last."""
        indices = range(len(self) - 1, -1, -1)
        if among is not None:
            offsets = self._columns["offset"]
            chosen = [i for i in indices if int(offsets[i]) in among]
        else:
            chosen = list(indices)
        if sort == "newest":
            return chosen
        name, sign = {
            "best": ("reward", -1),
            "worst": ("reward", 1),
            "kl": ("kl", -1),
            "longest": ("length", -1),
            "shortest": ("length", 1),
        }[sort]
        column = self._columns[name]
        return sorted(chosen, key=lambda i: (column[i] != column[i], sign * column[i]))

    def text(self, offset: int) -> tuple[str, str]:
        """Prompt and answer of the row at an offset; empty where the file has changed."""
        try:
            with self.path.open("rb") as file:
                file.seek(offset)
                record = _parse(file.readline(LONGEST_LINE_BYTES)) or {}
        except OSError:
            record = {}
        return str(record.get("prompt", "")), str(record.get("answer", ""))

    def find(self, text: str) -> set[int]:
        """Offsets of the answers whose prompt or answer holds a text, whatever its case."""
        wanted = text.casefold()
        found: set[int] = set()
        offset = 0
        try:
            with self.path.open("rb") as file:
                while line := file.readline(LONGEST_LINE_BYTES):
                    record = _parse(line) or {}
                    texts = f"{record.get('prompt', '')}\n{record.get('answer', '')}"
                    if wanted in texts.casefold():
                        found.add(offset)
                        if len(found) >= FOUND_KEPT:
                            break
                    offset += len(line)
        except OSError:
            return found
        return found
