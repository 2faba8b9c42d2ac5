"""Models of families that no table knows train in every step, through the generic path."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
import torch
from small_run import configuration

from engine.generation.decode import ModuleDecoder
from engine.log.read import LogReader
from engine.models.folders import is_complete_model
from engine.models.load import load_causal_lm, load_config
from engine.models.probe import probe
from engine.models.reward import RewardModel
from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext
from engine.trainers.dpo import DPOTrainer
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer

TRAINERS = {"sft": SFTTrainer, "reward": RewardTrainer, "ppo": PPOTrainer, "dpo": DPOTrainer}
SETTINGS = {
    "phi3": (),
    "mpt": (
        "actor.zero_stage=3",
        "critic.zero_stage=3",
        "actor.lora.rank=2",
        "critic.lora.rank=2",
        "actor.gradient_checkpointing=true",
    ),
}


def read(log: str) -> list[dict]:
    reader = LogReader()
    records = [record for line in log.splitlines() for record in reader.feed(line)]
    return [*records, *reader.finish()]


@pytest.mark.slow
@pytest.mark.parametrize("family", SETTINGS)
def test_every_step_trains_and_tells_no_operations(family, tiny_model, tmp_path, group, capfd):
    path = tiny_model(family)
    settings = (f"models.actor={path}", "hybrid_engine.enabled=true", *SETTINGS[family])
    trainers = {}
    for step, trainer_type in TRAINERS.items():
        trainer = trainer_type(StepContext.create(configuration(*settings), tmp_path, step))
        assert trainer.train()
        trainer.save()
        trainers[step] = trainer
    log = capfd.readouterr().out

    # 1. All four learnt, and left what the next step and other tools load.
    first = load_causal_lm(path, torch.float32).state_dict()
    for folder in ("step1-sft/model", "step3-rlhf/actor", "step2-dpo/model"):
        assert is_complete_model(tmp_path / folder)
        saved = load_causal_lm(str(tmp_path / folder), torch.float32).state_dict()
        assert any(not torch.equal(saved[name], weight) for name, weight in first.items())
    RewardModel.from_pretrained(str(tmp_path / "step3-rlhf/critic"), torch.float32)

    # 2. Generation took the model's own forward, and its check found nothing.
    hybrid = trainers["ppo"].rollouts.hybrid
    assert (hybrid.enabled, hybrid.off_reason) == (True, None)
    with hybrid.rollout():
        assert isinstance(hybrid._decoder, ModuleDecoder)

    # 3. The log says that nobody knows the operations, and is read back.
    assert {*re.findall(r"TFLOPs: ([^,\n]+)", log)} == {"NA"}
    assert "nan" not in log
    told = [record for record in read(log) if record["kind"] in ("ppo", "throughput")]
    assert [record["kind"] for record in told] == ["throughput"] * 4 + ["ppo"] * 2 + [
        "throughput"
    ] * 2
    assert all(record["tflops"] is None for record in told)
    ppo = told[4]
    assert (ppo["generate_tflops"], ppo["train_tflops"], ppo["bandwidth_gb_s"]) == (None,) * 3

    # 4. Parameters are those of the whole model, without adapters, however it was sharded.
    own = sum(weight.numel() for weight in load_causal_lm(path, torch.float32).parameters())
    scoring = RewardModel.from_pretrained(str(tmp_path / "step2-reward/model"), torch.float32)
    assert trainers["sft"].parameters == trainers["ppo"].engine.actor_parameters == own
    assert trainers["reward"].parameters == sum(each.numel() for each in scoring.parameters())


@pytest.fixture
def config_of(tmp_path):
    """From a model type to a folder that holds a config of the library's defaults alone."""

    def write(model_type: str) -> str:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return str(tmp_path)

    return write


def test_what_a_family_can_be_is_found_without_its_weights(config_of, monkeypatch):
    def refuse(*_):
        raise AssertionError("a local config touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    found = probe(config_of("phi3"))
    assert (found["causal_lm"], found["reward_model"]) == (None, None)
    assert "model.layers.31.self_attn.qkv_proj" in found["linear_layers"]
    # no classifier, one with a head of another name, no causal language model
    assert "'codegen'" in probe(config_of("codegen"))["reward_model"]
    assert "'score'" in probe(config_of("ctrl"))["reward_model"]
    assert "T5Config" in probe(config_of("t5"))["causal_lm"]
    assert "no-such-type" in probe(config_of("no-such-type"))["causal_lm"]


def test_a_reward_model_without_a_classifier_is_refused_before_its_weights_are_read(config_of):
    folder = config_of("codegen")
    assert load_config(folder).model_type == "codegen"
    assert not list(Path(folder).glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"'codegen'.*cannot be reward models.*models\.reward"):
        RewardModel.from_pretrained(folder, torch.float32)
