"""The choice of a token: distribution, filters, log-probabilities."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from engine.generation.sampling import Sampling, choose_tokens, draw_uniforms

BASE = Sampling(max_new_tokens=4, eos_ids=(0,), pad_id=0)


def variant(**changes: object) -> Sampling:
    return dataclasses.replace(BASE, **changes)


def sample_many(logits: torch.Tensor, sampling: Sampling, count: int = 40_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    uniforms = draw_uniforms(count, logits.device, generator)
    history = torch.tensor([[0, 1]]).expand(count, -1)
    tokens, _ = choose_tokens(logits.expand(count, -1), sampling, uniforms, history)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_tempered_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, -1.0, 0.5, 2.0, -20.0])
    frequencies = sample_many(logits, variant(temperature=temperature))
    torch.testing.assert_close(
        frequencies, torch.softmax(logits / temperature, dim=-1), atol=0.01, rtol=0
    )


def test_the_extreme_uniforms_never_choose_an_impossible_token() -> None:
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, 400:600] = 0.0
    tokens, log_probs = choose_tokens(
        logits, BASE, torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    )
    assert tokens.tolist() == [400, 599]
    torch.testing.assert_close(log_probs.exp(), torch.tensor([1 / 200, 1 / 200]))


def test_log_probs_are_of_the_unfiltered_distribution() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    expected = torch.log_softmax(logits / 0.7, dim=-1)
    history = torch.zeros(6, 1, dtype=torch.long)
    for sampling in (
        variant(temperature=0.7),
        variant(temperature=0.7, top_k=3),
        variant(temperature=0.7, top_p=0.4, repetition_penalty=1.5),
        variant(temperature=0.7, greedy=True),
    ):
        uniforms = draw_uniforms(6, logits.device, torch.Generator().manual_seed(2))
        tokens, log_probs = choose_tokens(logits, sampling, uniforms, history)
        torch.testing.assert_close(log_probs, expected.gather(1, tokens[:, None]).squeeze(1))


def test_top_k_and_top_p_keep_only_the_likeliest() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert (sample_many(logits, variant(top_k=2)) > 0).tolist() == [True, True, False, False]
    assert (sample_many(logits, variant(top_p=0.6)) > 0).tolist() == [True, True, False, False]
    assert (sample_many(logits, variant(top_p=0.01)) > 0).tolist() == [True, False, False, False]
    frequencies = sample_many(logits, variant(top_k=2))
    assert frequencies[0].item() == pytest.approx(4 / 7, abs=0.01)


def test_repetition_penalty_makes_the_history_less_likely() -> None:
    logits = torch.tensor([1.0, -1.0, 0.5, 0.5])
    plain, penalised = (sample_many(logits, variant(repetition_penalty=p)) for p in (1.0, 2.0))
    assert (penalised[:2] < plain[:2] - 0.01).all()
    assert (penalised[2:] > plain[2:]).all()


def test_a_row_chooses_alike_alone_and_in_a_batch() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(3))
    uniforms = draw_uniforms(5, logits.device, torch.Generator().manual_seed(4))
    together, _ = choose_tokens(logits, BASE, uniforms)
    alone = [choose_tokens(logits[i : i + 1], BASE, uniforms[i : i + 1])[0] for i in range(5)]
    assert together.tolist() == torch.cat(alone).tolist()


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 0.0), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("max_new_tokens", 0)],
)
def test_values_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        variant(**{field: value})
