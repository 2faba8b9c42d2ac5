import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from engine.algorithms.kl import AdaptiveKLController, k1, k2, k3

log_prob = st.floats(-30, 0, width=32)


def policies(distance):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, generator=generator)
    moved = logits + distance * torch.randn(16, generator=generator)
    return Categorical(logits=logits), Categorical(logits=moved)


@pytest.mark.parametrize("estimator", [k1, k3])
@pytest.mark.parametrize("distance", [0.1, 0.7])
def test_unbiased_estimators_average_to_the_analytic_kl(estimator, distance):
    actor, ref = policies(distance)
    # Weighting every outcome by its probability is the exact expectation.
    outcomes = torch.arange(16)
    estimates = estimator(actor.log_prob(outcomes), ref.log_prob(outcomes))
    exact = kl_divergence(actor, ref).item()
    assert (actor.probs * estimates).sum().item() == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_on_samples_the_mean_approaches_the_analytic_kl(estimator):
    torch.manual_seed(1)
    actor, ref = policies(0.2)
    samples = actor.sample((200_000,))
    mean = estimator(actor.log_prob(samples), ref.log_prob(samples)).mean().item()
    assert mean == pytest.approx(kl_divergence(actor, ref).item(), rel=0.1)


def test_swapping_the_policies_is_noticed():
    actor, ref = policies(0.7)
    outcomes = torch.arange(16)
    wrong = (actor.probs * k3(ref.log_prob(outcomes), actor.log_prob(outcomes))).sum()
    assert abs(wrong - kl_divergence(actor, ref)) > 0.02


@settings(deadline=None)
@given(st.lists(st.tuples(log_prob, log_prob), min_size=1, max_size=20))
def test_k2_and_k3_are_never_negative(pairs):
    actor, ref = torch.tensor(pairs).unbind(dim=1)
    assert (k2(actor, ref) >= 0).all()
    assert (k3(actor, ref) >= 0).all()
    assert torch.equal(k1(actor, ref), -k1(ref, actor))


@pytest.mark.parametrize("estimator", [k1, k2, k3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_policy_has_no_kl(estimator, dtype):
    same = -5 * torch.rand(4, 6, dtype=dtype)
    found = estimator(same, same.clone())
    assert found.dtype == torch.float32
    assert not found.any()


def test_tiny_differences_do_not_round_below_zero():
    actor = torch.logspace(-12, 0, 5000)
    for sign in (1, -1):
        assert k3(sign * actor, torch.zeros(5000)).min() >= 0


@settings(deadline=None)
@given(st.floats(0, 1e6), st.floats(0.1, 100), st.integers(1, 1000), st.floats(1000, 1e5))
def test_coefficient_moves_at_most_a_fifth_over_the_horizon(kl, target, sequences, horizon):
    controller = AdaptiveKLController(0.1, target, horizon)
    controller.update(kl, sequences)
    bound = 0.2 * sequences / horizon
    assert 1 - bound - 1e-9 <= controller.value / 0.1 <= 1 + bound + 1e-9
    if kl > target * 1.01:
        assert controller.value > 0.1
    if kl < target * 0.99:
        assert controller.value < 0.1


def test_coefficient_of_known_updates():
    controller = AdaptiveKLController(0.2, target=6, horizon=10_000)
    controller.update(6, 256)
    assert controller.value == 0.2
    controller.update(600, 1000)
    assert controller.value == pytest.approx(0.204)
    controller.update(6.6, 1000)
    assert controller.value == pytest.approx(0.20604)
    controller.update(-3, 1000)
    assert controller.value == pytest.approx(0.2019192)


def test_resumed_controller_goes_on_as_if_uninterrupted():
    through, before = (AdaptiveKLController(0.1, 6, 1000) for _ in range(2))
    for kl in (2, 9, 5.5):
        through.update(kl, 64)
        before.update(kl, 64)
    after = AdaptiveKLController(0.1, 6, 1000)
    after.load_state_dict(before.state_dict())
    for kl in (12, 1, 6.3):
        through.update(kl, 64)
        after.update(kl, 64)
    assert after.value == through.value != 0.1


def test_what_the_controller_cannot_work_with_is_refused():
    with pytest.raises(ValueError, match="above 0, not 0"):
        AdaptiveKLController(0.1, 0, 1000)
    with pytest.raises(ValueError, match=r"6\.0 and -1"):
        AdaptiveKLController(0.1, 6.0, -1)
    controller = AdaptiveKLController(0.1, 6, 100)
    with pytest.raises(ValueError, match="nan"):
        controller.update(float("nan"), 10)
    with pytest.raises(ValueError, match="500 sequences"):
        controller.update(3, 500)
    assert controller.value == 0.1
