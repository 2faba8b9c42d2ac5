"""A sweep on disk: `sweep.json`, which holds its state and results, and the files next to it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, cast

from dschat_tui.runs.identity import is_alive
from dschat_tui.runs.state import DONE, FAILED, PENDING, RUNNING, ProcessIdentity
from engine.log.causes import Cause

OOM, TIMEOUT, PRUNED = "oom", "timeout", "pruned"
# of a cell, in the order in which they are counted
CELL_STATES = (DONE, OOM, TIMEOUT, FAILED, PRUNED, RUNNING, PENDING)
UNSUCCESSFUL = (OOM, TIMEOUT, FAILED)
VERSION = 1

# A quantity that a cell measured; one that is not finite is the word nan, inf or -inf.
Number = float | str
Measured = dict[str, Number]


class Outcome(TypedDict):
    """The outcome of a run of a sweep; `reason` is empty where it is done or has not run."""

    state: str
    reason: str
    cause: Cause | None


class RunTimes(TypedDict):
    """A run of a sweep, and when it ran, in seconds since the epoch."""

    name: str
    steps: list[int]
    path: str | None
    started: float | None
    ended: float | None
    seconds: float | None


class RunRecord(RunTimes, Outcome):
    """A run of a sweep: a preparation or a cell.

    What a cell measured is stored under further keys, those of
    `dschat_tui.sweep.results.QUANTITIES`; read it with `measured` and `number`.
    """


class CellRecord(RunRecord):
    """A cell: its values of the axes, the options that these set, what it starts from."""

    values: dict[str, object]
    assignments: dict[str, object]
    preparation: str | None


class SweepState(TypedDict):
    """The content of sweep.json; `config` is common to all cells, `seconds` what it took so far."""

    version: int
    profile: str
    steps: list[int]
    axes: dict[str, list[object]]
    warmup_steps: int
    created: float
    state: str
    process: ProcessIdentity | None
    seconds: float
    preparations: list[RunRecord]
    cells: list[CellRecord]
    config: dict[str, object]


def measured(record: RunRecord, name: str) -> Number | None:
    """A quantity of a cell, or None where it was not measured."""
    value = record.get(name)
    return value if isinstance(value, (int, float, str)) else None


def number(record: RunRecord, name: str) -> float | None:
    """A quantity of a cell where it is a finite number, else None."""
    value = measured(record, name)
    return None if isinstance(value, str) else value


def add_measured(record: RunRecord, found: Measured) -> None:
    """Put what a cell measured into its record."""
    cast(dict[str, object], record).update(found)


def forget_measured(record: RunRecord, names: Iterable[str]) -> None:
    """Take quantities out of the record of a cell that runs again."""
    for name in names:
        cast(dict[str, object], record).pop(name, None)


class SweepError(ValueError):
    """A sweep that must not start, or cannot be read; the message says what to do."""


_NOTHING_KNOWN: SweepState = {
    "version": VERSION,
    "profile": "",
    "steps": [],
    "axes": {},
    "warmup_steps": 0,
    "created": 0.0,
    "state": PENDING,
    "process": None,
    "seconds": 0.0,
    "preparations": [],
    "cells": [],
    "config": {},
}


class SweepFolder:
    """Paths inside a sweep's folder, and its state on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.state_file = self.path / "sweep.json"
        self.table = self.path / "sweep.csv"
        self.report = self.path / "report.md"
        self.picture = self.path / "generate-train.svg"
        self.lock_file = self.path / ".lock"

    def read(self) -> SweepState | None:
        """The content of sweep.json, or None where there is none.

        Raises:
            SweepError: sweep.json holds something else.
        """
        try:
            text = self.state_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        try:
            state = json.loads(text)
        except ValueError as error:
            raise SweepError(
                f"{self.state_file} is not JSON: {error}. Move it away, or choose another --output"
            ) from error
        if not isinstance(state, dict) or not isinstance(state.get("cells"), list):
            raise SweepError(
                f"{self.state_file} holds no list of cells. Move it away, or choose another "
                "--output"
            )
        return cast(SweepState, {**_NOTHING_KNOWN, **state})

    def write(self, state: SweepState) -> None:
        """Replace sweep.json atomically."""
        content = json.dumps({**state, "updated": time.time()}, indent=2, allow_nan=False)
        self.replace(self.state_file, content + "\n")

    def replace(self, target: Path, content: str) -> None:
        """Replace a file of the sweep atomically."""
        temporary = self.path / f".{target.name}.{os.getpid()}"
        try:
            temporary.write_text(content, encoding="utf-8", errors="replace", newline="")
            temporary.replace(target)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the sweep: one process at a time works on it.

        Raises:
            SweepError: another process does.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self.lock_file.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SweepError(
                    f"another process works on the sweep {self.path}. Wait for its end, or "
                    "choose another --output"
                ) from error
            yield


def is_running(state: SweepState) -> bool:
    """Whether the process that runs a sweep is alive on this machine."""
    return state["state"] == RUNNING and is_alive(state["process"])


def counts(state: SweepState) -> dict[str, int]:
    """How many cells are in each state; states without cells are left out."""
    found = Counter(cell["state"] for cell in state["cells"])
    return {name: found[name] for name in CELL_STATES if found[name]}


def counted(state: SweepState) -> str:
    """The same as one line of text."""
    parts = [f"{number} {name}" for name, number in counts(state).items()]
    return f"{number_of_cells(state)}: {', '.join(parts)}"


def number_of_cells(state: SweepState) -> str:
    """The number of cells, in words."""
    number = len(state["cells"])
    return f"{number} cell{'' if number == 1 else 's'}"
