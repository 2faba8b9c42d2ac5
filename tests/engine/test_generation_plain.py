"""Plain generation: transformers' loop, our choice of token."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from engine.algorithms.log_probs import token_log_probs
from engine.generation.plain import generate
from engine.generation.sampling import Generation, Sampling

VOCABULARY = 40
SAMPLING = Sampling(max_new_tokens=12, eos_ids=(3, 4), pad_id=1, temperature=0.8)


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    if family == "opt":
        config = OPTConfig(
            hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
            word_embed_proj_dim=16, max_position_embeddings=64, dropout=0.5, init_std=0.3, **sizes,
        )  # fmt: skip
        return OPTForCausalLM(config)
    if family == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **sizes))
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def prompts() -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[3, :5] = 0
    return ids.masked_fill(mask == 0, 1), mask


def full_forward_log_probs(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, result: Generation, temperature: float
) -> Tensor:
    """Log-probabilities of the answers from one forward over prompt and answer."""
    whole = torch.cat((ids, result.answers), dim=1)
    answer_mask = torch.arange(result.answers.shape[1]) < result.lengths[:, None]
    whole_mask = torch.cat((mask, answer_mask.long()), dim=1)
    positions = (whole_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model.eval()(
            input_ids=whole, attention_mask=whole_mask, position_ids=positions
        ).logits
    log_probs = token_log_probs(logits[:, ids.shape[1] - 1 : -1], result.answers, temperature)
    return log_probs.masked_fill(~answer_mask, 0.0)


@pytest.mark.parametrize("family", ["opt", "llama", "gpt2"])
def test_log_probs_equal_those_of_a_full_forward(family: str) -> None:
    model = build(family)
    ids, mask = prompts()
    result = generate(model, ids, mask, SAMPLING, torch.Generator().manual_seed(5))
    expected = full_forward_log_probs(model, ids, mask, result, SAMPLING.temperature)
    torch.testing.assert_close(result.log_probs, expected, atol=1e-5, rtol=1e-5)


def test_greedy_equals_transformers_greedy() -> None:
    model = build("llama").eval()
    ids, mask = prompts()
    greedy = dataclasses.replace(SAMPLING, greedy=True, ignore_eos=True)
    expected = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, do_sample=False, eos_token_id=[]
    )
    assert torch.equal(generate(model, ids, mask, greedy).answers, expected[:, 6:])


def test_answers_end_at_their_first_eos_and_are_padded_behind_it() -> None:
    model = build("llama")
    ids, mask = (part.repeat(8, 1) for part in prompts())
    result = generate(model, ids, mask, SAMPLING, torch.Generator().manual_seed(0))
    width = result.answers.shape[1]
    assert width == result.lengths.max()
    assert len(set(result.lengths.tolist())) > 2
    for row, length in zip(result.answers.tolist(), result.lengths.tolist(), strict=True):
        assert not {3, 4} & set(row[: length - 1])
        assert length == SAMPLING.max_new_tokens or row[length - 1] in (3, 4)
        assert row[length:] == [1] * (width - length)
    beyond = torch.arange(width) >= result.lengths[:, None]
    assert (result.log_probs[beyond] == 0).all()


def test_ignoring_eos_fills_every_answer() -> None:
    model = build("llama")
    sampling = dataclasses.replace(SAMPLING, ignore_eos=True)
    ids, mask = (part.repeat(8, 1) for part in prompts())
    result = generate(model, ids, mask, sampling, torch.Generator().manual_seed(0))
    assert result.lengths.tolist() == [12] * 32
    assert (result.answers == 3).any()


def test_the_models_own_generation_config_has_no_say() -> None:
    model = build("llama")
    ids, mask = prompts()
    clean = generate(model, ids, mask, SAMPLING, torch.Generator().manual_seed(7))
    own = model.generation_config
    own.do_sample, own.top_k, own.temperature = True, 1, 0.1
    own.min_length, own.suppress_tokens, own.repetition_penalty = 18, [10, 11, 12], 3.0
    again = generate(model, ids, mask, SAMPLING, torch.Generator().manual_seed(7))
    assert torch.equal(clean.answers, again.answers)
    assert model.generation_config is own


def test_a_generator_makes_it_repeatable_and_leaves_the_global_one_alone() -> None:
    model = build("opt")
    ids, mask = prompts()
    state = torch.get_rng_state()
    first, second, third = (
        generate(model, ids, mask, SAMPLING, torch.Generator().manual_seed(seed)).answers
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, second)
    assert first.shape != third.shape or not torch.equal(first, third)


def test_modes_of_every_module_come_back_also_after_an_error() -> None:
    model = build("opt")
    model.gradient_checkpointing_enable()
    model.train()
    model.model.decoder.layers[0].eval()
    before = [module.training for module in model.modules()]
    ids, mask = prompts()
    generate(model, ids, mask, SAMPLING)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(IndexError):
        generate(model, ids + VOCABULARY, mask, SAMPLING)
    assert [module.training for module in model.modules()] == before
    assert model.model.decoder.gradient_checkpointing
