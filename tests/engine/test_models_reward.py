"""The head of the reward model: what a score keeps of its hidden states."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.config.schema import LoraConfig
from engine.models.lora import add_lora
from engine.models.reward import RewardModel

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def exact(hidden: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """The product in fp64 of what is there in 16 bits."""
    return hidden.double() @ head.weight.double().T


@pytest.fixture(params=SIXTEEN_BITS, ids=str)
def model(request, tiny_model) -> RewardModel:
    return RewardModel.from_pretrained(tiny_model("llama"), request.param, seed=3)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_thousand_answers_get_a_thousand_scores(model, autocast):
    head, dtype = model.model.score, model.model.dtype
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1000, head.in_features, generator=generator).to(dtype)
    in_16_bits = nn.functional.linear(hidden, head.weight)
    assert len(in_16_bits.unique()) < 1000
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = head(hidden)
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact(hidden, head), atol=1e-6, rtol=1e-6)
    assert len(scores.unique()) == 1000


def test_values_are_those_of_the_hidden_states_in_full(model):
    seen = []
    model.model.score.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = torch.randint(2, 264, (64, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        values = model(ids, torch.ones_like(ids))
        scores = model.scores(ids, torch.ones_like(ids))
    assert seen[0].dtype == model.model.dtype
    expected = exact(seen[0], model.model.score).squeeze(-1)
    torch.testing.assert_close(values.double(), expected, atol=1e-6, rtol=1e-6)
    # chosen and rejected answers whose scores lie close: 16 bits call many of them equal
    chosen, rejected = expected[:, -1].chunk(2)
    correct = scores[:32] > scores[32:]
    assert torch.equal(correct, chosen > rejected)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=2, only=True)], ids=["all", "lora"])
def test_the_head_trains_in_the_format_of_its_base(model, lora):
    if lora.rank:
        add_lora(model, lora)
    ids = torch.randint(2, 264, (2, 9), generator=torch.Generator().manual_seed(1))
    model(ids, torch.ones_like(ids))[:, -1].sum().backward()
    weight = model.model.score.weight
    assert weight.dtype == weight.grad.dtype == model.model.dtype
    assert weight.grad.abs().sum() > 0
    assert {parameter.dtype for parameter in model.parameters()} == {weight.dtype}
