"""What only a CUDA device shows: `make test-gpu`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

SMALL = (
    "sft.max_steps=4",
    "reward.max_steps=4",
    "ppo.max_steps=2",
    "ppo.rollout_batch_size=16",
    "ppo.batch_size=8",
    "data.eval_rows=32",
    "dtype=auto",
)


@pytest.mark.parametrize(
    "features",
    [
        ("actor.zero_stage=2", "critic.zero_stage=2"),
        ("actor.zero_stage=3", "critic.zero_stage=3", "actor.offload=true", "critic.offload=true"),
        ("actor.zero_stage=3", "critic.zero_stage=3", "actor.lora.rank=8", "actor.lora.only=true"),
        ("dtype=fp16", "actor.zero_stage=2", "critic.zero_stage=2", "ppo.align_overflow=true"),
    ],
)
def test_all_three_steps_on_one_gpu(features, tmp_path: Path):
    folder = tmp_path / "run"
    assignments = [part for value in (*SMALL, *features) for part in ("--set", value)]
    dschat = Path(sys.executable).parent / "dschat"
    ended = subprocess.run(
        [dschat, "run", "--profile", "tiny", "--output", folder, *assignments],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = (folder / "step3-rlhf/metrics.jsonl").read_text().splitlines()
    records = [json.loads(row) for row in rows]
    steps = [record for record in records if record["kind"] == "metrics"]
    assert [record["step"] for record in steps] == [0, 1]
    assert abs(steps[0]["kl"]) < 0.1
    log = (folder / "step3-rlhf/training.log").read_text()
    assert "switched itself off" not in log
