"""Stopped and resumed steps equal uninterrupted ones, to the last digit on one rank."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import resumed
import torch
from resumed import records
from small_run import configuration

from engine import checkpoint
from engine.config.steps import BY_NAME
from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext
from engine.trainers.sft import SFTTrainer

LONGER = ("sft.max_steps=4", "reward.max_steps=4", "ppo.max_steps=4", "reward.eval_interval=2")


def train(folder: Path, step: str, *assignments: str, stop_after: int | None = None) -> bool:
    return resumed.train(configuration(*LONGER, *assignments), folder, step, stop_after)


@pytest.fixture
def fresh(run, tmp_path):
    """A run whose steps 1 and 2 left their models, and nothing else."""

    def make(name: str) -> Path:
        for step in ("sft", "reward"):
            source = run / BY_NAME[step].folder / "model"
            shutil.copytree(source, tmp_path / name / BY_NAME[step].folder / "model")
        return tmp_path / name

    return make


def only_adapters(stage: int) -> tuple[str, ...]:
    options = (f"zero_stage={stage}", "lora.rank=2", "lora.only=true", "lora.learning_rate=0.01")
    return tuple(f"{role}.{option}" for role in ("actor", "critic") for option in options)


FEATURES = [
    (),
    *(
        pytest.param(features, marks=pytest.mark.slow)
        for features in (
            ("actor.zero_stage=2", "critic.zero_stage=3"),
            only_adapters(0),
            only_adapters(2),
            only_adapters(3),
        )
    ),
]


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("step", ["sft", "reward", "ppo"])
def test_a_resumed_step_equals_an_uninterrupted_one(step, features, fresh):
    options = (
        *features,
        "ppo.kl_target=1",
        "ema.enabled=true",
        "ppo.normalize_reward=true",
        "actor.dropout=0.1",
    )
    whole, broken = fresh("whole"), fresh("broken")
    assert train(whole, step, *options)
    assert not train(broken, step, *options, stop_after=2)
    assert train(broken, step, *options)
    assert records(broken, step) == records(whole, step)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_weights_are_not_written(stage, fresh):
    folder = fresh("only")
    options = ("ema.enabled=true", "checkpoint.interval=1", *only_adapters(stage))
    trainer = PPOTrainer(StepContext.create(configuration(*options), folder, "ppo"))
    parameters = list(trainer.engine.actor.module.parameters())
    frozen = sum(4 * getattr(p, "ds_numel", p.numel()) for p in parameters if not p.requires_grad)
    trainer.checkpoints.after_step(1, trainer.state, 0.0)
    ((_, manifest),) = trainer.checkpoints.whole()
    assert frozen > 3_000_000
    # DeepSpeed's files of two engines have some 100 kB each beside what trains.
    assert manifest.size < frozen / 4


def test_a_checkpoint_of_adapters_is_refused_on_another_base(fresh):
    folder = fresh("base")
    config = configuration("checkpoint.interval=1", *only_adapters(0))
    for base in ("the same", "another"):
        trainer = SFTTrainer(StepContext.create(config, folder, "sft"))
        if base == "another":
            frozen = trainer.engine.module.get_input_embeddings().weight
            frozen.data[-1, -1] += 1
            with pytest.raises(ValueError, match=r"other frozen weights.*same base model"):
                trainer.checkpoints.resume()
            return
        trainer.checkpoints.after_step(1, trainer_state, 0.0)
        assert trainer.checkpoints.resume().step == 1


def test_a_checkpoint_of_another_device_is_read(fresh, monkeypatch):
    trainer = PPOTrainer(
        StepContext.create(configuration("ema.enabled=true"), fresh("device"), "ppo")
    )
    with monkeypatch.context() as patch:
        # As if every tensor had been on a GPU, which this machine may lack.
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:7")
        trainer.checkpoints._save(1, trainer.state(), 0.0)
    resumed = trainer.checkpoints.resume().state
    assert {shard.device.type for shard in resumed["actor_ema"]} == {"cpu"}
    trainer.load_state(resumed)


@pytest.mark.slow
def test_steps_after_the_last_checkpoint_are_done_again_and_told_once(fresh):
    whole, broken = fresh("whole"), fresh("broken")
    assert train(whole, "ppo")
    assert not train(broken, "ppo", "checkpoint.interval=1", stop_after=3)
    newest = sorted((broken / "step3-rlhf/checkpoints").iterdir())[-1]
    # As if the process had been killed after step 3, with step 2 the newest whole checkpoint.
    shutil.rmtree(newest)
    assert train(broken, "ppo")
    assert records(broken, "ppo") == records(whole, "ppo")
    answers = [(folder / "step3-rlhf/rollouts.jsonl").read_text() for folder in (whole, broken)]
    assert answers[0] == answers[1]


def test_the_newest_and_the_best_are_kept(fresh):
    folder = fresh("kept")
    options = ("checkpoint.interval=1", "checkpoint.keep_last=1", "sft.max_steps=4")
    trainer = SFTTrainer(StepContext.create(configuration(*options), folder, "sft"))
    checkpoints = trainer.checkpoints
    for step, score in enumerate((None, 0.1, 0.9, math.nan, 0.5, None), start=1):
        checkpoints.after_step(step, trainer_state, score)
    assert [manifest.step for _, manifest in checkpoints.whole()] == [3, 6]


def trainer_state() -> dict:
    return {"perplexity": 1.0}


def test_a_kill_while_writing_leaves_the_older_checkpoint(fresh):
    folder = fresh("killed")
    options = ("checkpoint.interval=1", "sft.max_steps=4")
    trainer = SFTTrainer(StepContext.create(configuration(*options), folder, "sft"))
    trainer.checkpoints.after_step(1, trainer_state, 0.0)
    half = folder / "step1-sft/checkpoints/.step-00000002.new"
    half.mkdir()
    (half / "rank-0.pt").write_bytes(b"half")
    whole = folder / "step1-sft/checkpoints/step-00000002"
    whole.mkdir()
    assert [manifest.step for _, manifest in trainer.checkpoints.whole()] == [1]
    assert trainer.checkpoints.resume().step == 1


def test_another_number_of_ranks_is_refused(fresh):
    folder = fresh("ranks")
    trainer = SFTTrainer(StepContext.create(configuration("checkpoint.interval=1"), folder, "sft"))
    trainer.checkpoints.after_step(1, trainer_state, 0.0)
    manifest = folder / "step1-sft/checkpoints/step-00000001/checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"ranks": 1', '"ranks": 2'))
    with pytest.raises(ValueError, match=r"launch\.num_accelerators"):
        trainer.checkpoints.resume()


@pytest.mark.slow
def test_room_is_kept_for_the_average_too(fresh, monkeypatch, capfd):
    options = configuration("ema.enabled=true", "dtype=bf16", "checkpoint.interval=1")

    def trained(name: str) -> PPOTrainer:
        trainer = PPOTrainer(StepContext.create(options, fresh(name), "ppo"))
        # Adam's moments are there after the first step.
        trainer.train_step(0, 0, trainer.batches.epoch(0)[0])
        return trainer

    trainer = trained("first")
    trainer.checkpoints.after_step(1, trainer.state, 0.0)
    ((_, manifest),) = trainer.checkpoints.whole()
    # Too little for an average of 3.7 MB.
    free = iter([manifest.size - 2_000_000])
    usage = shutil.disk_usage

    def disk_usage(path):
        real = usage(path)
        return real._replace(free=next(free, real.free))

    monkeypatch.setattr("engine.checkpoint.shutil.disk_usage", disk_usage)
    monkeypatch.setattr("engine.checkpoint._SECONDS_BETWEEN_LOOKS", 0.01)
    trainer = trained("second")
    trainer.checkpoints.after_step(1, trainer.state, 0.0)
    assert capfd.readouterr().out.count("paused: no room for the checkpoint") == 1


def test_a_full_disk_pauses_until_there_is_room(fresh, monkeypatch, capfd):
    folder = fresh("full")
    trainer = SFTTrainer(StepContext.create(configuration("checkpoint.interval=1"), folder, "sft"))
    free = iter([0, 0])
    usage = shutil.disk_usage

    def disk_usage(path):
        real = usage(path)
        return real._replace(free=next(free, real.free))

    monkeypatch.setattr("engine.checkpoint.shutil.disk_usage", disk_usage)
    monkeypatch.setattr("engine.checkpoint._SECONDS_BETWEEN_LOOKS", 0.01)
    trainer.checkpoints.after_step(1, trainer_state, 0.0)
    assert [manifest.step for _, manifest in trainer.checkpoints.whole()] == [1]
    assert capfd.readouterr().out.count("paused: no room for the checkpoint") == 2


def test_records_with_separators_in_their_text_are_kept_and_torn_ones_dropped(tmp_path):
    file = tmp_path / "rollouts.jsonl"
    rows = [{"step": step, "answer": f"one\u2028two\x85{step}"} for step in range(4)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    torn = "\n".join(lines).encode()[:-3] + "\u2028".encode()[:2]
    file.write_bytes(torn)
    checkpoint._forget_from(file, 2)
    assert [json.loads(line) for line in file.read_text().split("\n") if line] == rows[:2]
    file.write_text("\n".join(lines) + "\n")
    checkpoint._forget_from(file, 9)
    assert [json.loads(line) for line in file.read_text().split("\n") if line] == rows
