"""A sweep of one cell on real steps: its files agree with what the steps themselves wrote."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from matrix_run import small_model

from dschat_tui.sweep.results import WARMUP_STEPS
from dschat_tui.sweep.state import SweepFolder

pytestmark = pytest.mark.slow

STEPS = WARMUP_STEPS + 2
ROWS = 4


def test_a_sweep_measures_what_its_steps_tell(tmp_path):
    model = small_model("llama", tmp_path / "model")
    output = tmp_path / "sweep"
    settings = {
        **{f"models.{key}": model for key in ("actor", "sft", "trained_reward")},
        **{"ppo.rollout_batch_size": ROWS, "ppo.batch_size": ROWS, "ppo.max_answer_length": 6},
        "ppo.normalize_reward": "false",
    }
    given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    arguments = ["--axis", "hybrid_engine=true", "--max-steps", str(STEPS)]
    ended = subprocess.run(
        [Path(sys.executable).parent / "dschat", "sweep", "--output", output, *arguments, *given],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip().splitlines()[-1] == "1 cell: 1 done"
    cells = SweepFolder(output).read()["cells"]
    with (output / "sweep.csv").open(newline="") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert [cell["name"] for cell in cells] == list(rows) == ["he_true"]
    for cell in cells:
        lines = (output / cell["name"] / "step3-rlhf/metrics.jsonl").read_text().splitlines()
        written = [json.loads(line) for line in lines]
        kept = [r for r in written if r["kind"] == "metrics"][WARMUP_STEPS:]
        seconds = sum(record["e2e_s"] for record in kept)
        assert cell["measured_steps"] == len(kept) == 2
        # the log has six digits
        assert cell["samples_per_s"] == pytest.approx(len(kept) * ROWS / seconds, rel=1e-4)
        generate = sum(record["generate_s"] for record in kept) / len(kept)
        assert cell["generate_s"] == pytest.approx(generate, rel=1e-4)
        assert cell["reward"] == pytest.approx(kept[-1]["reward"], rel=1e-4, abs=1e-6)
        # torch alone takes more
        assert cell["peak_host_bytes"] > 2**27
        assert float(rows[cell["name"]]["samples_per_s"]) == cell["samples_per_s"]
        assert f"`{cell['name']}`" in (output / "report.md").read_text()
