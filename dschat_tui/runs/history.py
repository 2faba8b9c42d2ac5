"""The runs of a folder for a list, and the differences between two or more of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat_tui.logs.quantities import NOT_MEASURED
from dschat_tui.runs import control, gates
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.results import was_evaluated
from dschat_tui.runs.state import FAILED, RunState, steps_of
from dschat_tui.text import figure
from engine.config.loading import ConfigError, read_yaml

ABSENT = "-"


@dataclass(frozen=True)
class PastRun:
    """One run: its state, the state of each of its steps, its results."""

    path: Path
    standing: str
    steps: tuple[str, ...]
    updated: float | None
    result: str
    described: control.Described
    is_stopping: bool = False

    @property
    def goes_on(self) -> bool:
        """Whether its supervisor is alive or about to be."""
        return self.standing in ("running", "pending")


def history(folder: Path) -> list[PastRun]:
    """The runs in a folder, the one that changed last first."""
    return [_past(run) for run in control.find_runs([folder])]


def _past(run: RunFolder) -> PastRun:
    described = control.describe(run)
    state = described["state"]
    return PastRun(
        path=run.path,
        standing=described["standing"],
        steps=tuple(record["state"] for record in state["steps"].values()),
        updated=state["updated"] or None,
        result=described["problem"] or _result(state),
        described=described,
        is_stopping=state["stop"] is not None,
    )


def _result(state: RunState) -> str:
    parts = [f"waits: {gates.told(record)}" for record in gates.waiting(state)]
    for step, record in steps_of(state):
        title, metric = step.headline
        metrics = record["metrics"]
        if metrics.get(metric) is not None:
            parts.append(f"{title} {figure(metrics[metric])}")
        elif was_evaluated(metrics):
            parts.append(f"{title} {NOT_MEASURED}")
        if record["state"] == FAILED and record["cause"]:
            parts.append(f"{record['cause']['id']}: {record['cause']['line']}")
    return ", ".join(parts)


def differing_options(configs: Sequence[Mapping[str, object]]) -> list[tuple[str, list[str]]]:
    """Options whose values differ between configurations, each with its value in every one."""
    return _differing([dict(_leaves(config)) for config in configs])


def final_metrics(states: Sequence[RunState]) -> list[tuple[str, list[str]]]:
    """The final metrics of all steps, each with its value in every run."""
    tables_of_runs = [
        {
            f"{step.title}: {name.replace('_', ' ')}": figure(value)
            for step, record in steps_of(state)
            for name, value in record["metrics"].items()
        }
        for state in states
    ]
    return [
        (name, [values.get(name, ABSENT) for values in tables_of_runs])
        for name in dict.fromkeys(name for values in tables_of_runs for name in values)
    ]


def compare(paths: Sequence[Path]) -> tuple[list[tuple[str, list[str]]], ...]:
    """Final metrics of runs, and the options in which they differ.

    Raises:
        ConfigError: a run.yaml cannot be read.
        OSError, ValueError: a run.json cannot be read.
    """
    runs = [RunFolder(path) for path in paths]
    states = [run.read_state() for run in runs]
    missing = [run.path for run, state in zip(runs, states, strict=True) if state is None]
    if missing:
        raise ConfigError(f"{missing[0]} is gone")
    configs = [read_yaml(run.config_file) for run in runs]
    return final_metrics([state for state in states if state]), differing_options(configs)


def _differing(flat: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    found = []
    for key in dict.fromkeys(key for values in flat for key in values):
        values = [options.get(key, ABSENT) for options in flat]
        if len(set(values)) > 1:
            found.append((key, values))
    return found


def _leaves(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", "empty" if value is None else str(value)
