"""Resuming a run that stopped or failed: what may change, what starts over, what is ended."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from dschat_tui.runs import gates, preflight
from dschat_tui.runs.control import supervisor_of
from dschat_tui.runs.fixes import Assignments, fix_for
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.preflight import Change, Refusal, differences
from dschat_tui.runs.processes import end_leftovers
from dschat_tui.runs.state import DONE, FAILED, PENDING, RunState, has_state, new_step_state
from dschat_tui.runs.supervisor import GRACE_SECONDS
from engine.config import layout
from engine.config.loading import (
    ConfigError,
    apply_overrides,
    options,
    read_yaml,
    resolve,
    to_yaml,
)
from engine.config.schema import RunConfig
from engine.config.steps import STEPS, Step
from engine.models.folders import is_complete_model


@dataclass(frozen=True)
class Resumption:
    """A run that may be resumed.

    Attributes:
        steps: those that are left.
        restarted: the step under way that starts over, since its checkpoints do not fit a fix.
        past: why the run continues past gates that it did not reach, by the option of the gate.
    """

    run: RunFolder
    config: RunConfig
    steps: list[Step]
    changes: list[Change]
    restarted: Step | None
    past: dict[str, str]

    @property
    def first(self) -> Step:
        """The first step to run."""
        return self.steps[0]

    @property
    def after(self) -> int | None:
        """The number of optimizer steps in the checkpoint to resume from; None: there is none."""
        checkpoints = self.run.checkpoints(self.first)
        return None if self.restarted or not checkpoints else checkpoints[-1]


def prepare_resume(
    run: RunFolder, assignments: list[str], fix: bool = False, accept: str | None = None
) -> Resumption:
    """Check that a run may be resumed, with `key=value` changes or those that fix its failure.

    Args:
        run: the folder of the run.
        assignments: the changes.
        fix: make those that fix its failure.
        accept: why it continues although it waits at a gate.

    Raises:
        Refusal: with all reasons found.
    """
    try:
        state = run.read_state()
        before = resolve(read_yaml(run.config_file), str(run.config_file))
    except (OSError, ValueError) as error:
        raise Refusal([f"{run.path} cannot be resumed: {error}"]) from error
    if state is None:
        raise Refusal([f"{run.path} cannot be resumed: it holds no run.json"])
    supervisor = supervisor_of(state)
    if supervisor is not None:
        raise Refusal(
            [
                f"{run.path} is running (process {supervisor['pid']}). "
                f"Watch it: dschat runs attach {run.path}"
            ]
        )
    left = [step for step in STEPS if step.name in state["steps"] and not _is_done(run, step)]
    if not left:
        raise Refusal([f"{run.path} has nothing left to do: all its steps are done"])
    fix_values = fixing_change(run, state, before) if fix else {}
    try:
        values = apply_overrides(before.model_dump(mode="json"), assignments)
        values = apply_overrides(
            values, [f"{key}={json.dumps(value)}" for key, value in fix_values.items()]
        )
        config = preflight.with_absolute_paths(resolve(values, "--set"))
    except ConfigError as error:
        raise Refusal([str(error)]) from error
    changes = differences(before, config)
    under_way = left[0] if run.checkpoints(left[0]) else None
    reasons, restarts = _check_changes(changes, left, under_way, set(fix_values))
    past, refused = _pass_gates(run, state, config, left, changes, accept)
    reasons += refused
    reasons += preflight.check_machine_and_rules(config, run.path, left)
    if reasons:
        raise Refusal(reasons)
    return Resumption(run, config, left, changes, under_way if restarts else None, past)


def fixing_change(run: RunFolder, state: RunState, config: RunConfig) -> Assignments:
    """What `--fix` changes for the failure of a run.

    Raises:
        Refusal: it did not fail, or no option fixes the cause.
    """
    for step in STEPS:
        cause = state["steps"][step.name]["cause"] if has_state(state, step.name, FAILED) else None
        if cause is not None:
            change = fix_for(cause["id"], config, step.name)
            if change:
                return change
            raise Refusal(
                [f"--fix: no option fixes {cause['id']} ({cause['line']}). {cause['advice']}"]
            )
    raise Refusal([f"--fix: no step of {run.path} has failed. Leave it out"])


def _is_done(run: RunFolder, step: Step) -> bool:
    """Whether run.json and the model folders agree that a step is done."""
    state = run.read_state()
    config = resolve(read_yaml(run.config_file), str(run.config_file))
    if state is None or not has_state(state, step.name, DONE):
        return False
    return all(
        map(
            is_complete_model,
            run.model_folders(step, config.ema.enabled, config.algorithm.has_critic),
        )
    )


def _check_changes(
    changes: list[Change], left: list[Step], under_way: Step | None, fix_values: set[str]
) -> tuple[list[str], bool]:
    """Why changes are refused, one reason each; and whether the step under way starts over."""
    reasons, restarts = [], False
    to_come = {step.name for step in left}
    fixed_by = {option.key: option.fixed_by for option in options()}
    for change in changes:
        concerned = fixed_by[change.key]
        if concerned is None:
            reasons.append(
                f"{change}: {change.key} affects the whole run, so it cannot change. Start "
                "another run; models.sft and models.trained_reward take over finished models"
            )
        elif concerned and not to_come & set(concerned):
            reasons.append(
                f"{change}: it affects only steps that are done. Start another run with this value"
            )
        elif under_way is not None and under_way.name in concerned:
            if change.key in fix_values:
                restarts = True
                continue
            reasons.append(
                f"{change}: step {under_way.number} is under way, and its checkpoints hold what "
                f"{change.key} made. Go on with the old value, or start another run"
            )
    return reasons, restarts


def _pass_gates(
    run: RunFolder,
    state: RunState,
    config: RunConfig,
    left: list[Step],
    changes: list[Change],
    accept: str | None,
) -> tuple[dict[str, str], list[str]]:
    """Why the run continues past each gate that it waits at, and why it must not."""
    again = {step.name for step in left}
    waiting = [record for record in gates.waiting(state) if record["step"] not in again]
    if accept is not None and not waiting:
        return {}, [f"--accept: {run.path} waits at no gate. Leave it out"]
    if accept is not None and not accept.strip():
        return {}, ["--accept is empty. Give the reason; run.json keeps it"]
    moved = ", ".join(str(change) for change in changes if change.key.startswith("gates."))
    past, refused = {}, []
    for record in waiting:
        metrics = state["steps"][record["step"]]["metrics"]
        missed = {found["gate"] for found in gates.missed(config, record["step"], metrics)}
        if accept is not None:
            past[record["gate"]] = accept.strip()
        elif record["gate"] not in missed or config.gates.action == "warn":
            past[record["gate"]] = f"changed {moved}"
        else:
            refused.append(
                f"{run.path} is paused: {gates.told(record)}. To continue, give a reason: "
                f'dschat runs resume {run.path} --accept "REASON"'
            )
    return past, refused


def apply(resumption: Resumption) -> None:
    """End what is left of the run's processes, and write its folder so that it can be resumed.

    Raises:
        Refusal: a process of the run cannot be ended.
        OSError: the folder cannot be written.
    """
    run = resumption.run
    with run.lock(wait=True):
        state = run.read_state()
        assert state is not None
        survivors = end_leftovers(state, GRACE_SECONDS)
        if survivors:
            raise Refusal(
                [f"processes {survivors} of {run.path} cannot be ended. End them, then try again"]
            )
        if resumption.restarted is not None:
            checkpoints = run.step_folder(resumption.restarted) / layout.CHECKPOINTS
            checkpoints.rename(checkpoints.with_name(f"checkpoints-until-{time.time():.0f}"))
        for step in resumption.steps:
            state["steps"][step.name] = new_step_state(step)
            if not run.checkpoints(step):
                # with a checkpoint the trainer itself forgets the records of steps that it repeats
                for name in ("metrics.jsonl", "rollouts.jsonl"):
                    (run.step_folder(step) / name).unlink(missing_ok=True)
        for record in gates.waiting(state):
            if record["gate"] in resumption.past:
                gates.accept(record, resumption.past[record["gate"]])
        state["changes"].extend(
            {"time": time.time(), "key": c.key, "before": c.before, "after": c.after}
            for c in resumption.changes
        )
        run.write_config(to_yaml(resumption.config))
        state["state"], state["supervisor"], state["stop"] = PENDING, None, None
        run.write_state(state)
