"""What is known of a sweep's cells before anything starts: pruned, refused, or to be run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dschat_tui.runs import memory_plan, preflight
from dschat_tui.runs.memory_plan import PlanError
from dschat_tui.runs.preflight import Refusal
from dschat_tui.runs.state import FAILED, PENDING
from dschat_tui.sweep.matrix import Sweep
from dschat_tui.sweep.state import PRUNED, Outcome
from dschat_tui.text import gib
from engine.config import layout
from engine.config.rules import check
from engine.config.schema import RunConfig
from engine.log.causes import Cause

REFUSED_ADVICE = "Change this value of the axis, or what it needs; then: --retry failed."


def examine(sweep: Sweep, output: Path) -> dict[str, Outcome]:
    """State, reason and cause of each cell by its name, before it runs.

    A combination that a rule forbids or that does not fit is pruned. What the checks before a run
    refuse for another reason, such as a file that is missing, has failed.

    Raises:
        Refusal: none of the cells that are not pruned can run.
    """
    unprepared: dict[str, Refusal] = {}
    for preparation in sweep.preparations:
        try:
            preflight.prepare(preparation.config, output, list(preparation.steps))
        except Refusal as error:
            unprepared[preparation.name] = error
    outcomes: dict[str, Outcome] = {}
    refusal: Refusal | None = None
    for cell in sweep.cells:
        facts = preflight.model_facts(cell.config)
        reasons = [str(violation) for violation in check(cell.config, facts)]
        reasons = reasons or shortages(cell.config, sweep.steps)
        if reasons:
            outcomes[cell.name] = outcome(PRUNED, "; ".join(reasons))
            continue
        before = sweep.preparation_of.get(cell.name)
        steps_before = next((p.steps for p in sweep.preparations if p.name == before), ())
        try:
            if before in unprepared:
                raise unprepared[before]
            preflight.prepare(cell.config, output, sorted({*steps_before, *sweep.steps}))
        except Refusal as error:
            refusal = error
            outcomes[cell.name] = refused(error.reasons)
        else:
            outcomes[cell.name] = outcome(PENDING, "")
    if refusal is not None and not any(o["state"] == PENDING for o in outcomes.values()):
        raise refusal
    return outcomes


def outcome(state: str, reason: str, cause: Cause | None = None) -> Outcome:
    """The outcome of a cell, for its record."""
    return {"state": state, "reason": reason, "cause": cause}


def refused(reasons: Sequence[str]) -> Outcome:
    """The outcome of a cell that the checks before a run refuse."""
    cause: Cause = {"id": "refused", "line": "; ".join(reasons), "advice": REFUSED_ADVICE}
    return outcome(FAILED, f"refused: {cause['line']}", cause)


def shortages(config: RunConfig, steps: Sequence[int]) -> list[str]:
    """For each step that does not fit how much it takes; nothing where that is not known."""
    try:
        report = memory_plan.make(config, None, find_change=False, offline=True)
    except PlanError:
        return []  # a model whose shape is not known here
    plan, on_device, on_host = report.plan, report.memory_bytes, report.host_memory_bytes
    if plan.device == "cpu":
        on_host = on_device
    found = []
    for step in plan.steps:
        number = layout.BY_NAME[step.step].number
        if number not in steps:
            continue
        if plan.device == "cuda" and step.device_bytes > on_device:
            found.append(
                f"does not fit: step {number} takes {gib(step.device_bytes)} GiB of "
                f"{gib(on_device)} GiB per device"
            )
        wanted = max(step.node_phases(plan.ranks_per_node).values())
        if on_host is not None and wanted > on_host:
            found.append(
                f"does not fit: step {number} takes {gib(wanted)} GiB of {gib(on_host)} GiB "
                "host memory"
            )
    return found
