"""The results of each step, from its metrics.jsonl: the numbers of the summary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from dschat_tui.runs.state import FinalMetrics
from engine.config.steps import BY_NAME

METRICS_FILE = "metrics.jsonl"


def read_records(path: Path) -> Iterator[FinalMetrics]:
    """The whole records of a metrics.jsonl; a line that is still being written is left out."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    yield record
    except FileNotFoundError:
        return


def final_metrics(step: str, step_folder: Path) -> FinalMetrics:
    """The final numbers of a step by name; only those that its metrics.jsonl holds."""
    records = list(read_records(step_folder / METRICS_FILE))
    steps = [record for record in records if record.get("kind") == "metrics"]
    found: FinalMetrics = {"steps": len(steps)}
    if step == "sft":
        evals = [record for record in records if record.get("kind") == "eval"]
        found |= _first_and_last(evals, "ppl", "ppl_before", "ppl_after")
    elif BY_NAME[step].phase == "reward":
        evals = [record for record in records if record.get("kind") == "reward_eval"]
        if evals:
            last = evals[-1]
            found |= {name: last.get(name) for name in ("accuracy", "chosen", "rejected", "pairs")}
            found["margin"] = _difference(last.get("chosen"), last.get("rejected"))
    else:
        found |= _first_and_last(steps, "reward", "reward_first", "reward_last")
        found |= _first_and_last(steps, "kl", "kl_first", "kl_last")
    return {name: value for name, value in found.items() if value is not None}


def was_evaluated(metrics: FinalMetrics) -> bool:
    """Whether a step was evaluated, so that a missing final number could not be measured.

    Steps 1 and 2 are evaluated before they train.
    """
    return bool(metrics.get("steps"))


def _first_and_last(records: list[FinalMetrics], key: str, first: str, last: str) -> FinalMetrics:
    values = [record[key] for record in records if record.get(key) is not None]
    return {first: values[0], last: values[-1]} if values else {}


def _difference(a: float | str | None, b: float | str | None) -> float | None:
    return a - b if isinstance(a, (int, float)) and isinstance(b, (int, float)) else None
