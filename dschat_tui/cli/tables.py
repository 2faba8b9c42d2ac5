"""Tables of results as plain, aligned text, the same on a terminal and in a pipe."""

from __future__ import annotations

import math
import time
from typing import Any

from dschat_tui.runs import gates
from dschat_tui.runs.control import Described
from dschat_tui.runs.results import summary_text
from dschat_tui.runs.state import RunState, steps_of
from dschat_tui.text import clean, duration
from engine.config.steps import STEPS

EXTREMES = ("least", "greatest")
COUNTERS = ("epoch", "step", "index", "rank", "ppo_epoch", "batch_size", "total_steps")


def plain(text: str) -> str:
    """Text from a log or a model, of any number of lines, each made harmless by `clean`."""
    return "\n".join(clean(line) for line in text.split("\n"))


def aligned(header: list[str], rows: list[list[str]]) -> str:
    """Columns padded to their widest cell, with a rule under the header."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def summary(state: RunState) -> str:
    """What each step of a run came to, and the gates that it missed, from its run.json."""
    rows = []
    for step, record in steps_of(state):
        seconds = (record["ended"] or 0) - (record["started"] or 0)
        rows.append(
            [
                f"{step.number} {step.title}",
                record["state"],
                duration(seconds) if record["ended"] else "",
                summary_text(step.name, record["metrics"]),
            ]
        )
    missed = [f"gate: {plain(gates.told_whole(record))}" for record in gates.known(state)]
    return "\n".join([aligned(["step", "state", "time", "result"], rows), *missed])


def runs(described: list[Described]) -> str:
    """Runs, a line each: name, state, steps, when it changed, where."""
    rows = []
    for item in described:
        state = item["state"]
        updated = state["updated"]
        rows.append(
            [
                plain(item["name"]),
                item["standing"],
                " ".join(record["state"] for record in state["steps"].values()),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(updated)) if updated else "",
                plain(item["path"]),
            ]
        )
    return aligned(["run", "state", "steps", "changed", "folder"], rows)


def run(described: Described) -> str:
    """One run: its steps, checkpoints, cause of failure, changes, and what to do next."""
    state, path = described["state"], plain(described["path"])
    lines = [f"{path}: {described['standing']}"]
    if described["problem"]:
        return "\n".join([*lines, plain(described["problem"])])
    lines += [summary(state)]
    for step in STEPS:
        found = described["checkpoints"].get(step.name)
        if found:
            told = ", ".join(str(number) for number in found)
            lines.append(f"checkpoints of step {step.number} after: {told}")
        cause = state["steps"][step.name]["cause"] if step.name in state["steps"] else None
        if cause:
            lines += [f"cause: {cause['id']}", f"  {plain(cause['line'])}", f"  {cause['advice']}"]
    lines += [
        f"changed on resuming: {plain(str(c['key']))}: {c['before']} -> {c['after']}"
        for c in state["changes"]
    ]
    if described["standing"] == "paused":
        lines.append(f'go on regardless: dschat runs resume {path} --accept "REASON"')
    elif described["standing"] in ("failed", "stopped", "lost"):
        lines.append(f"go on: dschat run --resume {path}")
    elif described["standing"] == "running":
        lines.append(f"see it: dschat runs attach {path}")
    return "\n".join(lines)


def log_document(document: dict[str, Any]) -> str:
    """What the log of a step, or of each step of a run, says."""
    if "steps" in document:
        parts = [f"{name}\n{log_document(part)}" for name, part in document["steps"].items()]
        return "\n\n".join(parts)
    lines = [f"step {document['step']}, {document['state']}"]
    if document["returncode"] is not None:
        lines[0] += f", exit code {document['returncode']}"
    cause = document["cause"]
    if cause is not None:
        lines += [f"cause: {cause['id']}", f"  {plain(cause['line'])}", f"  {cause['advice']}"]
    events = {name: count for name, count in document["events"].items() if count}
    if events:
        lines.append("events: " + ", ".join(f"{name} {count}" for name, count in events.items()))
    by_kind: dict[str, list[dict[str, Any]]] = {}
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


def _quantities(records: list[dict[str, Any]]) -> list[list[str]]:
    """A row a quantity: its first and last value, its least and greatest finite one."""
    rows = []
    for name in dict.fromkeys(name for record in records for name in record):
        values = [r[name] for r in records if isinstance(r.get(name), (int, float))]
        if name not in COUNTERS and values:
            finite = [value for value in values if math.isfinite(value)]
            extremes = [min(finite), max(finite)] if finite else [None, None]
            rows.append([name, *(_cell(value) for value in [values[0], values[-1], *extremes])])
    return rows


def evaluation(document: dict[str, Any]) -> str:
    """Models side by side on held-out prompts, and the accuracy of what rates answers."""
    names = ("perplexity", "reward_mean", "reward_std", "exact_match", "preferred_style", "kl")
    rows = [
        [model, *(_cell(values.get(name)) for name in names)]
        for model, values in document["models"].items()
    ]
    lines = [f"{document['prompts']} held-out prompts", aligned(["model", *names], rows)]
    for name in ("reward_model", "implicit_rewards"):
        rated = document.get(name)
        if rated:
            lines.append(
                f"{name.replace('_', ' ')}: accuracy {_cell(rated['accuracy'])}, margin "
                f"{_cell(rated['margin'])} on {rated['pairs']} pairs"
            )
            lines += [f"  {kind}: {_cell(share)}" for kind, share in rated.get("kinds", {}).items()]
    for sample in document.get("answers", []):
        lines += ["", _one_line(sample["prompt"])]
        answers = {name: text for name, text in sample.items() if name != "prompt"}
        width = max(len(name) for name in answers)
        lines += [f"  {name:<{width}}  {_one_line(text)}" for name, text in answers.items()]
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return " ".join(plain(text.replace("\n", " ")).split())


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
