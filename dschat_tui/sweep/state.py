"""A sweep on disk: `sweep.json`, which is its state and its results, and what lies beside it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dschat_tui.runs.identity import is_alive
from dschat_tui.runs.state import DONE, FAILED, PENDING, RUNNING

OOM, TIMEOUT, PRUNED = "oom", "timeout", "pruned"
# of a cell, in the order in which they are counted
CELL_STATES = (DONE, OOM, TIMEOUT, FAILED, PRUNED, RUNNING, PENDING)
UNSUCCESSFUL = (OOM, TIMEOUT, FAILED)
VERSION = 1

Record = dict[str, Any]


class SweepError(ValueError):
    """A sweep that must not start, or cannot be read; the message says what to do."""


class SweepFolder:
    """Paths inside a sweep's folder, and its state on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.state_file = self.path / "sweep.json"
        self.table = self.path / "sweep.csv"
        self.report = self.path / "report.md"
        self.picture = self.path / "generate-train.svg"
        self.lock_file = self.path / ".lock"

    def read(self) -> Record | None:
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
        return state

    def write(self, state: Record) -> None:
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


def is_going_on(state: Mapping[str, Any]) -> bool:
    """Whether the process that works on a sweep is alive on this machine."""
    return state.get("state") == RUNNING and is_alive(state.get("process"))


def counts(state: Mapping[str, Any]) -> dict[str, int]:
    """How many cells are in each state; only states that there are."""
    found = Counter(cell["state"] for cell in state["cells"])
    return {name: found[name] for name in CELL_STATES if found[name]}


def counted(state: Mapping[str, Any]) -> str:
    """The same in a line for a person."""
    parts = [f"{number} {name}" for name, number in counts(state).items()]
    return f"{number_of_cells(state)}: {', '.join(parts)}"


def number_of_cells(state: Mapping[str, Any]) -> str:
    """How many cells there are, in words."""
    number = len(state["cells"])
    return f"{number} cell{'' if number == 1 else 's'}"
