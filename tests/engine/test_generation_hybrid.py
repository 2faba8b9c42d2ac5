"""The hybrid engine on plain models, and under DeepSpeed in processes of their own."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from launched import launch
from peft.tuners.lora import LoraLayer
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from engine.config.schema import HybridEngineConfig
from engine.generation import hybrid as hybrid_module
from engine.generation.hybrid import HybridEngine
from engine.generation.packed import GatherFailed, PackedDecoder
from engine.generation.plain import generate
from engine.generation.sampling import Sampling

SAMPLING = Sampling(max_new_tokens=10, eos_ids=(3,), pad_id=1)
GREEDY = dataclasses.replace(SAMPLING, greedy=True, ignore_eos=True)
IDS = {"vocab_size": 50, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
WORKER = Path(__file__).with_name("generation_hybrid_worker.py")


def build(family: str, lora: bool) -> Any:
    torch.manual_seed(0)
    if family == "opt":
        model: Any = OPTForCausalLM(
            OPTConfig(
                hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
                word_embed_proj_dim=16, max_position_embeddings=64, dropout=0.1, init_std=0.3,
                **IDS,
            )
        )  # fmt: skip
    elif family == "llama":
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, initializer_range=0.3, **IDS,
            )
        )  # fmt: skip
    else:
        model = GPT2LMHeadModel(
            GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3, **IDS)
        )
    if lora:
        targets = {"opt": ["q_proj", "fc1"], "llama": ["v_proj", "gate_proj"]}
        config = peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=targets.get(family, ["c_attn", "c_fc"]),
            init_lora_weights=False,
            fan_in_fan_out=family == "gpt2",
        )
        peft.inject_adapter_in_model(config, model)
    return model.train()


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, 50, (5, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return ids.masked_fill(mask == 0, 1), mask


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def state(model: Any) -> list[Any]:
    tensors = [(p.data_ptr(), p.detach().clone(), p.requires_grad) for p in model.parameters()]
    modules = [
        (m.training, getattr(m, "_disable_adapters", None), len(m._forward_hooks))
        for m in model.modules()
    ]
    return [tensors, modules]


def same(before: list[Any], after: list[Any]) -> bool:
    return before[1] == after[1] and all(
        x[0] == y[0] and torch.equal(x[1], y[1]) and x[2] == y[2]
        for x, y in zip(before[0], after[0], strict=True)
    )


@pytest.mark.parametrize("unpin", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", ["opt", "llama", "gpt2"])
def test_tokens_as_plain_and_the_model_as_before(family: str, lora: bool, unpin: bool) -> None:
    model = build(family, lora)
    ids, mask = prompts()
    expected = generate(model, ids, mask, SAMPLING, seeded())
    before = state(model)
    config = HybridEngineConfig(
        enabled=True, unpin_actor_parameters=unpin, release_inference_cache=unpin
    )
    engine = HybridEngine(model, config)
    for _ in range(2):
        with engine.rollout():
            result = engine.generate(ids, mask, SAMPLING, seeded())
            assert torch.equal(result.answers, expected.answers)
            torch.testing.assert_close(result.log_probs, expected.log_probs, atol=2e-5, rtol=1e-4)
        assert same(before, state(model))
    assert engine.off_reason is None
    assert torch.equal(engine.generate(ids, mask, SAMPLING, seeded()).answers, expected.answers)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_new_weights_are_seen_by_the_next_rollout(family: str) -> None:
    model = build(family, lora=True)
    ids, mask = prompts()
    engine = HybridEngine(model)
    with engine.rollout():
        first = engine.generate(ids, mask, GREEDY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    with engine.rollout():
        second = engine.generate(ids, mask, GREEDY)
    assert not torch.equal(first.answers, second.answers)
    assert torch.equal(second.answers, generate(model, ids, mask, GREEDY).answers)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_error_within_a_rollout_restores_everything(family: str) -> None:
    model = build(family, lora=True)
    ids, mask = prompts()
    engine = HybridEngine(model)
    before = state(model)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), engine.rollout():
            1 / int(engine.generate(ids, mask, SAMPLING).log_probs[0, 0] > 0)
        assert same(before, state(model))
    with pytest.raises(IndexError), engine.rollout():
        engine.generate(ids + 50, mask, SAMPLING)
    assert same(before, state(model))
    expected = generate(model, ids, mask, GREEDY).answers
    assert torch.equal(engine.generate(ids, mask, GREEDY).answers, expected)


def test_adapters_that_are_off_stay_off() -> None:
    model = build("llama", lora=True)
    ids, mask = prompts()
    with_adapters = generate(model, ids, mask, GREEDY).answers
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.enable_adapters(False)
    engine = HybridEngine(model)
    result = engine.generate(ids, mask, GREEDY)
    assert engine.off_reason is None
    assert torch.equal(result.answers, generate(model, ids, mask, GREEDY).answers)
    assert not torch.equal(result.answers, with_adapters)


def test_wrong_tokens_switch_it_off_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", lora=True)
    ids, mask = prompts()
    # As if LoRA had not been merged.
    monkeypatch.setattr(
        "engine.generation.packed.effective_weight",
        lambda m: getattr(m, "base_layer", m).weight.detach(),
    )
    engine = HybridEngine(model)
    with engine.rollout():
        result = engine.generate(ids, mask, SAMPLING, seeded())
    assert not engine.enabled
    assert "differ from plain generation" in str(engine.off_reason)
    assert torch.equal(result.answers, generate(model, ids, mask, SAMPLING, seeded()).answers)


def test_near_ties_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", lora=False)
    model.lm_head.weight.data[10:20] = model.lm_head.weight.data[10] * (
        1 + 1e-7 * torch.randn(10, 1)
    )
    ids, mask = prompts()
    engine = HybridEngine(model)
    engine.generate(ids, mask, GREEDY)
    assert engine.off_reason is None


def test_a_decoder_that_fails_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise NotImplementedError("no such cache")

    model = build("gpt2", lora=True)
    before = state(model)
    monkeypatch.setattr(hybrid_module.ModuleDecoder, "step", fail)
    engine = HybridEngine(model)
    ids, mask = prompts()
    with engine.rollout():
        assert engine.generate(ids, mask, SAMPLING).answers.shape[0] == 5
    assert engine.off_reason == "NotImplementedError: no such cache"
    assert same(before, state(model))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_gather_that_fails_is_no_verdict(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may wait in it: switched off, this rank would run into another collective."""

    def fail(parameters: list[Any]) -> None:
        raise MemoryError(f"no room for {len(parameters)} parameters")

    monkeypatch.setattr("deepspeed.zero.GatheredParameters", fail)
    model = build(family, lora=False)
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number
    with pytest.raises(GatherFailed, match="no room for"):
        HybridEngine(model).generate(*prompts(), SAMPLING)


def test_there_are_never_two_copies_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[PackedDecoder]] = []

    class OnlyOne(PackedDecoder):
        def __init__(self, *arguments: Any) -> None:
            assert not any(copy() for copy in copies)
            super().__init__(*arguments)
            copies.append(weakref.ref(self))

    monkeypatch.setattr(hybrid_module, "PackedDecoder", OnlyOne)
    engine = HybridEngine(build("llama", lora=True))
    for _ in range(2):
        with engine.rollout():
            engine.generate(*prompts(), SAMPLING, seeded())
    # the first answers the check, a second the prompts, a third the second rollout
    assert engine.off_reason is None
    assert len(copies) == 3


def test_switched_off_by_configuration_it_is_plain_generation() -> None:
    model = build("opt", lora=False)
    ids, mask = prompts()
    engine = HybridEngine(model, HybridEngineConfig(enabled=False))
    with engine.rollout():
        result = engine.generate(ids, mask, SAMPLING, seeded())
    assert torch.equal(result.answers, generate(model, ids, mask, SAMPLING, seeded()).answers)
    assert not engine.enabled
    assert engine.off_reason is None


def test_the_cache_is_released_only_if_asked() -> None:
    ids, mask = prompts()
    for release in (False, True):
        engine = HybridEngine(
            build("opt", lora=False),
            HybridEngineConfig(enabled=True, release_inference_cache=release),
        )
        with engine.rollout():
            engine.generate(ids, mask, SAMPLING)
            assert engine._cache._keys
        assert bool(engine._cache._keys) != release


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_under_deepspeed(ranks: int) -> None:
    output = launch(WORKER, ranks=ranks)
    # A launcher can exit with 0 although a rank was lost.
    assert output.count("all cases passed") == ranks
