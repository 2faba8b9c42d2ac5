"""The process that owns a run: `python -m dschat_tui.runs.supervisor RUN`.

It launches the steps one after another, each in a process group of its own, keeps run.json, and
leaves no process behind. The file stop-request asks it to stop with a checkpoint; SIGTERM without
one; a second SIGTERM skips the grace.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from dschat_tui.runs import gates, launch
from dschat_tui.runs.failures import find_cause
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.guard import start_guard
from dschat_tui.runs.identity import own_identity, process_identity
from dschat_tui.runs.processes import RUN_MARK
from dschat_tui.runs.results import final_metrics
from dschat_tui.runs.state import (
    DONE,
    FAILED,
    PAUSED,
    PENDING,
    RUNNING,
    STOPPED,
    RunState,
    StepState,
)
from engine.config.loading import load_config
from engine.config.schema import RunConfig
from engine.config.steps import STEPS, Step
from engine.log.causes import Cause
from engine.models.folders import is_complete_model

GRACE_SECONDS = 15.0
SAVE_SECONDS = 300.0
HEARTBEAT_SECONDS = 5.0
POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36


def start(run: RunFolder, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the supervisor of a created run in a session of its own and return at once.

    `environment` is that of the run's processes; None: this process's own.
    """
    # a request that was made before this start does not count
    run.stop_request.unlink(missing_ok=True)
    with run.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "dschat_tui.runs.supervisor", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # `python -m` searches the working folder first, and the run's holds no modules
            cwd=run.path,
            env=environment,
            start_new_session=True,
        )


class Supervisor:
    """One run from its first pending step to the end, a failure, a gate, or a request to stop."""

    def __init__(
        self,
        run: RunFolder,
        command_of: Callable[[Step], list[str]],
        environment: dict[str, str],
        config: RunConfig,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.run_folder = run
        self.command_of = command_of
        self.environment = environment
        self.config = config
        self.grace_seconds = grace_seconds
        self.stop_requests = 0
        self.save_until: float | None = None
        state = run.read_state()
        if state is None:
            raise FileNotFoundError(f"{run.state_file} does not exist; `dschat run` makes it")
        self.state: RunState = state
        if state["id"] is not None:
            self.environment = {**environment, RUN_MARK: state["id"]}

    def run(self) -> str:
        """Run all pending steps in order; the final state of the run, as run.json has it.

        Raises:
            RunIsHeld: another supervisor runs it.
        """
        # before the lock, which a forked process would share
        start_guard(self.run_folder, own_identity(), self.grace_seconds)
        with self.run_folder.lock(wait=False):
            return self._run()

    def _run(self) -> str:
        _adopt_orphans()
        signal.signal(signal.SIGTERM, self._ask_to_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self.state["state"], self.state["stop"] = RUNNING, None
        self.state["supervisor"] = own_identity()
        self._save()
        outcome = DONE
        for step in STEPS:
            record = self.state["steps"].get(step.name)
            if record is None or record["state"] != PENDING:
                continue
            self._look_for_request()
            if self.stop_requests or self.save_until is not None:
                outcome = STOPPED
            elif gates.waiting(self.state):
                outcome = PAUSED
            else:
                outcome = self._run_step(step, record)
            if outcome != DONE:
                break
        self.state["state"], self.state["stop"] = outcome, None
        self._save()
        self.run_folder.stop_request.unlink(missing_ok=True)
        return outcome

    def _ask_to_stop(self, number: int, frame: object) -> None:
        self.stop_requests += 1

    def _look_for_request(self) -> None:
        """Take note of a request to save and stop, and of when to stop without."""
        if self.save_until is not None or not self.run_folder.stop_request.exists():
            return
        limit = SAVE_SECONDS
        try:
            content = json.loads(self.run_folder.stop_request.read_text(encoding="utf-8"))
            limit = float(content["limit_seconds"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            # the user may have made the file with `touch`
            print(f"stop-request without a limit ({error!r}): {limit:.0f} s", file=sys.stderr)
        self.save_until = time.monotonic() + limit
        self.state["stop"] = {"asked": time.time(), "limit_seconds": limit}
        self._beat()

    def _save(self) -> None:
        """Write run.json; on a full disk, once there is room again."""
        while True:
            try:
                self.run_folder.write_state(self.state)
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self.stop_requests > 1:
                    raise
                self._say(f"waiting for room to write {self.run_folder.state_file}: {error}")
                time.sleep(HEARTBEAT_SECONDS)

    def _beat(self) -> None:
        try:
            self.run_folder.write_state(self.state)
        except OSError as error:
            # training continues: what it writes may still fit, and the next heartbeat may succeed
            self._say(f"cannot write {self.run_folder.state_file}: {error}")

    def _say(self, text: str) -> None:
        # the supervisor's own log is on the same disk
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)

    def _run_step(self, step: Step, record: StepState) -> str:
        folder = self.run_folder.step_folder(step)
        folder.mkdir(parents=True, exist_ok=True)
        command = self.command_of(step)
        log_path = self.run_folder.training_log(step)
        # what is in the log already was written by an earlier attempt
        offset = log_path.stat().st_size if log_path.exists() else 0
        record["state"], record["started"] = RUNNING, time.time()
        record["command"], record["log_offset"] = command, offset
        self._save()
        try:
            with log_path.open("ab", buffering=0) as log:
                leader = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    env=self.environment,
                    # the argument process_group= needs Python 3.11
                    preexec_fn=os.setpgrp,
                )
        except OSError as error:
            cause: Cause | None = {
                "id": "missing_program",
                "line": str(error),
                "advice": "install dschat with its dependencies into this environment",
            }
            return self._end_step(record, FAILED, None, cause)
        record["process"] = process_identity(leader.pid) or {"pid": leader.pid, "started": None}
        self._save()
        try:
            returncode = self._wait_until_empty(leader.pid)
        except BaseException:
            _signal_all(leader.pid, signal.SIGKILL)
            raise
        self._look_for_request()
        record["metrics"] = final_metrics(step.name, folder)
        missing = [
            path.name
            for path in self.run_folder.model_folders(
                step, self.config.ema.enabled, self.config.algorithm.has_critic
            )
            if not is_complete_model(path)
        ]
        if returncode == 0 and not missing:
            earlier = [gate for gate in self.state["gates"] if gate["step"] != step.name]
            missed = gates.missed(self.config, step.name, record["metrics"])
            self.state["gates"] = earlier + missed
            return self._end_step(record, DONE, returncode, None)
        if self.stop_requests or (returncode == 0 and self.save_until is not None):
            return self._end_step(record, STOPPED, returncode, None)
        cause = find_cause(log_path, returncode, missing, offset)
        return self._end_step(record, FAILED, returncode, cause)

    def _end_step(
        self,
        record: StepState,
        outcome: str,
        returncode: int | None,
        cause: Cause | None,
    ) -> str:
        record["state"], record["ended"] = outcome, time.time()
        record["returncode"], record["cause"] = returncode, cause
        self._save()
        return outcome

    def _wait_until_empty(self, leader: int) -> int | None:
        """Wait for the end of a step's leader and of everything it started; its exit code.

        Once the leader is dead or a stop is asked for, what is left gets SIGTERM, then, after the
        grace, SIGKILL.
        """
        returncode: int | None = None
        kill_at: float | None = None
        terminated = False
        last_beat = time.monotonic()
        while True:
            while True:
                try:
                    pid, status = os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    break
                if pid == 0:
                    break
                if pid == leader:
                    returncode = os.waitstatus_to_exitcode(status)
            if not _group_exists(leader) and not _descendants():
                return returncode
            now = time.monotonic()
            self._look_for_request()
            if self.save_until is not None and now >= self.save_until and returncode is None:
                self.stop_requests = max(1, self.stop_requests)
            if kill_at is None and (self.stop_requests or returncode is not None):
                kill_at = now + self.grace_seconds
            # after exit code 0, stragglers get the full grace period: they may still be writing
            if not terminated and (self.stop_requests or returncode not in (None, 0)):
                _signal_all(leader, signal.SIGTERM)
                terminated = True
            if kill_at is not None and (now >= kill_at or self.stop_requests > 1):
                # each round again: a process may have been forking at the moment of the kill
                _signal_all(leader, signal.SIGKILL)
            if now - last_beat >= HEARTBEAT_SECONDS:
                self._beat()
                last_beat = now
            time.sleep(POLL_SECONDS)


def _adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that none is missed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _signal_all(group: int, number: signal.Signals) -> None:
    """Signal a step's process group, and descendants that left it."""
    if _group_exists(group):
        os.killpg(group, number)
    for process in _descendants():
        try:
            if os.getpgid(process.pid) != group:
                process.send_signal(number)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue


def main() -> int:
    """Supervise the run whose folder is the first argument."""
    run = RunFolder(Path(sys.argv[1]))
    config = load_config(run.config_file)

    def command_of(step: Step) -> list[str]:
        port = config.launch.master_port or launch.free_port()
        if config.launch.deployment == "multi_node":
            launch.write_node_environment(run.step_folder(step), environment)
        return launch.step_command(config, run, step, port)

    environment = launch.step_environment(config, os.environ)
    return 0 if Supervisor(run, command_of, environment, config).run() == DONE else 1


if __name__ == "__main__":
    sys.exit(main())
