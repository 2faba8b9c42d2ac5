"""Ranks that wait while one works alone."""

import subprocess
import sys
from pathlib import Path

import pytest
from launched import free_environment

WORKER = Path(__file__).parent / "waiting_worker.py"


@pytest.mark.slow
def test_rank_0_may_work_alone_for_longer_than_a_collective_may_take(tmp_path):
    environment = free_environment()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        first, second = (process.communicate(timeout=200)[0] for process in ranks)
    finally:
        for process in ranks:
            process.kill()
    for output in (first, second):
        assert "operator OSError: no compiler for FusedAdamBuilder (rank 1)\n" in output
    assert "data made\ntext made\nworks made\nworks sum [3.0]" in first, first
    assert "data found\ntext found\nworks found\nworks sum [3.0]" in second, second
    assert "fails OSError: no space for the model\nfails sum [3.0]" in first
    why = "rank 0 failed: OSError: no space for the model"
    assert f"fails RuntimeError: {why}\nfails sum [3.0]" in second
    assert "rank 0 ended while the others waited for it" in second
