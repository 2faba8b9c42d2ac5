"""Failures provoked for real, in small runs: named, nothing left alive, mended by going on.

A few processes are killed here; twenty, in some six minutes: DSCHAT_KILLS=20 pytest -k kill_9 FILE
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dschat_tui.cli.watch import watch
from dschat_tui.runs import control
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.launch import free_port
from dschat_tui.runs.processes import leftovers
from engine.config.steps import PIPELINES, STEPS, Step
from engine.models.folders import is_complete_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes as on Linux"),
]

DSCHAT = str(Path(sys.executable).parent / "dschat")
THREE = [step for step in STEPS if step.name in PIPELINES["ppo"]]
SFT = THREE[0]
KILLS = int(os.environ.get("DSCHAT_KILLS", "4"))
FIRST_SEED = 156
VICTIMS = ("rank", "launcher", "command", "supervisor")
# What run.json calls the death of each; a step whose launcher died may still end well.
CAUSES = {
    "rank": {"killed"},
    "launcher": {"killed", "incomplete_model"},
    "supervisor": {"supervisor_lost"},
}
INTERVAL = 2

SMALL = """
models: {actor: "embedded:tiny-llama"}
dtype: fp32
data: {eval_rows: 16}
checkpoint: {interval: 2}
actor: {learning_rate: 1.0e-3}
critic: {learning_rate: 1.0e-3}
sft: {max_steps: 8, batch_size: 8, learning_rate: 1.0e-3, max_length: 96}
reward: {max_steps: 4, batch_size: 8, learning_rate: 1.0e-3, max_length: 96}
ppo: {max_steps: 4, rollout_batch_size: 8, batch_size: 4, max_prompt_length: 40,
      max_answer_length: 12, warmup_steps: 0, scheduler: constant}
"""


def dschat(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [DSCHAT, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL
    )


@pytest.fixture
def small(tmp_path) -> Iterator[list[str]]:
    """The arguments of a small run in `run` of this test's folder."""
    profile = tmp_path / "small.yaml"
    profile.write_text(SMALL)
    yield ["run", "--profile", str(profile), "--output", str(tmp_path / "run")]
    for file in tmp_path.rglob("run.json"):
        if control.has_supervisor(json.loads(file.read_text())):
            dschat("runs", "stop", str(file.parent), "--now")


def wait_for(condition: Callable[[], object], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def steps_done(run: RunFolder, step: Step) -> list[int]:
    """The numbers of the optimizer steps that metrics.jsonl tells of."""
    file = run.step_folder(step) / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return [record["step"] for record in records if record["kind"] == "metrics"]


def processes_of(run: RunFolder) -> list[psutil.Process]:
    """Processes whose command names the run: watching commands too."""
    every = psutil.process_iter(["cmdline"])
    return [process for process in every if str(run.path) in (process.info["cmdline"] or [])]


def test_a_taken_port_is_named_and_the_fix_takes_a_free_one(small, tmp_path):
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        failed = dschat(*small, "--steps", "1", "--set", f"launch.master_port={port}")
        assert failed.returncode == 1, failed.stderr
        assert "port_in_use" in failed.stderr
        assert "launch.master_port" in failed.stderr
        mended = dschat("run", "--resume", str(tmp_path / "run"), "--fix")
    assert f"changed: launch.master_port: {port} -> null" in mended.stderr
    assert mended.returncode == 0, mended.stderr


def start_watching(run: RunFolder, small: list[str], log: Path) -> subprocess.Popen[bytes]:
    """The command that a person would give now: it begins the run, goes on with it, or watches."""
    command = small
    if run.state_file.exists():
        going_on = control.has_supervisor(run.read_state())
        verbs = ["runs", "attach"] if going_on else ["run", "--resume"]
        command = [*verbs, str(run.path)]
    with log.open("ab") as file:
        return subprocess.Popen(
            [DSCHAT, *command], stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )


def wait_for_moment(
    run: RunFolder, step: Step, total: int, last: bool, chosen: random.Random
) -> None:
    """A random moment of a step: while it starts, between its steps, or (`last`) as it ends."""
    wait_for(lambda: run.state_file.exists() and run.read_state()["steps"][step.name]["process"])
    when = chosen.choice(["starts", "trains", *(["ends"] if last else [])])
    if when == "starts":
        time.sleep(chosen.uniform(0, 6))
        return
    # where the run itself ends with the step there would be nothing left to kill
    end = total - 2 if step == THREE[-1] else total
    aim = end if when == "ends" else len(steps_done(run, step)) + chosen.randint(1, 3)
    wait_for(lambda: len(steps_done(run, step)) >= min(aim, end))
    time.sleep(chosen.uniform(0, 0.5))


def find_victim(
    run: RunFolder, victim: str, command: subprocess.Popen[bytes], chosen: random.Random
) -> tuple[int, str]:
    """The pid of a victim, and the name of the step that is running."""
    found: list[tuple[int, str]] = []

    def look() -> bool:
        state = run.read_state()
        for name, record in state["steps"].items():
            if record["state"] != "running" or not record["process"]:
                continue
            pids = {"command": [command.pid], "supervisor": [state["supervisor"]["pid"]]}
            if victim not in pids:
                pids["rank"], pids["launcher"] = ranks_and_launchers(record["process"]["pid"])
            found.extend((pid, name) for pid in pids[victim])
        return bool(found)

    wait_for(look)
    return chosen.choice(found)


def ranks_and_launchers(leader: int) -> tuple[list[int], list[int]]:
    """The pids of a step: ranks, which alone know their number; `deepspeed` and its launch.py."""
    ranks, launchers = [], []
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(leader)
        for each in (process, *process.children(recursive=True)):
            (ranks if "LOCAL_RANK" in each.environ() else launchers).append(each.pid)
    return ranks, launchers


def kill_and_check(
    run: RunFolder, victim: str, command: subprocess.Popen[bytes], chosen: random.Random
) -> str:
    """Kill a victim, see that nothing of the run is alive or that it goes on; what happened."""
    pid, name = find_victim(run, victim, command, chosen)
    os.kill(pid, 9)
    if victim == "command":
        assert command.wait(60) == -9
        state = run.read_state()
        assert state["state"] == "running"
        assert control.has_supervisor(state)
        return f"{name}: goes on"

    def settled() -> bool:
        state = run.read_state()
        goes_on = state["steps"][name]["state"] == "done" and control.has_supervisor(state)
        return state["state"] != "running" or goes_on

    wait_for(settled)
    state = run.read_state()
    record = state["steps"][name]
    if victim == "launcher" and record["state"] == "done":
        return f"{name}: ended well without its launcher"
    assert state["state"] == "failed"
    assert leftovers(state) == []
    # 2: it came to watch when all was over
    assert command.wait(60) in (1, 2)
    wait_for(lambda: processes_of(run) == [], seconds=60)
    if record["state"] == "done":
        # the step ended at the very moment in which its supervisor died
        assert victim == "supervisor"
        return f"{name}: done, the run failed"
    assert record["state"] == "failed"
    assert record["cause"]["id"] in CAUSES[victim]
    return f"{name}: failed, {record['cause']['id']}"


def test_two_runs_at_once_end_well_though_kill_9_strikes_one_again_and_again(small, tmp_path):
    run, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "other")
    kills = [(number, THREE[(3 * number + 2) // KILLS]) for number in range(KILLS)]
    totals = {step.name: 4 + 6 * sum(at == step for _, at in kills) for step in THREE}
    lengths = [f"--set={name}.max_steps={total}" for name, total in totals.items()]
    assert dschat(*small[:3], "--output", str(other.path), "--detach").returncode == 0

    for number, step in kills:
        chosen, victim = random.Random(FIRST_SEED + number), VICTIMS[number % len(VICTIMS)]
        command = start_watching(run, [*small, *lengths], tmp_path / "commands.log")
        last = (number + 1, step) not in kills
        wait_for_moment(run, step, totals[step.name], last, chosen)
        told = kill_and_check(run, victim, command, chosen)
        for each in THREE:
            saved = run.checkpoints(each) or [0]
            assert len(steps_done(run, each)) - saved[-1] <= INTERVAL
        print(f"kill {number}: {victim}, {told}, after {len(steps_done(run, step))} steps")

    for each, steps in ((run, totals), (other, {"sft": 8, "reward": 4, "ppo": 4})):
        if each.read_state()["state"] != "done":
            # 2: watched, it ended before the command came
            command = start_watching(each, small, tmp_path / "commands.log")
            assert command.wait(600) in (0, 2), (tmp_path / "commands.log").read_text()
        assert each.read_state()["state"] == "done"
        for step in THREE:
            assert all(map(is_complete_model, each.model_folders(step, False)))
            # each optimizer step once, none lost
            assert steps_done(each, step) == list(range(steps[step.name]))
        wait_for(lambda each=each: processes_of(each) == [], seconds=60)
    ours, others = run.read_state(), other.read_state()
    assert ours["created"] < others["steps"]["ppo"]["ended"]
    commands = [state["steps"]["sft"]["command"] for state in (ours, others)]
    ports = [command[command.index("--master_port") + 1] for command in commands]
    assert ports[0] != ports[1]


def test_a_learning_rate_that_diverges_is_named_and_the_fix_lowers_it(small, tmp_path):
    setting = "sft.learning_rate=1e18"
    failed = dschat(*small, "--steps", "1", "--set", setting, "--set", "sft.max_gradient_norm=1e9")
    assert failed.returncode == 1, failed.stderr
    assert "diverged" in failed.stderr
    run = RunFolder(tmp_path / "run")
    going_on = dschat("run", "--resume", str(run.path), "--fix", "--detach")
    assert "changed: sft.learning_rate: 1e+18 -> 1e+17" in going_on.stderr


def test_a_hub_that_is_out_of_reach_is_named(small, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    failed = dschat(*small, "--set", "models.actor=no-such-owner/no-such-model")
    assert failed.returncode == 1, failed.stderr
    assert "failed, network: " in failed.stderr
    assert "name local folders in models.actor" in failed.stderr


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 320 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=320m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("only root may mount a tmpfs, and not in every container")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_too_small_is_refused_before_a_run(small, small_disk):
    (small_disk / "filling").write_bytes(bytes(100 * 2**20))
    refused = dschat(*small[:3], "--output", str(small_disk / "run"))
    assert refused.returncode == 2
    assert "GiB free" in refused.stderr
    assert not (small_disk / "run").exists()


def test_a_disk_that_fills_up_pauses_the_run_until_there_is_room(small_disk, small, tmp_path):
    run, said = RunFolder(small_disk / "run"), tmp_path / "said.log"
    command = [DSCHAT, *small[:3], "--output", str(run.path), "--steps", "1"]
    with said.open("wb") as file:
        watching = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    wait_for(run.training_log(SFT).exists)
    filling = small_disk / "filling"
    with filling.open("wb") as file:
        # room for the log, not for the weights of a checkpoint
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small_disk).free - 2**21)
    wait_for(lambda: "paused: no room for the checkpoint of step 2" in said.read_text())
    assert control.has_supervisor(run.read_state())
    filling.unlink()
    assert watching.wait(300) == 0, said.read_text()
    assert run.read_state()["state"] == "done"
    assert steps_done(run, SFT) == list(range(8))
    assert run.checkpoints(SFT)[-1] == 8


def test_a_compiler_that_is_missing_is_named(fake_run, tmp_path, capsys):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, there in (("ninja", Path(sys.executable).parent), ("which", Path("/usr/bin"))):
        (tools / name).symlink_to(there / name)
    build = f"""
os.environ |= {{"PATH": {str(tools)!r}, "TORCH_EXTENSIONS_DIR": str(folder)}}
from deepspeed.ops.op_builder import CPUAdamBuilder
CPUAdamBuilder().load()
"""
    fake = fake_run(sft=build)
    assert watch(fake.run, fake.start(), json_output=True) == 1
    told = capsys.readouterr().err
    assert "build_failed" in told
    assert "Error building extension 'cpu_adam'" in told
    assert "Install a compiler" in told


def test_a_node_that_does_not_come_is_named(fake_run, capsys):
    waits = f"""
from datetime import timedelta
import torch.distributed as dist
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:{free_port()}", rank=0, world_size=2,
                        timeout=timedelta(seconds=1))
"""
    fake = fake_run(sft=waits)
    assert watch(fake.run, fake.start(), json_output=True) == 1
    told = capsys.readouterr().err
    assert "rendezvous_timeout" in told
    assert "1/2 clients joined" in told


def test_too_little_memory_is_named_and_the_fix_takes_fewer_rows_at_once(small, tmp_path):
    command = [*small, "--steps", "1", "--set", "sft.batch_size=512"]
    # A shell sets the limit: to fork this process for it, maybe gigabytes wide, may itself fail.
    failed = subprocess.run(
        ["sh", "-c", 'ulimit -v 2600000 && exec "$@"', "sh", DSCHAT, *command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert failed.returncode == 1, failed.stderr
    assert "out_of_memory" in failed.stderr
    going_on = dschat("run", "--resume", str(tmp_path / "run"), "--fix", "--detach")
    assert "changed: sft.micro_batch_size: null -> 256" in going_on.stderr
