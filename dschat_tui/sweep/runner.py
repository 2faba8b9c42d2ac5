"""Runs the cells of a sweep, each as a run with a supervisor of its own, and keeps sweep.json."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from dschat_tui.runs import control, launch, preflight, supervisor
from dschat_tui.runs.failures import last_line
from dschat_tui.runs.folder import RunFolder, RunIsHeld
from dschat_tui.runs.identity import own_identity
from dschat_tui.runs.processes import end_leftovers
from dschat_tui.runs.state import (
    DONE,
    FAILED,
    PENDING,
    RUNNING,
    STOPPED,
    RunState,
    unknown_run_state,
)
from dschat_tui.runs.watch import Watch
from dschat_tui.sweep import report
from dschat_tui.sweep.checks import outcome, refused
from dschat_tui.sweep.matrix import Sweep, value_text
from dschat_tui.sweep.results import (
    QUANTITIES,
    WARMUP_STEPS,
    MemorySampler,
    gpu_numbers,
    measure,
)
from dschat_tui.sweep.state import (
    OOM,
    TIMEOUT,
    UNSUCCESSFUL,
    VERSION,
    Outcome,
    RunRecord,
    RunTimes,
    SweepError,
    SweepFolder,
    SweepState,
    add_measured,
    counts,
    forget_measured,
)
from dschat_tui.text import plain
from engine.config.loading import resolve, to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import Step
from engine.log.causes import Cause
from engine.models.folders import is_complete_model

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_SECONDS = 0.2
SAMPLE_SECONDS = 1.0
OUT_OF_MEMORY = "out_of_memory"

Record = TypeVar("Record", bound=RunRecord)


Kind = Literal["preparation", "cell"]
Event = Literal["started", "ended"]


class Display(Protocol):
    """Shows a sweep while it runs."""

    def report(self, event: Event, kind: Kind, record: RunRecord) -> None:
        """A run of the sweep started or ended."""

    def tick(self, runner: Runner) -> None:
        """Some time has passed."""


@dataclass
class Task:
    """A cell, or a preparation, that runs now."""

    kind: Kind
    record: RunRecord
    run: RunFolder
    steps: Sequence[Step]
    ranks: int
    slot: int
    watch: Watch
    sampler: MemorySampler | None
    is_late: bool = False

    def ask_to_end(self) -> None:
        """End its processes, without a checkpoint; asked again, without the grace."""
        with suppress(control.NotRunning):  # it has ended meanwhile
            control.end_now(self.run, self.watch.supervisor)


@dataclass
class Runner:
    """Works on a sweep until its last cell, or a signal; the state is on disk after each change.

    Attributes:
        environments: one for each run at the same time: what it adds to the environment.
        time_limit: most seconds per cell.
    """

    sweep: Sweep
    folder: SweepFolder
    state: SweepState
    display: Display
    environments: Sequence[Mapping[str, str]]
    time_limit: float | None = None
    tasks: list[Task] = field(default_factory=list)
    interrupts: int = 0
    _asked: int = 0
    _next_sample: float = 0.0

    @property
    def is_stopping(self) -> bool:
        """Whether a person asked the sweep to stop."""
        return self.interrupts > 0

    def run(self) -> str:
        """Run what is pending: the preparations that cells need, then the cells."""
        began = time.monotonic()
        before = self.state["seconds"]

        def note(number: int, frame: object) -> None:
            self.interrupts += 1

        handlers = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            self.state["state"], self.state["process"] = RUNNING, own_identity()
            self._look_for_models()
            self._save()
            needed = {cell["preparation"] for cell in _waiting(self.state["cells"])}
            preparations = _waiting(self.state["preparations"])
            self._work("preparation", [p for p in preparations if p["name"] in needed])
            self._pass_on_failures()
            self._work("cell", _waiting(self.state["cells"]))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.state["state"], self.state["process"] = self._outcome(), None
            self.state["seconds"] = before + time.monotonic() - began
            self._save()
            report.write(self.folder, self.state)
        return self.state["state"]

    def _look_for_models(self) -> None:
        """A preparation whose models are gone runs again."""
        for record in self.state["preparations"]:
            run = RunFolder(self.folder.path / record["name"])
            models = [
                folder
                for step in preflight.wanted_steps(self.sweep.config, record["steps"])
                for folder in run.model_folders(step, ema=False)
            ]
            if record["state"] == DONE and not all(map(is_complete_model, models)):
                _settle(record, outcome(PENDING, ""))

    def _outcome(self) -> str:
        there = set(counts(self.state))
        if there & {PENDING, RUNNING}:
            return STOPPED
        return FAILED if there & set(UNSUCCESSFUL) else DONE

    def _pass_on_failures(self) -> None:
        """A cell whose preparation failed has failed."""
        failed = {p["name"]: p for p in self.state["preparations"] if p["state"] in UNSUCCESSFUL}
        for cell in _waiting(self.state["cells"]):
            preparation = failed.get(cell["preparation"] or "")
            if preparation is not None:
                reason = f"{preparation['name']} {preparation['state']}: {preparation['reason']}"
                _settle(cell, outcome(FAILED, reason, preparation["cause"]))
                self.display.report("ended", "cell", cell)
        self._save()

    def _work(self, kind: Kind, queue: Sequence[RunRecord]) -> None:
        """Run what these records describe, in order, as many at once as there are environments."""
        queue = list(queue)
        while (queue and not self.is_stopping) or self.tasks:
            free = set(range(len(self.environments))) - {task.slot for task in self.tasks}
            while queue and free and not self.is_stopping:
                self._begin(kind, queue.pop(0), free.pop())
                free = set(range(len(self.environments))) - {task.slot for task in self.tasks}
            self._look()
            self.display.tick(self)
            if self.tasks:
                time.sleep(POLL_SECONDS)

    def _begin(self, kind: Kind, record: RunRecord, slot: int) -> None:
        config = self._config_of(kind, record)
        run = RunFolder(self.folder.path / record["name"])
        steps = preflight.wanted_steps(config, record["steps"])
        ranks = config.launch.num_accelerators
        environment = self.environments[slot]
        try:
            process, pid = self._start(record, run, config, steps, environment)
        except (OSError, SweepError, RunIsHeld, control.NotDeletable) as error:
            _settle(record, refused([f"{run.path} cannot be started: {error}"]))
            self._save()
            self.display.report("ended", kind, record)
            return
        if process is not None or record["started"] is None:
            record["started"] = time.time()
        _settle(record, outcome(RUNNING, ""))
        record["path"] = str(run.path)
        self._save()
        sampler = None if pid is None else MemorySampler(pid, _devices(environment, ranks))
        watch = Watch(run, process)
        self.tasks.append(Task(kind, record, run, steps, ranks, slot, watch, sampler))
        self.display.report("started", kind, record)

    def _start(
        self,
        record: RunRecord,
        run: RunFolder,
        config: RunConfig,
        steps: Sequence[Step],
        environment: Mapping[str, str],
    ) -> tuple[subprocess.Popen[bytes] | None, int | None]:
        """The supervisor of a new run and its pid; of one that is running already, its pid alone.

        A sweep that was killed may have left a run that is running, or that has ended since.
        """
        try:
            state = run.read_state()
        except ValueError:
            state = unknown_run_state()
        alive = control.supervisor_of(state)
        if alive is not None:
            return None, alive["pid"]
        if state is not None:
            if record["state"] == RUNNING and state["state"] in (DONE, FAILED):
                return None, None
            _clear(run, state)
        forget_measured(record, [quantity.key for quantity in QUANTITIES])
        _forget_times(record)
        run.create(to_yaml(config), Path(self.sweep.profile).stem, list(steps))
        _link(run.path / "training.log", Path(steps[-1].folder) / "training.log")
        process = supervisor.start(run, {**os.environ, **environment})
        return process, process.pid

    def _config_of(self, kind: Kind, record: RunRecord) -> RunConfig:
        name = record["name"]
        if kind == "preparation":
            config = next(p.config for p in self.sweep.preparations if p.name == name)
            return preflight.with_absolute_paths(config)
        cell = next(cell for cell in self.sweep.cells if cell.name == name)
        values = cell.config.model_dump(mode="json")
        for preparation in self.sweep.preparations:
            if preparation.name == self.sweep.preparation_of.get(name):
                for key, folder in preparation.models(self.folder.path).items():
                    section, option = key.split(".")
                    values[section][option] = folder
        return preflight.with_absolute_paths(resolve(values, name))

    def _look(self) -> None:
        """Look at the runs: sample memory, note what has ended, end what takes too long."""
        is_due = time.monotonic() >= self._next_sample
        if is_due:
            self._next_sample = time.monotonic() + SAMPLE_SECONDS
        asks, self._asked = self.interrupts - self._asked, self.interrupts
        for task in list(self.tasks):
            if is_due and task.sampler is not None:
                task.sampler.look()
            task.watch.look()
            if task.watch.has_ended():
                self.tasks.remove(task)
                self._judge(task)
                continue
            for _ in range(asks):
                task.ask_to_end()
            limit = self.time_limit if task.kind == "cell" else None
            took = time.time() - (task.record["started"] or time.time())
            if limit is not None and took > limit and not task.is_late:
                task.is_late = True
                task.ask_to_end()

    def _judge(self, task: Task) -> None:
        """Record the outcome of a run that has ended."""
        record = task.record
        state = task.run.read_state() or unknown_run_state()
        found = _outcome_of(task, state, self.time_limit)
        if self.is_stopping and not task.is_late and state["state"] not in (DONE, FAILED):
            # stopped by the user, so it runs again
            found = outcome(PENDING, "")
        ended = max((s["ended"] or 0.0 for s in state["steps"].values()), default=0.0)
        _settle(record, found)
        record["ended"] = ended = ended or time.time()
        record["seconds"] = ended - (record["started"] or ended)
        if found["state"] == DONE:
            last = task.steps[-1]
            add_measured(record, measure(task.run.training_log(last), last.name, task.ranks))
        if task.sampler is not None and found["state"] != PENDING:
            add_measured(record, task.sampler.peaks())
        if found["state"] == PENDING:
            _forget_times(record)
        self._save()
        if task.kind == "cell":
            report.write(self.folder, self.state)
        self.display.report("ended", task.kind, record)

    def _save(self) -> None:
        self.folder.write(self.state)


def _waiting(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record["state"] in (PENDING, RUNNING)]


def _settle(record: RunRecord, found: Outcome) -> None:
    """Write the outcome of a run into its record."""
    record["state"], record["reason"], record["cause"] = (
        found["state"],
        found["reason"],
        found["cause"],
    )


def _forget_times(record: RunRecord) -> None:
    record["started"] = record["ended"] = record["seconds"] = None


def _outcome_of(task: Task, state: RunState, time_limit: float | None) -> Outcome:
    standing = state["state"]
    if standing == DONE:
        return outcome(DONE, "")
    if task.is_late:
        return outcome(TIMEOUT, f"stopped after its time limit of {time_limit:g} s")
    if standing == FAILED:
        found = next(s["cause"] for s in state["steps"].values() if s["cause"] is not None)
        cause: Cause = {
            "id": plain(found["id"]),
            "line": plain(found["line"]),
            "advice": plain(found["advice"]),
        }
        name = OOM if cause["id"] == OUT_OF_MEMORY else FAILED
        return outcome(name, f"{cause['id']}: {cause['line']}", cause)
    if standing == STOPPED:
        cause = {
            "id": "stopped",
            "line": "another command stopped this run",
            "advice": "Run it again: --retry failed.",
        }
        return outcome(FAILED, f"stopped: {cause['line']}", cause)
    log = task.run.supervisor_log
    cause = {
        "id": "supervisor_lost",
        "line": plain(last_line(log)) if log.is_file() else "",
        "advice": f"Read {log}.",
    }
    return outcome(FAILED, f"supervisor_lost: {cause['line']}", cause)


def _clear(run: RunFolder, state: RunState) -> None:
    """Remove a run that is to start over, and end what may be left of its processes.

    Raises:
        SweepError: processes of the run cannot be ended.
    """
    # a guard may be ending what a killed supervisor left
    with run.lock(wait=True):
        survivors = end_leftovers(state, supervisor.GRACE_SECONDS)
    if survivors:
        raise SweepError(f"its processes {survivors} cannot be ended; end them, then try again")
    control.delete(run)


def _link(link: Path, target: Path) -> None:
    """Link the log of a cell where the original's sweeps had it."""
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def _devices(environment: Mapping[str, str], ranks: int) -> list[str]:
    """The GPUs that a run may use."""
    visible = launch.visible_gpus({**os.environ, **environment})
    return (gpu_numbers() if visible is None else visible)[:ranks]


def new_state(sweep: Sweep, outcomes: Mapping[str, Outcome]) -> SweepState:
    """The content of sweep.json before the first cell."""
    return {
        "version": VERSION,
        "profile": sweep.profile,
        "steps": list(sweep.steps),
        "axes": {axis.name: list(axis.values) for axis in sweep.axes},
        "warmup_steps": WARMUP_STEPS,
        "created": time.time(),
        "state": PENDING,
        "process": None,
        "seconds": 0.0,
        "preparations": [
            {**_new_run(preparation.name, preparation.steps), **outcome(PENDING, "")}
            for preparation in sweep.preparations
        ],
        "cells": [
            {
                **_new_run(cell.name, sweep.steps),
                "values": cell.values,
                "assignments": cell.assignments,
                "preparation": sweep.preparation_of.get(cell.name),
                **outcomes[cell.name],
            }
            for cell in sweep.cells
        ],
        "config": sweep.config.model_dump(mode="json"),
    }


def _new_run(name: str, steps: Sequence[int]) -> RunTimes:
    return {
        "name": name,
        "steps": list(steps),
        "path": None,
        "started": None,
        "ended": None,
        "seconds": None,
    }


def resumed_state(
    state: SweepState | None, sweep: Sweep, outcomes: Mapping[str, Outcome], retry: bool
) -> SweepState:
    """The state of a resumed sweep: what is done stays, the rest is as it was examined now.

    Args:
        state: of sweep.json, or None where there is none yet.
        sweep: as it is asked for now.
        outcomes: of its cells, as `examine` gives them.
        retry: run again what was not successful.

    Raises:
        SweepError: sweep.json is of another sweep.
    """
    fresh = new_state(sweep, outcomes)
    if state is None:
        return fresh
    differing = [] if state["steps"] == fresh["steps"] else ["--steps"]
    if _axes_as_text(state["axes"]) != _axes_as_text(fresh["axes"]):
        differing.append("--axis")
    before = resolve(state["config"], "sweep.json")
    differing += [change.key for change in preflight.differences(before, sweep.config)]
    if differing:
        raise SweepError(
            f"--output holds another sweep; different: {', '.join(differing)}. Choose another "
            "--output, or give what that sweep was started with"
        )
    kept = {DONE, RUNNING} if retry else {DONE, RUNNING, *UNSUCCESSFUL}
    return {
        **fresh,
        "preparations": _kept(state["preparations"], fresh["preparations"], kept),
        "cells": _kept(state["cells"], fresh["cells"], kept),
        "created": state["created"],
        "seconds": state["seconds"],
    }


def _kept(earlier: Sequence[Record], fresh: Sequence[Record], states: set[str]) -> list[Record]:
    """Fresh records, each replaced by the earlier one where that is in one of `states`."""
    by_name = {record["name"]: record for record in earlier if record["state"] in states}
    return [by_name.get(record["name"], record) for record in fresh]


def _axes_as_text(axes: Mapping[str, Sequence[object]]) -> list[tuple[str, list[str]]]:
    return [(name, [value_text(value) for value in values]) for name, values in axes.items()]


def to_run(state: SweepState) -> int:
    """How many cells are left to run."""
    return sum(cell["state"] in (PENDING, RUNNING) for cell in state["cells"])


def share_machine(sweep: Sweep, parallel: int) -> list[dict[str, str]]:
    """What each of the concurrent runs gets in its environment: its GPUs, or its cores.

    Raises:
        SweepError: there are too few devices, or the runs would share one port.
    """
    if parallel == 1:
        return [{}]
    configs = [cell.config for cell in sweep.cells]
    ranks = max(config.launch.num_accelerators for config in configs)
    if any(config.launch.deployment == "multi_node" for config in configs):
        raise SweepError("--parallel divides the devices of one node; multi_node runs take all")
    if any(config.launch.master_port for config in configs):
        raise SweepError(
            "--parallel runs would share one port: set launch.master_port=null, so that each takes "
            "a free one"
        )
    visible = launch.visible_gpus(os.environ)
    gpus = gpu_numbers() if visible is None else visible
    if gpus and len(gpus) < parallel * ranks:
        raise SweepError(
            f"--parallel {parallel} runs of {ranks} accelerators each take {parallel * ranks}; "
            f"there are {len(gpus)}. Fix: --parallel {max(1, len(gpus) // ranks)}"
        )
    threads = str(max(1, launch.usable_cores() // (parallel * ranks)))
    shares = []
    for slot in range(parallel):
        share = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)}
        if gpus:
            share["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot * ranks : (slot + 1) * ranks])
        shares.append(share)
    return shares
