"""A whole log, and the logs of a run, as one document; and documents as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypedDict

from engine.config.steps import STEPS
from engine.log.causes import Cause
from engine.log.read import LogReader, Record

_BLOCK = 1 << 20


class LogDocument(TypedDict):
    """The whole of one log; `events` counts what happened, by name."""

    step: str | None
    state: str
    returncode: int | None
    cause: Cause | None
    records: list[Record]
    events: dict[str, int]


class RunDocument(TypedDict):
    """The logs of a run, by step."""

    steps: dict[str, LogDocument]


def read_document(path: Path) -> LogDocument:
    """The whole of one log.

    Raises:
        OSError: the file cannot be read.
    """
    reader = LogReader()
    records: list[Record] = []
    unfinished = b""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            head, newline, rest = block.rpartition(b"\n")
            if not newline:
                # Bounds the memory for a line that never ends.
                unfinished = (unfinished + rest)[:_BLOCK]
                continue
            records += reader.feed_all((unfinished + head).decode("utf-8", "replace").split("\n"))
            unfinished = rest
    records += reader.finish(unfinished.decode("utf-8", "replace"))
    return {
        "step": reader.step,
        "state": reader.state,
        "returncode": reader.returncode,
        "cause": reader.cause,
        "records": records,
        "events": reader.events,
    }


def read_run(path: Path) -> RunDocument:
    """The documents of the steps of a run's folder that have begun, under `steps`.

    A log without end is `running` where run.json says so.

    Raises:
        OSError: a log cannot be read.
    """
    steps: dict[str, LogDocument] = {}
    for step in STEPS:
        log = path / step.folder / "training.log"
        if not log.is_file():
            continue
        document = read_document(log)
        document["step"] = document["step"] or step.name
        if document["state"] == "unknown" and _is_running(path, step.name):
            document["state"] = "running"
        steps[step.name] = document
    return {"steps": steps}


def _is_running(run: Path, step: str) -> bool:
    try:
        state = json.loads((run / "run.json").read_text(encoding="utf-8"))
        return bool(state["steps"][step]["state"] == "running")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def to_json(document: object, indent: int | None = None) -> str:
    """A document as JSON; nan and infinities are the strings "nan", "inf", "-inf"."""
    return json.dumps(_without_nonfinite(document), indent=indent, allow_nan=False)


def _without_nonfinite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    return value
