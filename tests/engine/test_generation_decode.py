"""The decode loop over packed decoders and over the model's own forward."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from host_reads import HostReads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.generation.cache import KeyValueCache
from engine.generation.decode import Decoder, DecodeSession, ModuleDecoder, build_decoder, decode
from engine.generation.packed import PackedDecoder
from engine.generation.plain import generate
from engine.generation.sampling import Sampling

VOCABULARY = 40
SAMPLING = Sampling(max_new_tokens=12, eos_ids=(3, 4), pad_id=1, temperature=0.8)
IDS = {"vocab_size": VOCABULARY, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
OPT = {
    "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
    "word_embed_proj_dim": 16, "max_position_embeddings": 64, "init_std": 0.3, **IDS,
}  # fmt: skip
LLAMA = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, **IDS,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
PACKED: dict[str, Any] = {
    "opt": lambda: OPTForCausalLM(OPTConfig(**OPT)),
    "opt-350m": lambda: OPTForCausalLM(
        OPTConfig(**{**OPT, "word_embed_proj_dim": 8}, do_layer_norm_before=False)
    ),
    "opt-no-bias": lambda: OPTForCausalLM(
        OPTConfig(**OPT, enable_bias=False, layer_norm_elementwise_affine=False)
    ),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama-tied-bias": lambda: LlamaForCausalLM(
        LlamaConfig(**LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, rope_parameters=LLAMA3_ROPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA)),
}
OWN_FORWARD: dict[str, Any] = {
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.3, **IDS)
    ),
    "gpt-neox": lambda: GPTNeoXForCausalLM(
        GPTNeoXConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            initializer_range=0.3,
            **IDS,
        )
    ),
    "bloom": lambda: BloomForCausalLM(
        BloomConfig(hidden_size=16, n_layer=2, n_head=2, initializer_range=0.3, **IDS)
    ),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=4)),
}


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = {**PACKED, **OWN_FORWARD}[name]()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.2)
    return model.to(dtype).eval()


def prompts(repeats: int = 1) -> tuple[Tensor, Tensor]:
    ids = torch.randint(5, VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    mask[1, :3] = 0
    mask[3, :5] = 0
    ids = ids.masked_fill(mask == 0, 1)
    return ids.repeat(repeats, 1), mask.repeat(repeats, 1)


class Counting:
    """Passes steps on and notes the rows of each."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.rows = decoder, []

    def step(self, input_ids: Tensor, *rest: Any) -> Tensor:
        self.rows.append(len(input_ids))
        return self.decoder.step(input_ids, *rest)


def answer_log_probs(model: Any, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
    """Log-probabilities of the answers from one forward over prompt and answer."""
    whole = torch.cat((ids, answers), dim=1)
    whole_mask = torch.cat((mask, torch.ones_like(answers)), dim=1)
    positions = (whole_mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(whole, attention_mask=whole_mask, position_ids=positions).logits.float()
    log_probs = logits.log_softmax(-1)[:, ids.shape[1] - 1 : -1]
    return log_probs.gather(2, answers.unsqueeze(2)).squeeze(2)


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("name", [*PACKED, *OWN_FORWARD])
def test_every_family_decodes_as_transformers_does(name: str, padded: bool) -> None:
    model = build(name)
    ids, mask = prompts(2)
    if not padded:
        mask = torch.ones_like(mask)
    decoder = build_decoder(model, rows=8)
    assert isinstance(decoder, PackedDecoder) == (name in PACKED)
    for sampling in (SAMPLING, dataclasses.replace(SAMPLING, greedy=True, ignore_eos=True)):
        expected = generate(model, ids, mask, sampling, seeded())
        result = decode(decoder, ids, mask, sampling, seeded())
        assert torch.equal(result.answers, expected.answers)
        assert torch.equal(result.lengths, expected.lengths)
        torch.testing.assert_close(result.log_probs, expected.log_probs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("rows", "copy"), [(1, True), (1, False), (8, False)])
@pytest.mark.parametrize("name", ["opt", "llama-tied-bias", "qwen3"])
def test_every_layout_of_weights_gives_the_same(name: str, rows: int, copy: bool) -> None:
    model = build(name)
    ids, mask = prompts()
    expected = decode(build_decoder(model, rows=8), ids, mask, SAMPLING, seeded())
    result = decode(build_decoder(model, rows, copy), ids, mask, SAMPLING, seeded())
    assert torch.equal(result.answers, expected.answers)
    torch.testing.assert_close(result.log_probs, expected.log_probs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["opt", "llama", "gpt2"])
@pytest.mark.parametrize("rows", [1, 8])
def test_bf16_is_as_exact_as_a_full_forward(name: str, rows: int) -> None:
    model = build(name, torch.bfloat16)
    ids, mask = prompts(2)
    ids, mask = ids[:rows], mask[:rows]
    sampling = dataclasses.replace(SAMPLING, ignore_eos=True, temperature=1.0)
    result = decode(build_decoder(model, rows), ids, mask, sampling, seeded())
    in_bf16, in_fp32 = (
        answer_log_probs(model.to(dtype), ids, mask, result.answers)
        for dtype in (torch.bfloat16, torch.float32)
    )
    error, usual = ((x - in_fp32).abs().mean() for x in (result.log_probs, in_bf16))
    assert 0 < error < 2 * usual
    assert result.log_probs.dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_finished_rows_are_dropped_and_nothing_runs_past_the_last_eos(name: str) -> None:
    model = build(name)
    ids, mask = prompts(6)
    decoder = Counting(build_decoder(model, rows=24))
    result = decode(decoder, ids, mask, SAMPLING, seeded())
    lengths = result.lengths.tolist()
    assert len(set(lengths)) > 2
    # Step k of the loop computes the rows that still need a token at index k.
    expected = [sum(length > step for length in lengths) for step in range(max(lengths))]
    assert decoder.rows == expected


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_step_waits_for_the_device_once_at_most(ignore_eos: bool) -> None:
    ids, mask = prompts(6)
    reads, seen = HostReads(), []

    class Noting(Counting):
        def step(self, *arguments: Any) -> Tensor:
            seen.append(reads.counts.total())
            return super().step(*arguments)

    decoder = Noting(build_decoder(build("llama"), rows=24))
    with reads:
        decode(decoder, ids, mask, dataclasses.replace(SAMPLING, ignore_eos=ignore_eos), seeded())
    assert len(decoder.rows) > 5
    assert (len(set(decoder.rows)) > 2) != ignore_eos
    assert max(after - before for before, after in itertools.pairwise(seen)) == (not ignore_eos)


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_kept_rows_of_a_cache_are_what_they_were(marks: list[bool]) -> None:
    keep = torch.tensor(marks)
    cache = KeyValueCache()
    cache.start(len(marks), capacity=4)
    keys, values = torch.randn(2, len(marks), 2, 3, 5).unbind()
    for layer in range(2):
        cache.update(layer, keys + layer, values - layer)
    cache.advance(3)
    order = cache.keep_rows(keep, sum(marks))
    assert sorted(order.tolist()) == [row for row, kept in enumerate(marks) if kept]
    # Only rows from beyond the new end move: copies of keys and values cost memory traffic.
    assert all(order[row] == row for row in range(len(order)) if marks[row])
    new = torch.randn(len(order), 2, 1, 5)
    for layer in range(2):
        found = cache.update(layer, new, new)
        for held, before in zip(found, (keys + layer, values - layer), strict=True):
            assert torch.equal(held, torch.cat((before[order], new), dim=2))


def test_answers_do_not_depend_on_the_rows_beside_them() -> None:
    model = build("llama")
    ids, mask = prompts(2)
    greedy = dataclasses.replace(SAMPLING, greedy=True)
    decoder = build_decoder(model, rows=8)
    together = decode(decoder, ids, mask, greedy)
    for row in range(8):
        alone = decode(decoder, ids[row : row + 1], mask[row : row + 1], greedy)
        length = int(alone.lengths)
        assert length == together.lengths[row]
        assert alone.answers[0].tolist() == together.answers[row, :length].tolist()


def test_a_used_cache_gives_the_same_and_is_not_allocated_again() -> None:
    model = build("opt")
    cache = KeyValueCache()
    decoder = build_decoder(model, rows=8)
    ids, mask = prompts(2)
    first = decode(decoder, ids, mask, SAMPLING, seeded(), cache)
    buffer = cache._keys[0]
    small = decode(decoder, ids[:3], mask[:3], SAMPLING, seeded(), cache)
    again = decode(decoder, ids, mask, SAMPLING, seeded(), cache)
    assert cache._keys[0] is buffer
    assert torch.equal(first.answers, again.answers)
    assert torch.equal(
        small.log_probs, decode(decoder, ids[:3], mask[:3], SAMPLING, seeded()).log_probs
    )
    larger = dataclasses.replace(SAMPLING, max_new_tokens=40, ignore_eos=True)
    assert decode(decoder, ids, mask, larger, seeded(), cache).answers.shape == (8, 40)


def test_repetition_penalty_sees_prompt_and_answer() -> None:
    model = build("llama")
    ids, mask = prompts(2)
    sampling = dataclasses.replace(SAMPLING, repetition_penalty=1.3, top_p=0.9, top_k=20)
    expected = generate(model, ids, mask, sampling, seeded())
    result = decode(build_decoder(model, rows=8), ids, mask, sampling, seeded())
    assert torch.equal(result.answers, expected.answers)


def test_results_can_enter_autograd() -> None:
    model = build("llama")
    ids, mask = prompts()
    result = decode(build_decoder(model, rows=4), ids, mask, SAMPLING, seeded())
    loss = (
        model(result.answers).logits.sum() + (result.log_probs * model.lm_head.weight[0, 0]).sum()
    )
    loss.backward()
    assert model.lm_head.weight.grad is not None


@pytest.mark.parametrize("name", ["opt", "llama", "gpt2"])
class TestSession:
    GREEDY = dataclasses.replace(SAMPLING, greedy=True, ignore_eos=True)

    def fresh(self, model: Any, tokens: list[int]) -> list[int]:
        ids = torch.tensor([tokens])
        return generate(model, ids, torch.ones_like(ids), self.GREEDY).answers[0].tolist()

    def test_rounds_equal_answers_computed_afresh(self, name: str) -> None:
        model = build(name)
        session = DecodeSession(build_decoder(model, rows=1))
        tokens = [5, 6, 7]
        for extra in ([8, 9], [10], [11, 12, 13]):
            tokens = tokens + extra
            session.feed(tokens)
            answer = [token for token, _ in session.stream(self.GREEDY)]
            assert answer == self.fresh(model, tokens)
            tokens = tokens + answer
            assert session.tokens == tokens

    def test_undo_retry_and_a_cut_equal_answers_computed_afresh(self, name: str) -> None:
        model = build(name)
        session = DecodeSession(build_decoder(model, rows=1))
        session.feed([5, 6, 7, 8])
        first = [token for token, _ in session.stream(self.GREEDY)]
        session.truncate(4)
        assert [token for token, _ in session.stream(self.GREEDY)] == first
        for tokens in ([5, 6, 9], [20, 21, 22, 23, 24], [21, 22]):
            session.feed(tokens)
            assert [t for t, _ in session.stream(self.GREEDY)] == self.fresh(model, tokens)

    def test_only_new_tokens_are_computed(self, name: str) -> None:
        model = build(name)
        decoder = build_decoder(model, rows=1)
        widths: list[int] = []
        step = decoder.step
        decoder.step = lambda ids, *rest: (widths.append(ids.shape[1]), step(ids, *rest))[1]  # type: ignore[method-assign]
        session = DecodeSession(decoder)
        session.feed([5, 6, 7, 8, 9, 10])
        list(session.stream(dataclasses.replace(self.GREEDY, max_new_tokens=3)))
        session.feed([*session.tokens, 11, 12])
        list(session.stream(dataclasses.replace(self.GREEDY, max_new_tokens=1)))
        # The last token of an answer is not yet computed when the next round comes.
        assert widths == [6, 1, 1, 3]

    def test_stopping_in_the_middle_keeps_what_was_yielded(self, name: str) -> None:
        model = build(name)
        session = DecodeSession(build_decoder(model, rows=1))
        session.feed([5, 6])
        stream = session.stream(self.GREEDY)
        head = [next(stream)[0] for _ in range(4)]
        stream.close()
        assert session.tokens == [5, 6, *head]
        rest = [token for token, _ in session.stream(self.GREEDY)]
        assert (head + rest)[:12] == self.fresh(model, [5, 6])


def test_a_session_outgrows_its_first_buffer() -> None:
    model = build("llama")
    session = DecodeSession(build_decoder(model, rows=1))
    prompt = torch.randint(5, VOCABULARY, (300,), generator=seeded()).tolist()
    session.feed(prompt[:200])
    greedy = dataclasses.replace(SAMPLING, greedy=True, ignore_eos=True)
    list(session.stream(greedy))
    session.feed(prompt)
    answer = [token for token, _ in session.stream(greedy)]
    ids = torch.tensor([prompt])
    assert answer == generate(model, ids, torch.ones_like(ids), greedy).answers[0].tolist()


def test_a_session_stops_at_eos_and_reports_log_probs() -> None:
    model = build("llama")
    session = DecodeSession(build_decoder(model, rows=1))
    sampling = dataclasses.replace(SAMPLING, max_new_tokens=200)
    session.feed([5, 6, 7])
    pairs = list(session.stream(sampling, seeded(1)))
    assert pairs[-1][0] in (3, 4)
    ids = torch.tensor([[5, 6, 7]])
    expected = generate(model, ids, torch.ones_like(ids), sampling, seeded(1))
    assert [token for token, _ in pairs] == expected.answers[0].tolist()
    log_probs = torch.tensor([log_prob for _, log_prob in pairs])
    torch.testing.assert_close(log_probs, expected.log_probs[0], atol=2e-5, rtol=1e-4)


def test_an_empty_session_says_what_to_do() -> None:
    session = DecodeSession(ModuleDecoder(build("gpt2")))
    with pytest.raises(ValueError, match="feed it a prompt"):
        next(session.stream(SAMPLING))
