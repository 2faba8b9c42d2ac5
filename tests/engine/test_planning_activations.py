"""Bytes of activations against what autograd saves and what the allocator sees."""

import peft
import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from engine.algorithms.language_modeling import causal_lm_loss
from engine.algorithms.log_probs import entropy, token_log_probs
from engine.planning import ModelShape, activations
from engine.planning.activations import (
    freed_blocks_per_token,
    logits_scoring_bytes,
    logits_training_bytes,
    saved_blocks_per_token,
)

ROWS, LENGTH = 3, 24
# Wider than the hidden states in fp32 and bf16, at most as wide as the inner layers in either.
WIDE = 257
LLAMA = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 128,
    "ffn_dim": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 128,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama with attention dropout": {"model_type": "llama", **LLAMA, "attention_dropout": 0.1},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 32},
    "gemma3": {"model_type": "gemma3_text", **LLAMA, "head_dim": 32},
    "opt with dropout": OPT,
    "opt": {**OPT, "dropout": 0.0},
    "gpt2 with dropout": GPT2,
    "gpt2": {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "activation_function": "gelu"},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 96,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 96,
        "hidden_size": 128,
        "n_layer": 3,
        "n_head": 4,
    },
}


def model_of(
    config: dict, layers: int, dtype: torch.dtype, adapters: bool
) -> transformers.PreTrainedModel:
    """A model in training, with adapters that train alone or without."""
    options = {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}
    made = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype).train()
    if adapters:
        lora = peft.LoraConfig(r=2, target_modules="all-linear")
        peft.inject_adapter_in_model(lora, model)
        model.to(dtype)
    return model


def saved_by_autograd(
    config: dict, layers: int, dtype: torch.dtype, adapters: bool = False
) -> list[int]:
    """Bytes of each tensor that a training forward pass keeps, parameters left out."""
    model = model_of(config, layers, dtype, adapters)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters()]}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.randint(3, 90, (ROWS, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert logits.requires_grad
    return [tensor.untyped_storage().nbytes() for tensor in kept.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_keeps_what_autograd_saves(name, dtype):
    config = CONFIGS[name]
    one, three = (saved_by_autograd(config, layers, dtype) for layers in (1, 3))
    blocks = saved_blocks_per_token(
        ModelShape.from_config(config), dtype.itemsize, LENGTH, on_cpu=True
    )
    for least in (0, WIDE * dtype.itemsize):
        planned = sum(size for size in blocks if size >= least)
        assert planned == pytest.approx(a_block(one, three, least), rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "opt"])
def test_a_block_with_a_frozen_base_keeps_what_autograd_saves(name, dtype):
    config = CONFIGS[name]
    one, three = (saved_by_autograd(config, layers, dtype, adapters=True) for layers in (1, 3))
    shape = ModelShape.from_config(config)
    blocks = saved_blocks_per_token(
        shape,
        dtype.itemsize,
        LENGTH,
        on_cpu=True,
        lora_rank=2,
        lora_layers=len(shape.block),
        frozen_base=True,
    )
    assert sum(blocks) == pytest.approx(a_block(one, three), rel=0.03)


def a_block(one: list[int], three: list[int], least: int = 0) -> float:
    """Bytes per token and block, of tensors that have `least` bytes per token or more."""
    tokens = ROWS * LENGTH
    of_one, of_three = (sum(s for s in sizes if s >= least * tokens) for sizes in (one, three))
    return (of_three - of_one) / 2 / tokens


def freed_by_forward(config: dict, layers: int, dtype: torch.dtype, adapters: bool) -> list[int]:
    """Bytes of each tensor that a training forward pass allocates and lets go before it ends.

    Scratch of a matrix product is left out: oneDNN's kernels for 16 bits take some on CPUs with
    AVX-512, and free it before anything else is allocated, so that the next product has it again.
    """
    model = model_of(config, layers, dtype, adapters)
    ids = torch.randint(3, 90, (ROWS, LENGTH))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        logits = model(input_ids=ids, use_cache=False).logits
    assert logits.requires_grad
    events = recorded.profiler.kineto_results.events()
    products = [event for event in events if event.name() in ("aten::mm", "aten::addmm")]
    assert products
    return [
        -event.nbytes()
        for event in events
        if event.name() == "[memory]"
        and event.nbytes() < 0
        and not any(op.start_ns() <= event.start_ns() <= op.end_ns() for op in products)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "LoRA"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "opt"])
def test_a_block_frees_what_the_allocator_sees(name, adapters, dtype):
    config = CONFIGS[name]
    one, three = (freed_by_forward(config, layers, dtype, adapters) for layers in (1, 3))
    shape = ModelShape.from_config(config)
    adapted = shape.block if adapters else ()
    blocks = freed_blocks_per_token(shape, dtype.itemsize, adapted, frozen_base=adapters)
    for least in (0, WIDE * dtype.itemsize):
        planned = sum(size for size in blocks if size >= least)
        assert planned == pytest.approx(a_block(one, three, least), rel=0.2)


def most_allocated(function) -> int:
    """Most bytes that a function holds at once of what it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        function()
    events = recorded.profiler.kineto_results.events()
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("pieces", [1, 4], ids=["one piece", "pieces"])
def test_logits_take_what_the_losses_allocate(pieces, dtype, monkeypatch):
    vocabulary, tokens = 512, 512
    chunk = vocabulary * tokens // pieces
    monkeypatch.setattr("engine.algorithms.log_probs._CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(activations, "_LOGITS_CHUNK", chunk)
    shape = ModelShape.from_config({**CONFIGS["llama"], "vocab_size": vocabulary})
    head = torch.zeros(vocabulary, 2, dtype=dtype, requires_grad=True)
    head.grad = torch.zeros_like(head)
    hidden, ids = torch.zeros(4, tokens // 4, 2, dtype=dtype), torch.zeros(4, tokens // 4).long()

    def logits() -> torch.Tensor:
        return torch.nn.functional.linear(hidden, head)

    def sft() -> None:
        causal_lm_loss(logits(), ids)[0].backward()

    def ppo() -> None:
        kept = logits()
        token_log_probs(kept[:, :-1], ids[:, 1:]).sum().backward()

    def score() -> None:
        with torch.no_grad():
            actor, reference = logits(), logits()
            token_log_probs(reference, ids)
            del reference
            entropy(actor)

    def near(measured: int) -> object:
        return pytest.approx(measured, rel=0.2)

    element = dtype.itemsize
    assert logits_training_bytes(shape, tokens, element) == near(most_allocated(sft))
    assert logits_training_bytes(shape, tokens, element, held=True) == near(most_allocated(ppo))
    assert logits_scoring_bytes(shape, tokens, element, with_reference=True) == near(
        most_allocated(score)
    )
