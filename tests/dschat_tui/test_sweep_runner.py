"""A sweep from its matrix to its end: states, resuming, stopping; with runs that are scripts."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from log_entries import ppo_step
from rich.console import Console
from typer.testing import CliRunner

from dschat_tui.cli import sweep_display
from dschat_tui.cli.main import app
from dschat_tui.runs import supervisor
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.identity import process_identity
from dschat_tui.sweep import runner
from dschat_tui.sweep.matrix import make, parse_axis
from dschat_tui.sweep.state import SweepError, SweepFolder
from engine.config.steps import STEPS

OOM = {"id": "out_of_memory", "line": "MemoryError", "advice": "less"}
MISSING = {"id": "missing_file", "line": "No such file: \x1b[31m/x", "advice": "check it"}
AXIS = "ppo.kl_coef=0.1,0.2,0.3"
CELLS = ["ppo.kl_coef=0.1", "ppo.kl_coef=0.2", "ppo.kl_coef=0.3"]


class FakeProcess:
    """A supervisor that has ended at once, or that ends when it is told to."""

    def __init__(self, fakes: FakeRuns, run: RunFolder, outcome: str) -> None:
        self.pid = os.getpid()
        self.fakes, self.run = fakes, run
        self.goes_on = outcome in ("hangs", "interrupted")
        if not self.goes_on:
            fakes.write(run, outcome)
        elif outcome == "interrupted":
            signal.raise_signal(signal.SIGINT)

    def poll(self) -> int | None:
        return None if self.goes_on else 0

    def send_signal(self, number: int) -> None:
        self.goes_on = False
        self.fakes.write(self.run, "stopped")


class FakeRuns:
    """In the place of supervisors: writes what each run comes to, by its name; else it is done."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.environments: list[dict[str, str]] = []
        self.outcomes: dict[str, Any] = {}

    def start(self, run: RunFolder, environment: dict[str, str]) -> FakeProcess:
        self.started.append(run.path.name)
        self.environments.append(environment)
        return FakeProcess(self, run, self.outcomes.get(run.path.name, "done"))

    def write(self, run: RunFolder, outcome: Any) -> None:
        state = run.read_state()
        assert state is not None
        standing = "failed" if isinstance(outcome, dict) else outcome
        for record in state["steps"].values():
            record |= {"state": standing, "started": time.time() - 3, "ended": time.time()}
        if standing == "failed":
            next(iter(state["steps"].values()))["cause"] = outcome
        for step in STEPS:
            if step.name in state["steps"]:
                write_log(run.training_log(step))
                for folder in run.model_folders(step, ema=False):
                    write_model(folder)
        run.write_state({**state, "state": standing})


def write_model(folder: Path) -> Path:
    """A folder that counts as a complete model."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def write_log(log: Path) -> None:
    """Three generation steps of a second."""
    log.parent.mkdir(parents=True, exist_ok=True)
    times = {"e2e_s": 1.0, "generate_s": 0.5, "train_s": 0.25}
    with log.open("w") as file:
        for step in range(3):
            block = ppo_step(step=step, critic_loss=0.2, batch_size=8, **times).block()
            file.write("\n".join(block) + "\n")


@pytest.fixture
def fakes(monkeypatch) -> FakeRuns:
    fakes = FakeRuns()
    monkeypatch.setattr(supervisor, "start", fakes.start)
    return fakes


@pytest.fixture
def finished(tmp_path) -> list[str]:
    """Arguments that give finished models, so that no preparation is needed."""
    arguments = []
    for key in ("sft", "trained_reward"):
        folder = write_model(tmp_path / "models" / key)
        arguments += ["--set", f"models.{key}={folder}"]
    return arguments


@pytest.fixture
def dschat(tmp_path, finished):
    """`dschat sweep` on three cells of step 3."""

    def call(*arguments: str, axis: str = AXIS):
        given = ["--profile", "tiny", "--axis", axis, "--output", str(tmp_path / "sweep")]
        return CliRunner().invoke(app, ["sweep", *given, *finished, *arguments])

    return call


def states(path: Path) -> dict[str, str]:
    state = SweepFolder(path).read()
    assert state is not None
    return {cell["name"]: cell["state"] for cell in state["cells"]}


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_every_cell_is_a_run_and_has_its_log_where_the_original_had_it(dschat, fakes, tmp_path):
    result = dschat()
    assert result.exit_code == 0, result.output
    assert fakes.started == CELLS
    assert last_line(result.stdout) == "3 cells: 3 done"
    for name in CELLS:
        cell = tmp_path / "sweep" / name
        assert (cell / "training.log").read_text() == (
            cell / "step3-rlhf" / "training.log"
        ).read_text()
        state = RunFolder(cell).read_state()
        assert state is not None
        assert list(state["steps"]) == ["ppo"]
    for record in SweepFolder(tmp_path / "sweep").read()["cells"]:
        assert record["samples_per_s"] == pytest.approx(8.0)
        assert record["reward"] == 1.5


def test_a_dry_run_shows_the_matrix_and_starts_and_writes_nothing(fakes, tmp_path):
    output = tmp_path / "sweep"
    result = CliRunner().invoke(app, ["sweep", "--dry-run", "--output", str(output)])
    assert result.exit_code == 0
    (pruned,) = [line for line in result.stdout.splitlines() if "pruned" in line]
    assert pruned.startswith("z2_he_true_offload_true_lora_false ")
    assert "zero2-offload-hybrid-needs-lora" in pruned
    assert "preparation: step 1 and 2 once" in result.stdout
    assert last_line(result.stdout) == "16 cells, 15 to run"
    assert not output.exists()
    assert not fakes.started


def test_cells_take_over_the_models_of_a_preparation_that_runs_once(fakes, tmp_path):
    output = tmp_path / "sweep"
    arguments = ["--axis", AXIS, "--max-steps", "5", "--output", str(output)]
    result = CliRunner().invoke(app, ["sweep", *arguments])
    assert result.exit_code == 0, result.output
    assert fakes.started == ["preparation", *CELLS]
    made = RunFolder(output / "preparation").read_state()
    assert made is not None
    assert list(made["steps"]) == ["sft", "reward"]
    text = (output / CELLS[0] / "run.yaml").read_text()
    assert f"sft: {output}/preparation/step1-sft/model" in text
    assert f"trained_reward: {output}/preparation/step2-reward/model" in text


def test_a_preparation_runs_again_for_cells_that_are_left_only_if_its_models_are_gone(
    fakes, tmp_path
):
    fakes.outcomes[CELLS[2]] = OOM
    arguments = ["sweep", "--axis", AXIS, "--output", str(tmp_path / "sweep"), "--retry", "failed"]
    CliRunner().invoke(app, arguments)
    CliRunner().invoke(app, arguments)
    assert fakes.started == ["preparation", *CELLS, CELLS[2]]
    shutil.rmtree(tmp_path / "sweep/preparation/step1-sft/model")
    CliRunner().invoke(app, arguments)
    assert fakes.started[5:] == ["preparation", CELLS[2]]


@pytest.mark.parametrize("command", [[], ["report"], ["compare"]])
def test_every_command_has_help(command):
    result = CliRunner().invoke(app, ["sweep", *command, "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_when_the_preparation_fails_its_cells_fail_with_its_cause(fakes, tmp_path):
    fakes.outcomes["preparation"] = MISSING
    output = tmp_path / "sweep"
    arguments = ["sweep", "--axis", AXIS, "--output", str(output)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert fakes.started == ["preparation"]
    assert set(states(output).values()) == {"failed"}
    fakes.outcomes.clear()
    result = CliRunner().invoke(app, [*arguments, "--retry", "failed"])
    assert result.exit_code == 0
    assert fakes.started == ["preparation", "preparation", *CELLS]


def test_a_failure_is_named_and_the_rest_goes_on(dschat, fakes, tmp_path):
    fakes.outcomes = {CELLS[0]: MISSING, CELLS[1]: OOM}
    result = dschat()
    assert result.exit_code == 1
    assert states(tmp_path / "sweep") == dict(zip(CELLS, ["failed", "oom", "done"], strict=True))
    assert last_line(result.stdout) == "3 cells: 1 done, 1 oom, 1 failed"
    assert "missing_file" in result.stderr
    assert "\x1b" not in result.output
    first = SweepFolder(tmp_path / "sweep").read()["cells"][0]
    assert first["cause"]["id"] == "missing_file"
    assert first["cause"]["advice"] == "check it"
    assert "samples_per_s" not in first


def test_what_is_done_is_not_run_again_and_failures_only_on_request(dschat, fakes, tmp_path):
    fakes.outcomes = {CELLS[1]: MISSING}
    dschat()
    fakes.started.clear()
    fakes.outcomes.clear()
    assert dschat().exit_code == 1
    assert fakes.started == []
    result = dschat("--retry", "failed")
    assert result.exit_code == 0
    assert fakes.started == [CELLS[1]]
    assert set(states(tmp_path / "sweep").values()) == {"done"}


def test_a_stopped_sweep_goes_on_with_the_cell_that_was_stopped(dschat, fakes, tmp_path):
    fakes.outcomes = {CELLS[1]: "interrupted"}
    result = dschat()
    assert result.exit_code == 130
    assert fakes.started == CELLS[:2]
    expected = dict(zip(CELLS, ["done", "pending", "pending"], strict=True))
    assert states(tmp_path / "sweep") == expected
    before = SweepFolder(tmp_path / "sweep").read()["cells"][0]
    (tmp_path / "sweep" / CELLS[1] / "step3-rlhf" / "half.txt").touch()
    fakes.outcomes.clear()
    result = dschat()
    assert result.exit_code == 0
    assert fakes.started == [*CELLS[:2], *CELLS[1:]]
    assert SweepFolder(tmp_path / "sweep").read()["cells"][0] == before
    # begun anew, not on top of what was there
    assert not (tmp_path / "sweep" / CELLS[1] / "step3-rlhf" / "half.txt").exists()


def test_a_cell_over_its_time_limit_is_ended_and_the_rest_goes_on(
    dschat, fakes, tmp_path, monkeypatch
):
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    fakes.outcomes = {CELLS[0]: "hangs"}
    result = dschat("--time-limit", "1")
    assert result.exit_code == 1
    assert states(tmp_path / "sweep") == dict(zip(CELLS, ["timeout", "done", "done"], strict=True))
    assert "time limit of 1 s" in result.stderr


def test_pruned_cells_never_start_and_are_no_failure(dschat, fakes, tmp_path):
    result = dschat(axis="mixz.enabled=true,false")
    assert result.exit_code == 0
    assert fakes.started == ["mixz.enabled=false"]
    assert last_line(result.stdout) == "2 cells: 1 done, 1 pruned"
    assert not (tmp_path / "sweep" / "mixz.enabled=true").exists()


def test_another_sweep_in_the_folder_is_refused(dschat, fakes):
    dschat()
    for arguments in (["--set", "seed=5"], ["--max-steps", "3"]):
        result = dschat(*arguments)
        assert result.exit_code == 2
        assert "another sweep; different: " in result.stderr
    assert dschat(axis="ppo.kl_coef=0.1,0.2").exit_code == 2
    assert fakes.started == CELLS


def test_a_sweep_that_another_process_works_on_is_refused(dschat, fakes, tmp_path):
    folder = SweepFolder(tmp_path / "sweep")
    with folder.lock():
        result = dschat()
    assert result.exit_code == 2
    assert "another process works on" in result.stderr
    assert not fakes.started


def test_a_run_that_a_killed_sweep_left_is_taken_over(dschat, fakes, tmp_path):
    dschat()
    folder = SweepFolder(tmp_path / "sweep")
    state = folder.read()
    ended, going_on, lost = state["cells"]
    for record in state["cells"]:
        record["state"] = "running"
    folder.write(state)
    # the second one has a supervisor that is alive, which ends; the third one's is gone
    run = RunFolder(folder.path / going_on["name"])
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    alive = {"state": "running", "supervisor": process_identity(child.pid)}
    run.write_state({**run.read_state(), **alive})
    child.stdin.close()
    gone = RunFolder(folder.path / lost["name"])
    gone.write_state({**gone.read_state(), "state": "running"})
    fakes.started.clear()
    result = dschat()
    child.wait(30)
    # its supervisor was gone without a word in run.json
    assert states(folder.path)[ended["name"]] == "done"
    assert lost["name"] in fakes.started
    assert ended["name"] not in fakes.started
    assert result.exit_code in (0, 1)


def test_events_are_json_lines(dschat, fakes):
    fakes.outcomes = {CELLS[2]: OOM}
    result = dschat("--json")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert [event["event"] for event in events] == [
        "matrix",
        *["started", "ended"] * 3,
        "finished",
    ]
    assert events[0]["to_run"] == 3
    assert events[2]["name"] == CELLS[0]
    assert events[2]["samples_per_s"] == pytest.approx(8.0)
    assert events[-1]["counts"] == {"done": 2, "oom": 1}


def test_the_live_table_has_a_row_a_cell_and_how_far_it_is(dschat, fakes, monkeypatch):
    pictures: list[str] = []

    class Table(sweep_display.LiveTable):
        def picture(self, runner):
            console = Console(file=io.StringIO(), width=120)
            console.print(super().picture(runner))
            pictures.append(console.file.getvalue())
            return super().picture(runner)

    monkeypatch.setattr(sweep_display, "display_for", lambda state, json_events: Table(state))
    fakes.outcomes = {CELLS[0]: MISSING, CELLS[1]: "hangs"}
    dschat("--time-limit", "1")
    for shown, states in (
        (pictures[1], ["failed", "running", "pending"]),
        (pictures[-1], ["failed", "timeout", "done"]),
    ):
        rows = shown.splitlines()
        for name, state in zip(CELLS, states, strict=True):
            (row,) = [row for row in rows if row.startswith(f"{name} ")]
            assert f" {state} " in f"{row} "


def test_parallel_cells_share_the_cores_out(dschat, fakes, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(runner.launch, "usable_cores", lambda: 8)
    result = dschat("--parallel", "2")
    assert result.exit_code == 0
    assert {e["OMP_NUM_THREADS"] for e in fakes.environments} == {"4"}


def test_parallel_cells_have_devices_of_their_own(monkeypatch):
    monkeypatch.setattr(runner.launch, "visible_gpus", lambda environment: ["4", "5", "6", "7"])
    sweep = make("tiny", (3,), [parse_axis(AXIS)], ["launch.num_accelerators=2"])
    shares = [share["CUDA_VISIBLE_DEVICES"] for share in runner.share_machine(sweep, 2)]
    assert shares == ["4,5", "6,7"]
    with pytest.raises(SweepError, match="--parallel 2"):
        runner.share_machine(sweep, 3)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--output DIR"),
        (["--output", "x", "--profile", "tniy"], "did you mean tiny"),
        (["--output", "x", "--axis", "ppo.kl_ceof=1"], "ppo.kl_coef"),
        (["--output", "x", "--steps", "4"], "steps are 1, 2 and 3"),
        (["--output", "x", "--matrix", "none"], "original-step3"),
        (["--output", "x", "--retry", "all"], "only `failed`"),
        (["--output", "x", "--set", "data.sources=/absent.json"], "/absent.json"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments, told, fakes, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["sweep", *arguments])
    assert result.exit_code == 2
    assert told in result.stderr
    assert list(tmp_path.iterdir()) == []


# `dschat` whose supervisors are real, and whose `deepspeed` is a script
COMMAND = """
import subprocess, sys
from pathlib import Path
from dschat_tui.runs import launch, supervisor

scripts = Path(sys.argv.pop(1))
launch.find_deepspeed = lambda: scripts / "deepspeed"

def start(run, environment):
    with run.supervisor_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, str(scripts / "supervisor.py"), str(scripts), str(run.path)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            start_new_session=True,
        )

supervisor.start = start
from dschat_tui.cli.main import main
main()
"""
SUPERVISOR = """
import sys
from pathlib import Path
from dschat_tui.runs import launch, supervisor

scripts = Path(sys.argv.pop(1))
launch.find_deepspeed = lambda: scripts / "deepspeed"
sys.exit(supervisor.main())
"""
DEEPSPEED = """
import os, sys, time
from pathlib import Path

run = Path(sys.argv[sys.argv.index("--output") + 1])
scripts = Path(__file__).parent
with (scripts / "started").open("a") as file:
    file.write(f"{run.name} {os.getpid()}\\n")
if run.name.endswith("0.1"):
    raise FileNotFoundError(2, "No such file or directory", "/data/x.json")
if run.name.endswith("0.2"):
    (scripts / "hangs").touch()
    while not (scripts / "go").exists():
        time.sleep(0.05)
for name in ("actor", "critic"):
    model = run / "step3-rlhf" / name
    model.mkdir()
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (model / file).write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
"""


@pytest.fixture
def scripts(tmp_path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "command.py").write_text(COMMAND)
    (folder / "supervisor.py").write_text(SUPERVISOR)
    (folder / "deepspeed").write_text(f"#!{sys.executable}\n{DEEPSPEED}")
    (folder / "deepspeed").chmod(0o755)
    return folder


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
def test_sigint_ends_the_cell_and_nothing_else_and_the_sweep_goes_on_later(
    scripts, finished, tmp_path
):
    output = tmp_path / "sweep"
    command = [sys.executable, str(scripts / "command.py"), str(scripts), "sweep"]
    command += ["--axis", AXIS, "--output", str(output), *finished]
    unrelated = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        going_on = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for((scripts / "hangs").exists)
        going_on.send_signal(signal.SIGINT)
        _, errors = going_on.communicate(timeout=120)
        assert going_on.returncode == 130, errors
        assert states(output) == dict(zip(CELLS, ["failed", "pending", "pending"], strict=True))
        started = [line.split() for line in (scripts / "started").read_text().splitlines()]
        assert [name for name, _ in started] == CELLS[:2]
        assert not any(psutil.pid_exists(int(pid)) for _, pid in started)
        assert unrelated.poll() is None

        (scripts / "go").touch()
        again = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert again.returncode == 1, again.stderr
        assert last_line(again.stdout) == "3 cells: 2 done, 1 failed"
        started = [line.split()[0] for line in (scripts / "started").read_text().splitlines()]
        assert started == [CELLS[0], CELLS[1], CELLS[1], CELLS[2]]
        assert SweepFolder(output).read()["cells"][0]["cause"]["id"] == "missing_file"
        assert SweepFolder(output).read()["cells"][1]["peak_host_bytes"] > 0
        assert unrelated.poll() is None
    finally:
        unrelated.communicate(b"\n", timeout=30)
