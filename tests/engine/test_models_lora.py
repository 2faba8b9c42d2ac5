"""Adapters: targets, switching them off, merging; parameter groups."""

from __future__ import annotations

import pytest
import torch

from engine.config.schema import LoraConfig
from engine.generation.packed import effective_weight
from engine.models.folders import ModelError
from engine.models.load import load_causal_lm
from engine.models.lora import (
    adapters_off,
    add_lora,
    describe_lora,
    lora_layers,
    merged_tensors,
    parameter_groups,
)
from engine.models.reward import RewardModel

IDS = torch.randint(2, 264, (2, 9), generator=torch.Generator().manual_seed(1))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


def with_effect(model):
    for index, layer in enumerate(lora_layers(model)):
        weight = layer.lora_B["default"].weight
        generator = torch.Generator().manual_seed(index)
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def merged_state_dict(model) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {name: each.value(each.inputs) for name, each in merged_tensors(model).items()}


@pytest.fixture(params=["llama", "opt", "gpt2"])
def path(request, tiny_model) -> str:
    return tiny_model(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_off_is_the_base_bit_for_bit_also_after_an_exception(path, dtype):
    model = load_causal_lm(path, dtype)
    base = logits(model)
    with_effect(add_lora(model, LoraConfig(rank=2, only=True)))
    adapted = logits(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not torch.equal(adapted, base)
    with adapters_off(model), adapters_off(model):
        assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), adapted)

    def fail():
        with adapters_off(model):
            assert torch.equal(logits(model), base)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert torch.equal(logits(model), adapted)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trained


def test_adapters_cannot_be_switched_off_where_there_are_none(path):
    with (
        pytest.raises(ModelError, match="no adapters"),
        adapters_off(load_causal_lm(path, torch.float32)),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_fresh_adapters_changes_no_bit(path, dtype):
    model = load_causal_lm(path, dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    merged = merged_state_dict(add_lora(model, LoraConfig(rank=2)))
    assert merged.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in merged.items())


def test_merging_in_bf16_rounds_once(path):
    """Merged in bf16, weights are the rounded ones of the same merge in fp32."""
    half = with_effect(add_lora(load_causal_lm(path, torch.bfloat16), LoraConfig(rank=2, alpha=8)))
    single = add_lora(load_causal_lm(path, torch.float32), LoraConfig(rank=2, alpha=8))
    single.load_state_dict(half.state_dict())
    rounded = merged_state_dict(single)
    for name, value in merged_state_dict(half).items():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, rounded[name].bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_generation_reads_the_weights_that_saving_writes(path, dtype):
    model = with_effect(add_lora(load_causal_lm(path, dtype), LoraConfig(rank=2, alpha=6)))
    saved = merged_state_dict(model)
    for name, layer in model.named_modules():
        if layer not in lora_layers(model):
            continue
        read = effective_weight(layer)
        assert torch.equal(read, saved[f"{name}.weight"])
        # One rounding: half a unit in the last place from the exact sum, and fp32's own error.
        up, down = (part["default"].weight.double() for part in (layer.lora_B, layer.lora_A))
        update = (up @ down).T if layer.fan_in_fan_out else up @ down
        exact = layer.get_base_layer().weight.double() + 3 * update
        half_unit = torch.finfo(dtype).eps / 2 * exact.abs() + torch.finfo(dtype).smallest_normal
        assert bool(((read.double() - exact).abs() <= half_unit * 1.01 + 1e-6).all())


def test_adapters_have_the_format_of_the_base_and_the_base_trains_unless_only(path):
    model = load_causal_lm(path, torch.bfloat16)
    base = {name for name, _ in model.named_parameters()}
    add_lora(model, LoraConfig(rank=2))
    assert all(p.requires_grad for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    only = add_lora(load_causal_lm(path, torch.bfloat16), LoraConfig(rank=2, only=True))
    trained = {name for name, p in only.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert not trained & base


def test_own_patterns_choose_the_layers_and_are_described(tiny_model):
    model = load_causal_lm(tiny_model("llama"), torch.float32)
    add_lora(model, LoraConfig(rank=2, only=True, targets=["q_proj$", r"layers\.1\.mlp\.up_proj"]))
    adapted = {name for name, module in model.named_modules() if module in lora_layers(model)}
    assert adapted == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    }
    assert describe_lora(model) == "LoRA: 3 modules, 0.00 M trainable parameters"


def test_targets_that_match_nothing_are_refused(path):
    with pytest.raises(ModelError, match=r"decoder\.blocks.*match none.*layers are called.*\.0\."):
        add_lora(
            load_causal_lm(path, torch.float32), LoraConfig(rank=2, targets=["decoder.blocks"])
        )


def test_a_head_that_is_the_embedding_takes_no_adapters(tiny_model):
    config = LoraConfig(rank=2, targets=["q_proj$", "lm_head"])
    with pytest.raises(ModelError, match=r"match lm_head, whose weight is the embedding"):
        add_lora(load_causal_lm(tiny_model("llama"), torch.float32), config)
    untied = add_lora(load_causal_lm(tiny_model("qwen2"), torch.float32), config)
    assert "lm_head.weight" in merged_state_dict(untied)


@pytest.mark.parametrize("only", [False, True])
def test_groups_hold_each_trained_parameter_once(path, only):
    model = add_lora(
        RewardModel.from_pretrained(path, torch.float32), LoraConfig(rank=2, only=only)
    )
    groups = {
        group["name"]: group
        for group in parameter_groups(model, 1e-3, 0.1, lora_learning_rate=5e-3)
    }
    names = {id(p): name for name, p in model.named_parameters()}
    members = {kind: [names[id(p)] for p in group["params"]] for kind, group in groups.items()}
    listed = sorted(name for names_of_group in members.values() for name in names_of_group)
    assert listed == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    assert all(".lora_" in name for name in members["lora"])
    assert "model.score.weight" in members["decay"]
    assert (groups["lora"]["lr"], groups["decay"]["lr"]) == (5e-3, 1e-3)
    assert groups["decay"]["weight_decay"] == 0.1
    if only:
        assert groups.keys() == {"decay", "lora"}
    else:
        assert groups["no_decay"]["weight_decay"] == 0
        assert all("norm" in n or "ln" in n or n.endswith("bias") for n in members["no_decay"])
        assert not any("norm" in n or ".ln_" in n for n in members["decay"] + members["lora"])
