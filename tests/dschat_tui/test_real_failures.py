"""Failures provoked for real, in small runs: named, nothing left alive, mended by going on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dschat_tui.runs.folder import STEPS, RunFolder
from dschat_tui.runs.processes import leftovers
from engine.models.folders import is_complete_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes as on Linux"),
]

DSCHAT = str(Path(sys.executable).parent / "dschat")

SMALL = """
models: {actor: "embedded:tiny-llama"}
dtype: fp32
data: {eval_rows: 16}
checkpoint: {interval: 2}
actor: {learning_rate: 1.0e-3}
critic: {learning_rate: 1.0e-3}
sft: {max_steps: 8, batch_size: 8, learning_rate: 1.0e-3, max_length: 96}
reward: {max_steps: 4, batch_size: 8, learning_rate: 1.0e-3, max_length: 96}
ppo: {max_steps: 30, rollout_batch_size: 8, batch_size: 4, max_prompt_length: 40,
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
    dschat("runs", "stop", str(tmp_path / "run"), "--now")


def wait_for_training(run: RunFolder, step: str) -> dict:
    """Wait until a step has done some of its optimizer steps; run.json then."""
    end = time.monotonic() + 300
    folder = next(each for each in STEPS if each.name == step)
    while time.monotonic() < end:
        state = run.read_state()
        assert state is not None
        assert state["state"] in ("pending", "running"), state
        record = state["steps"][step]
        if record["state"] == "running" and record["process"] and run.checkpoints(folder):
            return state
        time.sleep(0.05)
    raise AssertionError(f"step {step} does not train: {run.read_state()}")


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


def test_kill_9_of_a_rank_then_of_the_supervisor_loses_nothing_but_time(small, tmp_path):
    run = RunFolder(tmp_path / "run")
    dschat(*small, "--detach")
    # 1. A rank of step 3, amid it.
    state = wait_for_training(run, "ppo")
    launcher = psutil.Process(state["steps"]["ppo"]["process"]["pid"])
    ranks = [p for p in launcher.children(recursive=True) if "engine.steps.ppo" in p.cmdline()]
    youngest = max(ranks, key=lambda process: process.create_time())
    os.kill(youngest.pid, 9)
    watched = dschat("runs", "attach", str(run.path))
    # 2: it had ended before this command came
    assert watched.returncode == 2 or "killed" in watched.stderr
    state = run.read_state()
    assert state["steps"]["ppo"]["state"] == "failed"
    assert state["steps"]["ppo"]["cause"]["id"] == "killed"
    assert leftovers(state) == []

    # 2. The supervisor, once it goes on after the checkpoint.
    resumed = dschat("run", "--resume", str(run.path), "--detach")
    assert "goes on with step 3 (RLHF (PPO)) after" in resumed.stderr
    state = wait_for_training(run, "ppo")
    os.kill(state["supervisor"]["pid"], 9)
    end = time.monotonic() + 180
    while run.read_state()["state"] == "running" and time.monotonic() < end:
        time.sleep(0.1)
    state = run.read_state()
    assert state["steps"]["ppo"]["cause"]["id"] == "supervisor_lost"
    assert leftovers(state) == []

    # 3. To the end: all three models, and each step once in the metrics.
    ended = dschat("run", "--resume", str(run.path), "--json")
    assert ended.returncode == 0, ended.stderr
    assert all(
        is_complete_model(folder) for step in STEPS for folder in run.model_folders(step, False)
    )
    lines = (run.path / "step3-rlhf" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record["step"] for record in records if record["kind"] == "metrics"]
    assert steps == list(range(len(steps)))


def test_a_learning_rate_that_diverges_is_named_and_the_fix_lowers_it(small, tmp_path):
    setting = "sft.learning_rate=1e18"
    failed = dschat(*small, "--steps", "1", "--set", setting, "--set", "sft.max_gradient_norm=1e9")
    assert failed.returncode == 1, failed.stderr
    assert "diverged" in failed.stderr
    run = RunFolder(tmp_path / "run")
    going_on = dschat("run", "--resume", str(run.path), "--fix", "--detach")
    assert "changed: sft.learning_rate: 1e+18 -> 1e+17" in going_on.stderr


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
