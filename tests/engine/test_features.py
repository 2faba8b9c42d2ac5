"""DeepSpeed's features one by one: what each must show, and what is refused."""

from __future__ import annotations

import gc
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from matrix_run import options, small_model, step_3
from mixz_run import LORA, losses
from peft import PeftModel
from small_run import configuration
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.config.rules import ModelFacts, check
from engine.models.load import ModelError
from engine.trainers import engines
from engine.trainers.context import StepContext
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return small_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def local_rank(monkeypatch):
    """DeepSpeed looks for it whenever an engine is built."""
    monkeypatch.setenv("LOCAL_RANK", "0")


def sft(model: str, run: Path, *changes: str) -> SFTTrainer:
    config = options(model, "sft.max_steps=10", "data.eval_rows=4", *changes)
    return SFTTrainer(StepContext.create(config, run, "sft"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ten_steps_lose_alike_under_every_stage(stage, model, group, tmp_path):
    for name in (0, stage):
        sft(model, tmp_path / str(name), f"actor.zero_stage={name}").train()
    plain, sharded = losses(tmp_path / "0"), losses(tmp_path / str(stage))
    assert len(plain) == 10
    assert plain[-1] < plain[0]
    assert sharded == pytest.approx(plain, abs=1e-4)


def live_bytes() -> int:
    """What the storages of all tensors hold. Peaks of a process vary with the heap and the load."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.slow
def test_a_shared_reference_saves_its_weights(group, tmp_path):
    actor = small_model("llama", tmp_path / "actor", hidden=512, inner=2048, layers=8)
    reward = small_model("llama", tmp_path / "reward")
    held = {}
    for share in ("true", "false"):
        before = live_bytes()
        trainer = step_3(
            actor,
            tmp_path / share,
            f"models.trained_reward={reward}",
            "actor.lora.rank=2",
            "actor.lora.only=true",
            f"ref.share_actor={share}",
            "ppo.max_steps=1",
        )
        trainer.train()
        held[share] = live_bytes() - before
        weights = trainer.engine.actor.module.parameters()
        size = sum(p.numel() * p.element_size() for p in weights)
        if share == "true":
            metrics = (tmp_path / share / "step3-rlhf/metrics.jsonl").read_text().splitlines()
            assert json.loads(metrics[0])["kl"] == 0
        del trainer, weights
    assert 0.98 < (held["false"] - held["true"]) / size < 1.02


@pytest.mark.parametrize("only", ["true", "false"])
def test_logged_learning_rates_of_lora_are_those_configured(only, model, group, tmp_path, capfd):
    trainer = step_3(
        model,
        tmp_path,
        *(f"{role}.lora.rank=2" for role in ("actor", "critic")),
        *(f"{role}.lora.only={only}" for role in ("actor", "critic")),
        "actor.lora.learning_rate=3e-4",
        "critic.lora.learning_rate=7e-4",
        "actor.learning_rate=1e-5",
        "critic.learning_rate=2e-5",
        "logging.optimizer_interval=1",
        "ppo.max_steps=2",
    )
    trainer.train()
    lines = [line for line in capfd.readouterr().out.splitlines() if "lr=[" in line]
    rates = [
        [float(number) for number in re.search(r"lr=\[([^\]]*)\]", line)[1].split(",")]
        for line in lines
    ]
    # The head of the critic trains beside the adapters, as a decayed weight.
    expected = (
        [[3e-4], [2e-5, 7e-4]] if only == "true" else [[1e-5, 1e-5, 3e-4], [2e-5, 2e-5, 7e-4]]
    )
    assert rates == expected * 2


def test_a_pattern_that_matches_no_layer_is_refused_before_training(model, group, tmp_path):
    with pytest.raises(ModelError, match=r"no_such_layer.*match none"):
        step_3(model, tmp_path, "actor.lora.rank=2", "actor.lora.targets=no_such_layer")
    assert not (tmp_path / "step3-rlhf/metrics.jsonl").exists()


@pytest.mark.parametrize("role", ["ref", "reward"])
def test_reference_and_reward_model_are_offloaded_separately(role, model, group, tmp_path):
    key = "ref.offload" if role == "ref" else "ref.offload_reward"
    plain = step_3(model, tmp_path / "plain")
    trainer = step_3(model, tmp_path / "offload", f"{key}=true")
    engines = {"ref": trainer.engine.ref, "reward": trainer.engine.reward}
    for name, engine in engines.items():
        where = engine.zero_offload_param()
        assert (where is not None and where.device == "cpu") == (name == role)
    prompts = plain.prompt_batches(plain.batches.epoch(0)[0])
    first, second = (t.generate_experience(prompts)[0] for t in (plain, trainer))
    torch.testing.assert_close(first.scores, second.scores)
    torch.testing.assert_close(first.ref_log_probs, second.ref_log_probs)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (["actor.zero_quantized_weights=true", "actor.zero_stage=2"], "zero-plus-plus-needs-zero3"),
        (["critic.zero_quantized_gradients=true"], "zero-plus-plus-needs-zero3"),
        (
            ["actor.hierarchical_partition=true", "actor.zero_stage=3"],
            "hierarchical-partition-needs-nodes",
        ),
        (["actor.nvme_path=/scratch", "actor.zero_stage=3"], "nvme-needs-zero3-and-offload"),
        (
            [*LORA, "mixz.enabled=true", "actor.offload=true", "actor.nvme_path=/scratch"],
            "mixz-not-on-nvme",
        ),
        (
            [
                "ema.enabled=true",
                "actor.zero_stage=3",
                "actor.offload=true",
                "actor.nvme_path=/scratch",
            ],
            "ema-not-on-nvme",
        ),
        (["mixz.enabled=true", "actor.zero_stage=3"], "mixz-needs-zero3-and-lora"),
        (["critic.lora.export=true"], "adapter-export-needs-only-lora"),
        (["critic.offload=true"], "offload-needs-zero2"),
    ],
)
def test_each_rule_refuses_and_its_change_mends(changes, rule):
    broken = check(configuration(*changes))
    assert [violation.id for violation in broken] == [rule]
    mended = [f"{key}={value}".replace("True", "true") for key, value in broken[0].fix.items()]
    assert check(configuration(*changes, *mended), ModelFacts()) == []


def test_what_the_device_lacks_is_said_before_loading(model, group, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "why_not_loaded", lambda builder: f"no {builder}")
    files = ("actor.zero_stage=3", "actor.offload=true", f"actor.nvme_path={tmp_path}")
    with pytest.raises(ValueError, match=r"no AsyncIOB.*libaio-dev.*actor\.nvme_path=null"):
        sft(model, tmp_path, *files)
    with pytest.raises(ValueError, match=r"no QuantizerB.*zero_quantized_gradients=false"):
        sft(model, tmp_path, "actor.zero_stage=3", "actor.zero_quantized_gradients=true")


@pytest.mark.parametrize("step", ["sft", "reward"])
def test_dropout_field_reaches_every_layer(step, tmp_path, group):
    source = small_model("opt", tmp_path / "opt")
    role = "actor" if step == "sft" else "critic"
    config = options(source, f"models.reward={source}", f"{role}.dropout=0.25")
    trainer_type = SFTTrainer if step == "sft" else RewardTrainer
    trainer = trainer_type(StepContext.create(config, tmp_path, step))
    named = [getattr(module, "dropout", None) for module in trainer.engine.module.modules()]
    rates = {rate for rate in named if isinstance(rate, float)}
    assert rates == {0.25}


@pytest.mark.parametrize("stage", [0, 3])
def test_exported_adapters_on_their_base_are_the_merged_models(stage, model, group, tmp_path):
    trainer = step_3(
        model,
        tmp_path,
        *(f"{role}.zero_stage={stage}" for role in ("actor", "critic")),
        *(f"{role}.lora.rank=2" for role in ("actor", "critic")),
        *(f"{role}.lora.only=true" for role in ("actor", "critic")),
        *(f"{role}.lora.export=true" for role in ("actor", "critic")),
        "ppo.max_steps=1",
    )
    trainer.train()
    trainer.save()
    ids = torch.arange(2, 14).reshape(2, 6)
    for name, auto_class in (
        ("actor", AutoModelForCausalLM),
        ("critic", partial(AutoModelForSequenceClassification.from_pretrained, num_labels=1)),
    ):
        load = getattr(auto_class, "from_pretrained", auto_class)
        adapted = PeftModel.from_pretrained(
            load(model), str(tmp_path / f"step3-rlhf/{name}_adapters")
        )
        merged = load(str(tmp_path / f"step3-rlhf/{name}"))
        base = load(model)
        results = [each.eval()(input_ids=ids).logits for each in (adapted, merged, base)]
        torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)
        assert not torch.equal(results[1], results[2])
