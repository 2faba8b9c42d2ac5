import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.advantages import generalized_advantages
from engine.algorithms.masks import length_mask, whiten

WIDTH = 7


def rollout(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, len(lengths), WIDTH, generator=generator)
    return rewards, values, length_mask(torch.tensor(lengths), WIDTH)


lengths_of_rows = st.lists(st.integers(0, WIDTH), min_size=1, max_size=5)


@settings(deadline=None)
@given(lengths_of_rows, st.floats(0, 1), st.floats(0, 1), st.integers(0, 1000))
def test_advantages_are_the_double_sum_of_td_errors(lengths, gamma, gae_lambda, seed):
    rewards, values, mask = rollout(lengths, seed)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, gae_lambda)
    for row, length in enumerate(lengths):
        states = [*values[row, :length].double().tolist(), 0.0]
        errors = [rewards[row, t].item() + gamma * states[t + 1] - states[t] for t in range(length)]
        for t in range(WIDTH):
            total = sum((gamma * gae_lambda) ** (k - t) * errors[k] for k in range(t, length))
            assert advantages[row, t].item() == pytest.approx(total, abs=1e-4)
            value = states[t] if t < length else 0.0
            assert returns[row, t].item() == pytest.approx(total + value, abs=1e-4)


@settings(deadline=None)
@given(lengths_of_rows, st.floats(0.5, 1))
def test_lambda_1_gives_the_discounted_return_less_the_value(lengths, gamma):
    rewards, values, mask = rollout(lengths)
    advantages, returns = generalized_advantages(rewards, values, mask, gamma, 1.0)
    for row, length in enumerate(lengths):
        for t in range(length):
            ahead = sum(gamma**k * rewards[row, t + k].item() for k in range(length - t))
            assert returns[row, t].item() == pytest.approx(ahead, abs=1e-4)
            assert advantages[row, t].item() == pytest.approx(
                ahead - values[row, t].item(), abs=1e-4
            )


def test_lambda_0_gives_the_td_error_and_the_value_after_the_end_is_0():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 100.0]])
    values = torch.tensor([[10.0, 20.0, 30.0, 1000.0]])
    mask = length_mask(torch.tensor([3]), 4)
    advantages, returns = generalized_advantages(rewards, values, mask, 0.5, 0.0)
    assert advantages.tolist() == [[1.0, -3.0, -26.0, 0.0]]
    assert returns.tolist() == [[11.0, 17.0, 4.0, 0.0]]


def test_numbers_outside_of_the_mask_and_wider_padding_change_nothing():
    rewards, values, mask = rollout([5, 2, 0, 7])
    clean = generalized_advantages(rewards, values, mask, 1.0, 0.95)
    noise = 1e30 * torch.ones(4, 3)
    noisy = generalized_advantages(
        torch.cat((rewards.masked_fill(~mask, float("nan")), noise), dim=1),
        torch.cat((values.masked_fill(~mask, -1e30), noise), dim=1),
        torch.cat((mask, torch.zeros(4, 3, dtype=torch.bool)), dim=1),
        1.0,
        0.95,
    )
    for one, other in zip(clean, noisy, strict=True):
        assert torch.equal(one, other[:, :WIDTH])
        assert not other[:, WIDTH:].any()


def test_returns_do_not_change_when_advantages_are_whitened():
    rewards, values, mask = rollout([5, 2, 7])
    advantages, returns = generalized_advantages(rewards, values, mask, 1.0, 1.0)
    whiten(advantages, mask)
    # At lambda 1 and gamma 1 the first return is the sum of all rewards.
    totals = rewards.masked_fill(~mask, 0).sum(dim=1)
    assert torch.allclose(returns[:, 0], totals, atol=1e-5)


def test_targets_carry_no_gradient_and_are_fp32():
    rewards, values, mask = rollout([5, 2])
    values = values.bfloat16().requires_grad_()
    for found in generalized_advantages(rewards, values, mask, 1.0, 0.95):
        assert not found.requires_grad
        assert found.dtype == torch.float32
