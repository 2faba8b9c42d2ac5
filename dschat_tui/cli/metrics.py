"""`dschat metrics`: what a run or a training.log says, in numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dschat_tui.cli.shared import JsonFlag, refuse
from dschat_tui.text import aligned, figure, plain

if TYPE_CHECKING:
    from engine.log.documents import LogDocument
    from engine.log.read import Record

EXTREMES = ("least", "greatest")
COUNTERS = ("epoch", "step", "index", "rank", "ppo_epoch", "batch_size", "total_steps")


def metrics(
    path: Annotated[Path, typer.Argument(help="Folder of a run, of a step, or a training.log.")],
    json_output: JsonFlag = False,
) -> None:
    """Read what a run, or a training.log, says."""
    from engine.log import documents

    log = path / "training.log" if (path / "training.log").is_file() else path
    if log.is_file():
        document = documents.read_document(log)
        typer.echo(documents.to_json(document) if json_output else _log_text(document))
        return
    if not path.is_dir():
        refuse(f"{path} does not exist. Give the folder of a run, or a training.log")
    run = documents.read_run(path)
    if not run["steps"]:
        refuse(f"{path} holds no training.log of a step. Give the folder of a run, or a log")
    parts = (f"{name}\n{_log_text(each)}" for name, each in run["steps"].items())
    typer.echo(documents.to_json(run) if json_output else "\n\n".join(parts))


def _log_text(document: LogDocument) -> str:
    """What the log of a step says: its end, notes, and a table of quantities per kind of line."""
    lines = [f"step {document['step']}, {document['state']}"]
    if document["returncode"] is not None:
        lines[0] += f", exit code {document['returncode']}"
    cause = document["cause"]
    if cause is not None:
        lines += [f"cause: {cause['id']}", f"  {plain(cause['line'])}", f"  {cause['advice']}"]
    events = {name: count for name, count in document["events"].items() if count}
    if events:
        lines.append("events: " + ", ".join(f"{name} {count}" for name, count in events.items()))
    by_kind: dict[str, list[Record]] = {}
    for record in document["records"]:
        if record["kind"] in ("note", "warning"):
            lines.append(f"{record['kind']}: {plain(record['text'])}")
        elif record["kind"] not in ("phase", "finished"):
            by_kind.setdefault(record["kind"], []).append(record)
    for kind, records in by_kind.items():
        rows = _quantities(records)
        if rows:
            lines += ["", aligned([f"{kind} ({len(records)})", "first", "last", *EXTREMES], rows)]
    return "\n".join(lines)


def _quantities(records: list[Record]) -> list[list[str]]:
    """A row per quantity: its first and last value, its least and greatest finite one."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record):
        values = [r[name] for r in records if isinstance(r.get(name), (int, float))]
        if name not in COUNTERS and values:
            finite = [value for value in values if math.isfinite(value)]
            extremes = [min(finite), max(finite)] if finite else [None, None]
            rows.append([name, *(figure(value) for value in [values[0], values[-1], *extremes])])
    return rows
