import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from engine.algorithms.advantages import generalized_advantages
from engine.algorithms.language_modeling import causal_lm_loss
from engine.algorithms.log_probs import token_log_probs
from engine.algorithms.masks import length_mask
from engine.algorithms.policy import Objective, explained_variance, policy_loss, value_loss

CLIP = 0.2
OBJECTIVE = Objective(clip_low=CLIP, clip_high=CLIP)
LENGTHS = [6, 1, 4, 0, 3, 6, 2, 5]


def rollout(width=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = length_mask(torch.tensor(LENGTHS), width)
    old, advantages, values, returns = torch.randn(4, len(LENGTHS), width, generator=generator)
    return old - 2, advantages, values, returns, mask


def policy_gradient(ratio, advantage):
    log_prob = torch.tensor([[ratio]]).log().requires_grad_()
    every = torch.ones(1, 1, dtype=torch.bool)
    result = policy_loss(log_prob, torch.zeros(1, 1), torch.tensor([[advantage]]), every, OBJECTIVE)
    result.loss_sum.backward()
    return log_prob.grad.item(), result


@settings(deadline=None)
@given(st.floats(0.3, 2.5), st.sampled_from([-2.0, -0.5, 0.5, 2.0]))
def test_policy_gradient_stops_where_the_ratio_has_gone_far_enough(ratio, advantage):
    if min(abs(ratio - 0.8), abs(ratio - 1.2)) < 1e-3:
        return
    gradient, result = policy_gradient(ratio, advantage)
    far_enough = ratio > 1.2 if advantage > 0 else ratio < 0.8
    assert result.clipped_low_count + result.clipped_high_count == far_enough
    assert (result.clipped_high_count if advantage > 0 else result.clipped_low_count) == far_enough
    if far_enough:
        assert gradient == 0.0
    else:
        assert gradient == pytest.approx(-advantage * ratio, rel=1e-4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.5, 1.0, -1.2), (0.5, 1.0, -0.5), (1.5, -1.0, 1.5), (0.5, -1.0, 0.8), (1.1, 2.0, -2.2)],
)
def test_policy_loss_takes_the_pessimistic_side(ratio, advantage, loss):
    assert policy_gradient(ratio, advantage)[1].loss_sum.item() == pytest.approx(loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unchanged_weights_have_ratio_1_no_kl_and_no_clipping(dtype):
    old, advantages, _, _, mask = rollout()
    old = old.to(dtype)
    result = policy_loss(old.clone(), old, advantages, mask, OBJECTIVE)
    tokens = sum(LENGTHS)
    assert result.token_count == tokens
    assert result.ratio_sum == tokens
    assert result.ratio_max == 1.0
    assert result.approx_kl_sum == 0.0
    assert result.clipped_low_count == result.clipped_high_count == 0
    assert result.loss_sum == pytest.approx(-advantages[mask].sum().item(), rel=1e-5)


def test_statistics_of_known_ratios():
    ratios = torch.tensor([[1.5, 0.5, 1.0, 2.0], [1.1, 9.0, 9.0, 9.0]])
    mask = length_mask(torch.tensor([4, 1]), 4)
    advantages = torch.tensor([[1.0, 1.0, 1.0, -1.0], [1.0, 1.0, 1.0, 1.0]])
    result = policy_loss(ratios.log(), torch.zeros(2, 4), advantages, mask, OBJECTIVE)
    assert result.token_count == 5
    assert result.ratio_sum.item() == pytest.approx(6.1)
    assert result.ratio_max.item() == pytest.approx(2.0)
    assert result.clipped_low_count + result.clipped_high_count == 1
    assert result.loss_sum.item() == pytest.approx(-1.2 - 0.5 - 1.0 + 2.0 - 1.1)


def test_approximate_kl_is_that_from_the_old_policy_to_the_new():
    torch.manual_seed(0)
    old_logits = torch.randn(5)
    old = torch.distributions.Categorical(logits=old_logits)
    new = torch.distributions.Categorical(logits=old_logits + 0.5 * torch.randn(5))
    tokens = old.sample((1, 200_000))
    every = torch.ones_like(tokens, dtype=torch.bool)
    result = policy_loss(
        new.log_prob(tokens), old.log_prob(tokens), torch.zeros(1, 200_000), every, OBJECTIVE
    )
    exact = torch.distributions.kl_divergence(old, new).item()
    assert (result.approx_kl_sum / result.token_count).item() == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        # Unclipped: plain MSE / 2.
        (1.1, 1.0, 3.0, 0.5 * 1.9**2, -1.9),
        # Moved towards the target further than the clip: the clipped error is larger, no gradient.
        (2.0, 1.0, 3.0, 0.5 * 1.8**2, 0.0),
        # Moved away from the target: the plain error is larger and pulls back.
        (0.0, 1.0, 3.0, 0.5 * 3.0**2, -3.0),
        (2.0, 1.0, -1.0, 0.5 * 3.0**2, 3.0),
    ],
)
def test_value_loss_is_half_the_larger_square(value, old, target, loss, gradient):
    leaf = torch.tensor([[value]], requires_grad=True)
    every = torch.ones(1, 1, dtype=torch.bool)
    result = value_loss(leaf, torch.tensor([[old]]), torch.tensor([[target]]), every, CLIP)
    result.loss_sum.backward()
    assert result.loss_sum.item() == pytest.approx(loss, rel=1e-5)
    assert leaf.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert result.clipped_count == (gradient == 0.0)


def test_value_loss_of_unchanged_values_is_half_the_squared_error():
    _, _, values, returns, mask = rollout()
    leaf = values.clone().requires_grad_()
    result = value_loss(leaf, values, returns, mask, CLIP)
    result.loss_sum.backward()
    mean = nn.functional.mse_loss(values[mask], returns[mask])
    assert (result.loss_sum / result.token_count).item() == pytest.approx(mean.item() / 2, rel=1e-5)
    assert torch.allclose(leaf.grad[mask], (values - returns)[mask], atol=1e-6)
    assert result.clipped_count == 0


@pytest.mark.parametrize("noise", [1e30, -1e30, float("inf"), float("nan")])
def test_numbers_outside_of_the_mask_change_no_loss_and_no_gradient(noise):
    old, advantages, values, returns, mask = rollout()
    results = []
    for fill in (0.0, noise):
        new, old_, advantages_, values_, returns_ = (
            each.masked_fill(~mask, fill)
            for each in (0.9 * old, old, advantages, values + 0.1, returns)
        )
        new.requires_grad_()
        values_.requires_grad_()
        policy = policy_loss(new, old_, advantages_, mask, OBJECTIVE)
        value = value_loss(values_, values.masked_fill(~mask, -fill), returns_, mask, CLIP)
        (policy.loss_sum + value.loss_sum).backward()
        found = [*vars(policy).values(), *vars(value).values(), new.grad, values_.grad]
        assert not new.grad[~mask].any()
        assert not values_.grad[~mask].any()
        results.append(found)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_an_empty_mask_adds_zero_and_can_still_run_backward():
    log_probs = torch.randn(2, 3, requires_grad=True)
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    policy = policy_loss(log_probs, torch.zeros(2, 3), torch.ones(2, 3), nothing, OBJECTIVE)
    value = value_loss(log_probs, torch.zeros(2, 3), torch.ones(2, 3), nothing, CLIP)
    (policy.loss_sum + value.loss_sum).backward()
    assert not any(each.any() for each in (*vars(policy).values(), *vars(value).values()))
    assert not log_probs.grad.any()


def test_only_the_loss_sum_carries_a_gradient_and_only_to_the_new_policy():
    old, advantages, values, _, mask = rollout()
    leaves = [each.clone().requires_grad_() for each in (old + 0.1, old, advantages)]
    policy = policy_loss(*leaves, mask, OBJECTIVE)
    assert [name for name, each in vars(policy).items() if each.requires_grad] == ["loss_sum"]
    policy.loss_sum.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]
    leaves = [each.clone().requires_grad_() for each in (values + 0.1, values, advantages)]
    value = value_loss(*leaves, mask, CLIP)
    assert [name for name, each in vars(value).items() if each.requires_grad] == ["loss_sum"]
    value.loss_sum.backward()
    assert [leaf.grad is not None for leaf in leaves] == [True, False, False]


class TinyActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(13, 8)
        self.logits = nn.Linear(8, 13)
        self.value = nn.Linear(8, 1)

    def forward(self, tokens):
        hidden = self.embedding(tokens).cumsum(dim=1).tanh()
        return self.logits(hidden), self.value(hidden).squeeze(-1)


def losses_and_gradients(cuts):
    """Sum losses over micro batches cut at the given rows, normalised by the global count."""
    model = TinyActorCritic()
    old, advantages, old_values, returns, mask = rollout()
    tokens = torch.randint(13, (len(LENGTHS), 7), generator=torch.Generator().manual_seed(4))
    labels = tokens.masked_fill(~nn.functional.pad(mask, (1, 0)), -100)
    total = 0.0
    for rows in torch.arange(len(LENGTHS)).tensor_split(cuts):
        # Each micro batch is padded to its own longest answer only.
        width = max(1, int(mask[rows].sum(dim=1).max()))
        logits, values = model(tokens[rows, : width + 1])
        chosen = token_log_probs(logits[:, :-1], tokens[rows, 1 : width + 1])
        within = mask[rows, :width]
        policy = policy_loss(chosen, old[rows, :width], advantages[rows, :width], within, OBJECTIVE)
        value = value_loss(
            values[:, :-1], old_values[rows, :width], returns[rows, :width], within, CLIP
        )
        mixture, count = causal_lm_loss(logits, labels[rows, : width + 1])
        assert count == policy.token_count == value.token_count
        loss = (policy.loss_sum + value.loss_sum + mixture) / sum(LENGTHS)
        loss.backward()
        total += loss.item()
    return total, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("cuts", [[1, 2, 3, 4, 5, 6, 7], [4], [3], [1, 6]])
def test_loss_and_gradients_are_the_same_however_rows_are_cut(cuts):
    whole, gradients = losses_and_gradients([])
    parts, summed = losses_and_gradients(cuts)
    assert parts == pytest.approx(whole, rel=1e-5)
    for one, other in zip(gradients, summed, strict=True):
        assert one.abs().max() > 0
        assert torch.allclose(one, other, atol=1e-6)


def test_explained_variance_of_known_critics():
    _, _, noise, returns, mask = rollout()
    mean = torch.full_like(returns, returns[mask].mean().item())
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(returns + 7.0, returns, mask).item() == pytest.approx(1.0, abs=1e-6)
    assert explained_variance(mean, returns, mask).item() == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(-returns, returns, mask).item() == pytest.approx(-3.0)
    half = mean + 0.5 * (returns - mean)
    assert explained_variance(half, returns, mask).item() == pytest.approx(0.75)
    flat = torch.ones_like(returns)
    assert explained_variance(noise, flat, mask) == 0.0
    outside = returns.masked_fill(~mask, float("nan"))
    assert explained_variance(outside, returns, mask) == 1.0


def test_actor_that_repeats_what_paid_off_lowers_its_loss():
    _, _, values, rewards, mask = rollout()
    advantages, _ = generalized_advantages(rewards, values, mask, 1.0, 0.95)
    old = torch.full_like(values, -2.0)
    towards = old + 0.05 * advantages.sign()
    after = policy_loss(towards, old, advantages, mask, OBJECTIVE).loss_sum
    assert after < policy_loss(old, old, advantages, mask, OBJECTIVE).loss_sum


OBJECTIVES = [
    Objective(ratio, surrogate, 0.1, 0.3, None, aggregation, 9, kl_coef, estimator)
    for ratio in ("token", "sequence_mean", "sequence_sum")
    for surrogate in ("clipped", "cispo")
    for aggregation in ("answer", "token", "constant")
    for kl_coef, estimator in ((0.0, "k3"), (0.2, "k1"), (0.2, "k2"), (0.2, "k3"))
]


def mean_loss(log_probs, objective, cuts=(), mask=None):
    """Loss and gradients with respect to the log-probs, rows cut into micro batches."""
    old, advantages, ref, _, every = rollout(seed=7)
    # an answer's tokens share their advantage, as those of groups do
    advantages = advantages[:, :1].expand_as(advantages)
    mask = every if mask is None else mask
    leaf = log_probs.detach().clone().requires_grad_()
    total = objective.normalizer(float(mask.sum()), float(mask.any(dim=1).sum()))
    loss = torch.zeros((), dtype=leaf.dtype)
    for rows in torch.arange(len(LENGTHS)).tensor_split(list(cuts)):
        part = policy_loss(
            leaf[rows], old[rows], advantages[rows], mask[rows], objective, ref[rows]
        )
        loss = loss + part.loss_sum / total
    loss.backward()
    return loss.item(), leaf.grad


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_no_cut_into_micro_batches_changes_a_loss_of_any_kind(objective):
    """Trap: a mean over tokens is one over the global batch, not one of micro batches' means."""
    log_probs = rollout(seed=7)[0].double() + 0.3 * torch.randn(
        8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9)
    )
    whole, gradient = mean_loss(log_probs, objective)
    assert gradient.abs().max() > 0
    for cuts in ([1, 2, 3, 4, 5, 6, 7], [3], [1, 6]):
        loss, other = mean_loss(log_probs, objective, cuts)
        assert loss == pytest.approx(whole, rel=1e-12)
        torch.testing.assert_close(other, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_an_answer_taken_out_of_the_mask_counts_in_no_sum_and_in_no_mean(objective):
    """Trap: a truncated answer that is masked leaves the mean of the others as it was."""
    log_probs, _, _, _, mask = rollout(seed=7)
    log_probs = log_probs.double() - 0.1
    kept = torch.tensor([0, 2, 4, 6, 7])
    without = mask.clone()
    without[[1, 5]] = False
    loss, gradient = mean_loss(log_probs, objective, mask=without)
    assert not gradient[[1, 5]].any()
    old, advantages, ref, _, _ = rollout(seed=7)
    advantages = advantages[:, :1].expand_as(advantages)
    alone = policy_loss(
        log_probs[kept], old[kept], advantages[kept], mask[kept], objective, ref[kept]
    )
    total = objective.normalizer(float(mask[kept].sum()), float(len(kept)))
    assert loss == pytest.approx(alone.loss_sum.item() / total, rel=1e-12)


def one_token_gradient(ratio, advantage, objective):
    log_prob = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    every = torch.ones(1, 1, dtype=torch.bool)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    policy_loss(log_prob, zero, zero + advantage, every, objective).loss_sum.backward()
    return log_prob.grad.item()


def test_the_bounds_of_the_ratio_may_differ():
    wide = Objective(clip_low=0.1, clip_high=0.5)
    assert one_token_gradient(1.4, 1.0, wide) == pytest.approx(-1.4)
    assert one_token_gradient(1.6, 1.0, wide) == 0.0
    assert one_token_gradient(0.95, -1.0, wide) == pytest.approx(0.95)
    assert one_token_gradient(0.85, -1.0, wide) == 0.0


def test_a_second_bound_stops_a_bad_answer_that_became_likely():
    assert one_token_gradient(9.0, -1.0, Objective()) == pytest.approx(9.0)
    assert one_token_gradient(9.0, -1.0, Objective(clip_delta=3.0)) == 0.0
    assert one_token_gradient(2.0, -1.0, Objective(clip_delta=3.0)) == pytest.approx(2.0)


@pytest.mark.parametrize(("ratio", "weight"), [(0.2, 0.2), (1.5, 1.5), (4.0, 1.8)])
@pytest.mark.parametrize("advantage", [2.0, -1.0])
def test_cispo_keeps_a_gradient_beyond_its_bound(ratio, weight, advantage):
    objective = Objective(surrogate="cispo", clip_high=0.8)
    gradient = one_token_gradient(ratio, advantage, objective)
    assert gradient == pytest.approx(-weight * advantage)


def test_a_kl_in_the_loss_needs_a_reference():
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="reference"):
        policy_loss(one, one, one, one == 0, Objective(kl_coef=0.1))


def test_the_kl_in_the_loss_pulls_towards_the_reference():
    log_prob = torch.tensor([[-1.0]], requires_grad=True)
    ref, zero = torch.tensor([[-2.0]]), torch.zeros(1, 1)
    for estimator in ("k2", "k3"):
        log_prob.grad = None
        objective = Objective(kl_coef=0.5, kl_estimator=estimator)
        result = policy_loss(log_prob, log_prob.detach(), zero, zero == 0, objective, ref)
        result.loss_sum.backward()
        assert log_prob.grad.item() > 0  # a step against it lowers the log-probability
