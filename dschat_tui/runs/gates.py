"""Gates between the steps: what a finished step must have reached for the next to begin.

run.json has a record of every gate that was not reached, under `gates`: the option, the step, the
reading, the threshold, the action (pause or warn), when, and why the run continued anyway
(`accepted`).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from dschat_tui.runs.state import DONE, FinalMetrics, GateRecord, RunState, has_state
from engine.config.loading import get_value
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME, StepName


@dataclass(frozen=True)
class Gate:
    """A threshold of the configuration on one of the final metrics of a step."""

    key: str
    step: StepName
    metric: str
    title: str
    is_upper: bool


GATES = (
    Gate("gates.sft_perplexity", "sft", "ppl_after", "perplexity", True),
    Gate("gates.reward_accuracy", "reward", "accuracy", "accuracy", False),
    Gate("gates.reward_margin", "reward", "margin", "margin", False),
)
_BY_KEY = {gate.key: gate for gate in GATES}


def missed(config: RunConfig, step: str, metrics: FinalMetrics) -> list[GateRecord]:
    """Records of the gates that a step's final metrics, or a lack of them, do not reach."""
    found: list[GateRecord] = []
    for gate in GATES:
        threshold = get_value(config, gate.key)
        if gate.step != step or threshold is None:
            continue
        reading = metrics.get(gate.metric)
        if not _reaches(reading, threshold, gate.is_upper):
            found.append(
                {
                    "gate": gate.key,
                    "step": step,
                    "reading": reading,
                    "threshold": threshold,
                    "action": config.gates.action,
                    "time": time.time(),
                    "accepted": None,
                }
            )
    return found


def _reaches(reading: float | str | None, threshold: float, is_upper: bool) -> bool:
    # metrics have NaN as text
    if not isinstance(reading, (int, float)):
        return False
    return reading <= threshold if is_upper else reading >= threshold


def known(state: RunState) -> list[GateRecord]:
    """The gates that a run missed, without those that this version does not have."""
    return [record for record in state["gates"] if record["gate"] in _BY_KEY]


def waiting(state: RunState) -> list[GateRecord]:
    """The gates of a run's finished steps that wait for a reason to continue."""
    return [
        record
        for record in known(state)
        if record["action"] == "pause"
        and record["accepted"] is None
        and has_state(state, record["step"], DONE)
    ]


def accept(record: GateRecord, reason: str) -> None:
    """Record that the run continues past a gate."""
    record["accepted"] = {"time": time.time(), "reason": reason}


def told(record: GateRecord) -> str:
    """What a gate's record says, as one line of text."""
    gate = _BY_KEY[record["gate"]]
    step = BY_NAME[record["step"]]
    head, reading = f"step {step.number} ({step.title}): {gate.title}", record["reading"]
    if not isinstance(reading, (int, float)) or math.isnan(reading):
        found = "was not measured" if reading is None else f"is {reading}"
        return f"{head} {found}, so {gate.key} is not reached"
    side = "above" if gate.is_upper else "below"
    return f"{head} {reading:.4g} is {side} {record['threshold']:g} ({gate.key})"


def told_whole(record: GateRecord) -> str:
    """The same, with the reason for which the run continued."""
    if record["accepted"] is not None:
        return f"{told(record)}; continued: {record['accepted']['reason']}"
    return told(record)
