"""What the Start screen does in worker threads: needs, plans, the data, the start of a run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dschat_tui import hangup
from dschat_tui.machine import GIB
from dschat_tui.text import gib

if TYPE_CHECKING:
    from dschat_tui.runs.memory_plan import Report
    from engine.config.rules import ModelFacts
    from engine.config.schema import RunConfig

POLL_SECONDS = 0.05
# a key held down changes options faster than plans can be read
SETTLE_SECONDS = 0.05


class Need(NamedTuple):
    """What a profile needs of this machine and whether it has that, or why that is not known.

    `size` is in GiB, `?` where it is not known; `fits` is None then.
    """

    size: str
    fits: bool | None
    problem: str = ""


class Planned(NamedTuple):
    """The plan of a form, and the commands of its steps. `is_searched`: a fix was looked for."""

    report: Report | None
    problem: str
    facts: ModelFacts
    commands: list[list[str]]
    is_searched: bool


class Started(NamedTuple):
    """The folder of a run that was started, or why it was not."""

    path: Path
    reasons: list[str]


def need(config: RunConfig) -> Need:
    """What a configuration needs of this machine."""
    from dschat_tui.runs import memory_plan

    try:
        report = memory_plan.make(config, None, find_change=False, offline=True)
    except memory_plan.PlanError as error:
        return Need("?", None, str(error))
    return Need(gib(_peak(report)), report.fits)


def _peak(report: Report) -> int:
    plan = report.plan
    return plan.node_host_bytes if plan.device == "cpu" else plan.device_bytes


def planned(config: RunConfig, output: Path, is_searched: bool) -> Planned:
    """The plan of a configuration, what rules must know of its models, and its commands."""
    from dschat_tui.runs import launch, memory_plan, preflight
    from dschat_tui.runs.folder import RunFolder

    report, problem = None, ""
    try:
        report = memory_plan.make(config, None, find_change=is_searched, offline=True)
    except memory_plan.PlanError as error:
        problem = str(error)
    port = config.launch.master_port or launch.free_port()
    run = RunFolder(output)
    try:
        steps = preflight.wanted_steps(config, None)
        commands = [launch.step_command(config, run, step, port) for step in steps]
    except FileNotFoundError:
        # preflight says so when it is started
        commands = []
    return Planned(report, problem, preflight.model_facts(config), commands, is_searched)


def effect(config: RunConfig, key: str, value: Any) -> str:
    """What another value of an option does to the peak of memory."""
    from dschat_tui.dashboard.form import value_text, with_value
    from dschat_tui.runs import memory_plan

    try:
        before, after = (
            memory_plan.make(c, None, find_change=False, offline=True)
            for c in (config, with_value(config, key, value))
        )
    except memory_plan.PlanError:
        return ""
    change = (_peak(after) - _peak(before)) / GIB
    text = f"{change:+.2g} GiB" if abs(change) >= 0.0005 else "peak unchanged"
    return f"{value_text(value)}: {text}, {gib(_peak(after))} GiB in all."


def start(config: RunConfig, profile: str, output: Path) -> Started:
    """Check a run, make its folder and start its supervisor, as `dschat run` does."""
    from dschat_tui.runs import supervisor
    from dschat_tui.runs.preflight import Refusal, prepare

    try:
        plan = prepare(config, output, None)
        plan.create(profile)
        supervisor.start(plan.run)
    except Refusal as refusal:
        return Started(output, refusal.reasons)
    except OSError as error:
        return Started(output, [f"cannot write the run's folder {output}: {error.strerror}"])
    return Started(plan.run.path, [])


def output_of(command: list[str], is_cancelled: Callable[[], bool]) -> list[str]:
    """The lines that a command writes; it is killed once it is cancelled."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={name: value for name, value in os.environ.items() if not name.startswith("TEXTUAL")},
        start_new_session=True,
    )
    hangup.dependents.add(process.pid)
    while True:
        try:
            # what was read before a timeout is kept
            lines = process.communicate(timeout=POLL_SECONDS)[0].splitlines()
        except subprocess.TimeoutExpired:
            if is_cancelled():
                os.killpg(process.pid, signal.SIGKILL)
            continue
        hangup.dependents.discard(process.pid)
        return lines
