import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.advantages import (
    discounted_returns,
    generalized_advantages,
    group_advantages,
    group_means,
)
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


groups_of_4 = st.lists(
    st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=5
).map(lambda rows: torch.tensor(rows, dtype=torch.float64))


@settings(deadline=None)
@given(groups_of_4)
def test_advantages_of_a_group_have_mean_0_and_as_numpy_has_it_std_1(groups):
    found = group_advantages(groups.flatten(), 4, "group").view(-1, 4).numpy()
    rewards = groups.numpy()
    spread = rewards.std(axis=1, ddof=1, keepdims=True)
    assert np.abs(found.mean(axis=1)).max() < 1e-9
    np.testing.assert_allclose(
        found * (spread + 1e-4), rewards - rewards.mean(1, keepdims=True), atol=1e-12
    )
    unscaled = group_advantages(groups.flatten(), 4, "none").view(-1, 4).numpy()
    np.testing.assert_allclose(unscaled, rewards - rewards.mean(1, keepdims=True), atol=1e-12)


@settings(deadline=None)
@given(groups_of_4)
def test_leaving_one_out_compares_with_the_mean_of_the_others(groups):
    found = group_advantages(groups.flatten(), 4, "none", leave_one_out=True).view(-1, 4)
    for row, rewards in zip(found.tolist(), groups.tolist(), strict=True):
        for at, advantage in enumerate(row):
            others = rewards[:at] + rewards[at + 1 :]
            assert advantage == pytest.approx(rewards[at] - sum(others) / 3, abs=1e-9)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("gap", [0.0, 1e-12, 1e-9, 1e-6])
def test_nearly_equal_rewards_are_not_blown_up(scale, leave_one_out, gap):
    """Trap: divided by a std of 1e-9 alone, noise of rounding would be an advantage of 1."""
    rewards = torch.tensor([0.7, 0.7 + gap, 0.7, 0.7], dtype=torch.float64)
    found = group_advantages(rewards, 4, scale, leave_one_out)
    assert found.abs().max() <= 2e4 * gap
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_an_answer_without_reward_counts_in_no_mean_and_learns_nothing(scale, leave_one_out):
    nan = float("nan")
    rewards = torch.tensor([1.0, nan, 3.0, 2.0, nan, nan, 5.0, nan, nan, nan, nan, nan])
    found = group_advantages(rewards.double(), 4, scale, leave_one_out)
    three = group_advantages(torch.tensor([1.0, 3.0, 2.0]).double(), 3, "none", leave_one_out)
    if scale == "group":
        three = three / (1.0 + 1e-4)
    elif scale == "batch":
        three = three / (np.std([1.0, 3.0, 2.0, 5.0], ddof=1) + 1e-4)
    torch.testing.assert_close(found[[0, 2, 3]], three)
    # one known answer of a group, and a group of which nothing is known
    assert not found[[1, 4, 5, 6, 7, 8, 9, 10, 11]].any()


def test_a_group_of_equal_rewards_has_no_spread_and_no_advantage():
    rewards = torch.tensor([0.1] * 7, dtype=torch.float64)
    means, stds = group_means(rewards, 7)
    assert (means.item(), stds.item()) == (0.1, 0.0)
    assert not group_advantages(rewards, 7, "group").any()


@settings(deadline=None)
@given(lengths_of_rows, st.floats(0, 1))
def test_a_return_is_the_discounted_sum_of_what_follows(lengths, gamma):
    rewards, _, mask = rollout(lengths)
    returns = discounted_returns(rewards, mask, gamma)
    for row, length in enumerate(lengths):
        for t in range(WIDTH):
            ahead = sum(gamma**k * rewards[row, t + k].item() for k in range(length - t))
            assert returns[row, t].item() == pytest.approx(ahead if t < length else 0.0, abs=1e-4)
