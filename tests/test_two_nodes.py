"""Two nodes, both of them this machine, through the product's own multi_node deployment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_cluster import write_programs

pytestmark = pytest.mark.slow

SMALL = ("sft.max_steps=4", "sft.batch_size=16", "sft.warmup_steps=1", "data.eval_rows=32")


def dschat(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(Path(sys.executable).parent / "dschat"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def run_step_1(folder: Path, programs: Path, *assignments: str) -> list[dict[str, object]]:
    """What step 1 of `tiny` told in metrics.jsonl, without what depends on the clock."""
    settings = [part for value in (*SMALL, *assignments) for part in ("--set", value)]
    ended = dschat(
        "run", "--profile", "tiny", "--steps", "1", "--output", str(folder), *settings,
        path=programs,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = (folder / "step1-sft/metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_s"} for line in lines]


def test_two_nodes_learn_what_two_ranks_of_one_node_learn(tmp_path):
    programs = write_programs(tmp_path / "bin")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    one_node = run_step_1(
        tmp_path / "one", programs, "launch.deployment=single_node", "launch.num_accelerators=2"
    )
    two_nodes = run_step_1(
        tmp_path / "two", programs, "launch.deployment=multi_node", f"launch.hostfile={hostfile}"
    )
    assert len([row for row in one_node if row["kind"] == "metrics"]) == 4
    assert two_nodes == one_node

    document = json.loads(dschat("metrics", str(tmp_path / "two"), "--json", path=programs).stdout)
    log = document["steps"]["sft"]
    assert log["state"] == "ok"
    losses = [record["loss"] for record in log["records"] if record["kind"] == "metrics"]
    assert losses == [
        pytest.approx(row["loss"], rel=1e-5) for row in two_nodes if row["kind"] == "metrics"
    ]
    text = (tmp_path / "two/step1-sft/training.log").read_text()
    assert "node1: " in text
    assert "node2: " in text
