"""Runs with fake steps: small scripts in the place of the trainer's processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from dschat_tui.runs.folder import RunFolder
from engine.config.loading import to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS

# What fake steps find defined: their folder, and how to leave a complete model or a pid behind.
PRELUDE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])

def note_pid(pid):
    with (folder.parent / "pids").open("a") as file:
        file.write(f"{pid}\\n")

def write_model(name):
    target = folder / name
    target.mkdir()
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (target / file).write_text("{}")
    (target / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

note_pid(os.getpid())
"""

HARNESS = """
import os, sys
from pathlib import Path
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.supervisor import Supervisor
from engine.config.loading import load_config

run, scripts, grace = RunFolder(Path(sys.argv[1])), Path(sys.argv[2]), float(sys.argv[3])
program = sys.argv[4]

def command_of(step):
    return [program, str(scripts / f"{step.name}.py"), str(run.step_folder(step))]

config = load_config(run.config_file)
Supervisor(run, command_of, dict(os.environ), config, grace_seconds=grace).run()
"""

FINISHES = {
    "sft": "write_model('model')",
    "reward": "write_model('model')",
    "ppo": "write_model('actor'); write_model('critic')",
}


class FakeRun:
    """A created run whose steps are scripts, and its supervisor as a real process."""

    def __init__(self, folder: Path, config: RunConfig | None, **scripts: str) -> None:
        self.scripts = folder / "scripts"
        self.scripts.mkdir(parents=True)
        for name, script in {**FINISHES, **scripts}.items():
            (self.scripts / f"{name}.py").write_text(PRELUDE + script + "\n")
        self.run = RunFolder(folder / "run")
        self.run.create(to_yaml(config or RunConfig()), "fake", list(STEPS[:3]))

    def supervisor_command(
        self, grace_seconds: float = 5.0, program: str = sys.executable
    ) -> list[str]:
        """What starts the supervisor of the fake steps, each run by `program`."""
        harness = self.scripts / "harness.py"
        harness.write_text(HARNESS)
        folders = [str(self.run.path), str(self.scripts)]
        return [sys.executable, str(harness), *folders, str(grace_seconds), program]

    def start(
        self, grace_seconds: float = 5.0, program: str = sys.executable
    ) -> subprocess.Popen[bytes]:
        """Start the supervisor in a session of its own, as the product does."""
        with self.run.supervisor_log.open("ab") as log:
            return subprocess.Popen(
                self.supervisor_command(grace_seconds, program),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def state(self) -> dict:
        """run.json as it is now."""
        state = self.run.read_state()
        assert state is not None
        return state

    def survivors(self) -> list[int]:
        """Pids that the fake steps noted and that still run."""
        noted = self.run.path / "pids"
        pids = [int(line) for line in noted.read_text().split()] if noted.exists() else []
        return [pid for pid in pids if _runs(pid)]

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180.0) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                log = self.run.supervisor_log.read_text()
                raise AssertionError(f"waited in vain; state {self.state()}; {log}")
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def fake_run(tmp_path: Path):
    """Make a run of fake steps; whatever it leaves behind is ended after the test."""
    made: list[FakeRun] = []

    def make(config: RunConfig | None = None, **scripts: str) -> FakeRun:
        made.append(FakeRun(tmp_path / f"fake{len(made)}", config, **scripts))
        return made[-1]

    yield make
    for run in made:
        for pid in run.survivors():
            os.kill(pid, 9)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who waits ten seconds before each key, while the test does not."""
    from dschat_tui.dashboard.screens.settling import Settling

    seconds = itertools.count(0.0, 10.0)
    monkeypatch.setattr(Settling, "clock", staticmethod(lambda: next(seconds)))


@pytest.fixture
def read_only(tmp_path: Path):
    """A folder in which nobody may write, whoever runs the tests."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    if os.geteuid() != 0:
        folder.chmod(0o500)
        yield folder
        folder.chmod(0o700)
        return
    for options in (["--bind", str(folder)], ["-o", "remount,bind,ro"]):
        mount = subprocess.run(["mount", *options, str(folder)], capture_output=True)
        if mount.returncode != 0:
            subprocess.run(["umount", str(folder)], capture_output=True)
            pytest.skip("root may write everywhere, and not mount in every container")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
