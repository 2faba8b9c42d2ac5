"""The original's nightly matrix in step 3, on two families: every cell runs, or a rule refuses it.

ZeRO 2 and 3, hybrid engine, offload and LoRA, each on and off.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from launched import launch
from matrix_run import FAMILIES, Cell, cells, judge, options, run_cell, small_model, step_3, table
from resumed import records

from engine.config.rules import check
from engine.config.steps import BY_NAME
from engine.models.folders import is_complete_model
from engine.models.load import load_causal_lm
from engine.models.reward import RewardModel
from engine.trainers.context import StepContext
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """From a family to a model that is actor, reference, critic and reward model at once."""
    folder = tmp_path_factory.mktemp("models")
    paths = {family: small_model(family, folder / family) for family in FAMILIES}
    return paths.__getitem__


@pytest.fixture(autouse=True)
def local_rank(monkeypatch):
    """DeepSpeed looks for it whenever an engine is built."""
    monkeypatch.setenv("LOCAL_RANK", "0")


@pytest.fixture(scope="module")
def results(request):
    """Results by the name of their cell, printed as a table at the end."""
    collected = {}
    yield collected
    plugins = request.config.pluginmanager
    with plugins.getplugin("capturemanager").global_and_fixture_disabled():
        for line in ("", *table(collected)):
            plugins.getplugin("terminalreporter").write_line(line)


def supported(cell: Cell) -> bool:
    return not (cell.zero_stage == 2 and cell.hybrid and cell.offload and not cell.lora)


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(cells()), ids=lambda cell: cell.name)
def test_step_3_runs_every_combination_that_no_rule_refuses(cell, model, results, group, tmp_path):
    if not supported(cell):
        broken = check(options(model(cell.family), *cell.assignments()))
        assert [violation.id for violation in broken] == ["zero2-offload-hybrid-needs-lora"]
        mended = [f"{key}={value}" for key, value in broken[0].fix.items()]
        assert check(options(model(cell.family), *cell.assignments(), *mended)) == []
        results[cell.name] = str(broken[0])
        return
    result = run_cell(cell, model(cell.family), tmp_path)
    results[cell.name] = result
    judge(result)
    assert result["hybrid_ran"] == cell.hybrid


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(3, 1), (0, 3)])
def test_actor_and_critic_have_stages_of_their_own(stages, model, group, tmp_path):
    changes = [f"actor.zero_stage={stages[0]}", f"critic.zero_stage={stages[1]}"]
    trainer = step_3(model("llama"), tmp_path, *changes)
    assert trainer.engine.actor.zero_optimization_stage() == stages[0]
    assert trainer.engine.critic.zero_optimization_stage() == stages[1]
    # Frozen models follow: sharded where the trained one is.
    assert trainer.engine.ref.zero_optimization_stage() == (3 if stages[0] == 3 else 0)
    assert trainer.engine.reward.zero_optimization_stage() == (3 if stages[1] == 3 else 0)
    assert trainer.train()


# A covering subset for steps 1 and 2: stage, offload, LoRA rank, only LoRA, checkpointing.
EARLIER_STEPS = [
    (0, False, 0, False, False),
    (1, False, 4, False, True),
    (2, True, 4, True, True),
    (3, False, 4, True, False),
    (3, True, 0, False, True),
    (3, True, 4, False, False),
]


@pytest.mark.slow
@pytest.mark.parametrize("features", EARLIER_STEPS, ids=str)
@pytest.mark.parametrize("step", ["sft", "reward"])
def test_steps_1_and_2_run_the_features_too(step, features, model, group, tmp_path):
    stage, offload, rank, only, checkpointing = features
    role = "actor" if step == "sft" else "critic"
    source = model("opt" if step == "sft" else "llama")
    config = options(
        source,
        f"models.reward={source}",
        f"{role}.zero_stage={stage}",
        f"{role}.offload={offload}".lower(),
        f"{role}.lora.rank={rank}",
        f"{role}.lora.only={only}".lower(),
        f"{role}.gradient_checkpointing={checkpointing}".lower(),
        f"{step}.max_steps=3",
        f"{step}.micro_batch_size=4",
    )
    assert check(config) == []
    trainer_type = SFTTrainer if step == "sft" else RewardTrainer
    trainer = trainer_type(StepContext.create(config, tmp_path, step))
    assert trainer.train()
    trainer.save()
    folder = tmp_path / BY_NAME[step].folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(isinstance(row["loss"], float) for row in rows)
    assert is_complete_model(folder / "model")
    load = load_causal_lm if step == "sft" else RewardModel.from_pretrained
    before, after = (
        load(path, torch.float32).state_dict() for path in (source, str(folder / "model"))
    )
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".layers.0." in name for name in moved)
    if step == "reward":
        assert "model.score.weight" in moved
    if only:
        # Embeddings carry no adapters.
        assert not any("embed_tokens" in name for name in moved)


# Every pair of values of two features is there on two ranks.
ON_TWO_RANKS = [
    Cell("opt", 2, False, False, False),
    Cell("opt", 3, True, False, True),
    Cell("opt", 3, True, True, False),
    Cell("llama", 2, True, True, True),
    Cell("llama", 3, False, True, False),
    Cell("llama", 3, False, False, True),
    Cell("llama", 2, True, False, False),
]


@pytest.fixture(scope="module")
def two_ranks(model, tmp_path_factory):
    """The folder in which two ranks left what they ran: starting them takes long."""
    folder = tmp_path_factory.mktemp("two-ranks")
    plan = [{"cell": asdict(cell), "model": model(cell.family)} for cell in ON_TWO_RANKS]
    (folder / "plan.json").write_text(json.dumps(plan))
    launch(Path(__file__).with_name("matrix_worker.py"), folder)
    return folder


@pytest.mark.slow
def test_two_ranks_run_a_covering_subset(two_ranks, results):
    for line in (two_ranks / "results.jsonl").read_text().splitlines():
        result = json.loads(line)
        results[result["cell"] + " two ranks"] = result
        judge(result)
    assert len((two_ranks / "results.jsonl").read_text().splitlines()) == len(ON_TWO_RANKS)


@pytest.mark.slow
def test_ranks_learn_from_answers_that_are_eos_alone(two_ranks):
    rows = records(two_ranks / "empty", "ppo")
    assert [row["empty_answers"] for row in rows] == [2, 4]
    for row in rows:
        for model in ("actor", "critic"):
            assert math.isfinite(row[f"{model}_loss"])
            assert row[f"{model}_gradient_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("step", ["sft", "ppo"])
def test_under_zero_3_on_two_ranks_a_resumed_step_equals_an_uninterrupted_one(two_ranks, step):
    whole, broken = (records(two_ranks / name, step) for name in ("whole", "broken"))
    assert [row["step"] for row in whole if row["kind"] == "metrics"] == [0, 1, 2, 3]
    assert len(broken) == len(whole)
    for found, expected in zip(broken, whole, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["sft", "ppo"])
def test_two_ranks_hand_tensors_of_their_device_to_every_collective(two_ranks, step):
    """NCCL takes no others: the fake device raises in the worker."""
    steps = [row["step"] for row in records(two_ranks / "fake-cuda", step) if "total_steps" in row]
    assert steps == [0, 1]
