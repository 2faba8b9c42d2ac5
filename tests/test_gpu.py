"""What only a CUDA device shows: `make test-gpu`.

The checks are those of tests/engine/device_cases.py, run here on the device: each step at each
ZeRO stage in each dtype, offload, LoRA, generation against transformers, MixZ, stopping and
resuming, the chat. They share one process a number of ranks; a failure there tells its traceback
here. Then one whole run as a user starts it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from device_cases import checks
from launched import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
WORKER = Path(__file__).parent / "engine/device_worker.py"


def results_of(folder: Path, ranks: int) -> dict[str, str]:
    """The result of each check by its name: passed, a reason to skip it, or a traceback."""
    launch(WORKER, folder, ranks=ranks, timeout=1200)
    lines = (folder / "results.jsonl").read_text().splitlines()
    return {record["name"]: record["result"] for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def one_device(tmp_path_factory) -> dict[str, str]:
    return results_of(tmp_path_factory.mktemp("one-device"), 1)


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory) -> dict[str, str]:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, found {torch.cuda.device_count()}")
    return results_of(tmp_path_factory.mktemp("two-devices"), 2)


def judge(result: str) -> None:
    if "cannot compute in" in result and "Traceback" not in result:
        pytest.skip(result)
    assert result == "passed", result


@pytest.mark.parametrize("name", list(checks(1)))
def test_on_one_device(name, one_device):
    judge(one_device[name])


@pytest.mark.parametrize("name", list(checks(2)))
def test_on_two_devices(name, two_devices):
    judge(two_devices[name])


def test_a_whole_run_and_its_evaluation(tmp_path: Path):
    folder, dschat = tmp_path / "run", Path(sys.executable).parent / "dschat"
    short = ("sft.max_steps=4", "reward.max_steps=4", "ppo.max_steps=2", "data.eval_rows=32")
    changes = [part for value in (*short, "dtype=auto") for part in ("--set", value)]
    for command in (["run", "--profile", "tiny", "--output", folder, *changes], ["eval", folder]):
        ended = subprocess.run([dschat, *command], capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    rows = (folder / "step3-rlhf/metrics.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, rows) if row["kind"] == "metrics"]
    assert [row["step"] for row in steps] == [0, 1]
    assert abs(steps[0]["kl"]) < 0.1
    assert "switched itself off" not in (folder / "step3-rlhf/training.log").read_text()
