"""Why a step failed: from its log, its exit code, and the model folders that it left behind."""

from __future__ import annotations

from pathlib import Path

from engine.log.causes import RETURN_CODES, Cause
from engine.log.read import LogReader

LONGEST_LINE = 400


def find_cause(log: Path, returncode: int | None, incomplete: list[str], offset: int = 0) -> Cause:
    """Why a step failed.

    Args:
        log: of the step.
        returncode: of the launcher.
        incomplete: names of model folders that lack parts.
        offset: where in the log this attempt at the step begins.
    """
    reader = LogReader()
    with log.open("rb") as file:
        file.seek(offset)
        for line in file:
            reader.feed(line.decode("utf-8", "replace").rstrip("\r\n"))
    reader.finish()
    cause = reader.cause
    if cause is not None and cause["id"] != "unknown":
        return cause
    if returncode in RETURN_CODES:
        id, advice = RETURN_CODES[returncode]
        return {"id": id, "line": f"exit code {returncode}", "advice": advice}
    if cause is not None:
        return cause
    if returncode == 0:
        return {
            "id": "incomplete_model",
            "line": f"exit code 0, but {', '.join(incomplete)} is not a complete model",
            "advice": "A rank or the launcher was killed from outside, or the disk is full: "
            "check both and run the step again.",
        }
    return {
        "id": "unknown",
        "line": last_line(log) or f"exit code {returncode}",
        "advice": f"Read the end of {log}.",
    }


def last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 16 * LONGEST_LINE))
        lines = file.read().decode("utf-8", "replace").split("\n")
    return next((line.strip()[:LONGEST_LINE] for line in reversed(lines) if line.strip()), "")
