"""Step 3 without a critic on two ranks: features, resume, and groups that stay whole."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from groups_worker import CASES
from launched import launch
from matrix_run import small_model
from resumed import records

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parent / "groups_worker.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the worker left."""
    folder = tmp_path_factory.mktemp("groups")
    text = json.dumps({"text": "the sun is hot and the sea is wet. " * 40}) + "\n"
    (folder / "text.jsonl").write_text(text * 20)
    launch(WORKER, folder, small_model("llama", folder / "model"))
    return folder


@pytest.mark.parametrize("algorithm", CASES)
def test_features_work_without_a_critic(algorithm, folder):
    rows = records(folder / algorithm, "ppo")
    assert len(rows) >= 3
    for row in rows:
        assert math.isfinite(row["actor_loss"])
        assert row["actor_gradient_norm"] > 0
        assert row["first_ratio_mean"] == pytest.approx(1.0, abs=0.01)
        assert math.isfinite(row["unsupervised_loss"])
        assert not [name for name in row if "critic" in name]
    # 8 answers a step of both ranks
    assert rows[0]["num_tokens"] >= 8 * 2
    if algorithm == "dapo":
        assert sum(row["resampled_groups"] for row in rows) > 0


def test_a_resumed_run_equals_an_uninterrupted_one(folder):
    """With prompts drawn for groups without spread, the average, and adapters as reference."""
    whole, broken = (records(folder / name, "ppo") for name in ("dapo", "broken"))
    assert len(whole) == 4
    assert broken == whole


def test_a_group_is_whole_on_its_rank_and_so_are_its_advantages(folder):
    """Trap: members on several ranks would each know but a part of their group."""
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]
    assert not set(ranks[0]["rows"]) & set(ranks[1]["rows"])
    for rank, found in enumerate(ranks):
        width = found["ids"].shape[1] - found["mask"].shape[1]
        prompts = found["ids"][:, :width].tolist()
        assert prompts[0] == prompts[1]
        assert prompts[2] == prompts[3]
        assert prompts[0] != prompts[2]
        # rewards 0, 0.5, 1, 1.5 on rank 0 and twice that on rank 1
        gap = (1.0 + rank) / 2
        expected = gap / 2 / (gap / math.sqrt(2) + 1e-4)
        first = found["advantages"][:, 0].tolist()
        assert first == pytest.approx([-expected, expected, -expected, expected], rel=1e-5)
