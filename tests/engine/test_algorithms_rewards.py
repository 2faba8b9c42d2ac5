import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.masks import length_mask
from engine.algorithms.rewards import (
    overlong_penalty,
    shape_scores,
    token_rewards,
    weighted_sum,
)

KL_COEF = 0.1


def rollout(lengths, width, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch = len(lengths)
    actor, ref = -3 * torch.rand(2, batch, width, generator=generator)
    scores = torch.randn(batch, generator=generator)
    return scores, actor, ref, length_mask(torch.tensor(lengths), width)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 1000))
def test_a_row_sums_to_its_score_less_its_weighted_kl(lengths, seed):
    scores, actor, ref, mask = rollout(lengths, 9, seed)
    rewards = token_rewards(scores, actor, ref, mask, KL_COEF)
    for row, length in enumerate(lengths):
        kl = sum(actor[row, t].item() - ref[row, t].item() for t in range(length))
        expected = scores[row].item() - KL_COEF * kl if length else 0.0
        assert rewards[row].sum().item() == pytest.approx(expected, abs=1e-5)


def test_the_score_lands_on_the_last_action_only():
    lengths = [4, 1, 6, 0]
    scores, actor, ref, mask = rollout(lengths, 6)
    with_score = token_rewards(scores, actor, ref, mask, KL_COEF)
    without = token_rewards(torch.zeros(4), actor, ref, mask, KL_COEF)
    moved = with_score - without
    assert moved.nonzero().tolist() == [[0, 3], [1, 0], [2, 5]]
    assert torch.allclose(moved[[0, 1, 2], [3, 0, 5]], scores[:3], atol=1e-6)


def test_an_action_the_actor_prefers_to_the_ref_costs():
    mask = torch.ones(1, 3, dtype=torch.bool)
    actor, ref = torch.tensor([[-1.0, -2.0, -1.0]]), torch.tensor([[-3.0, -1.0, -1.0]])
    rewards = token_rewards(torch.tensor([5.0]), actor, ref, mask, 0.5)
    assert rewards.tolist() == [[-1.0, 0.5, 5.0]]


def test_padding_changes_nothing():
    scores, actor, ref, mask = rollout([5, 2, 3], 5)
    narrow = token_rewards(scores, actor, ref, mask, KL_COEF)

    def widen(values, fill):
        return torch.cat((values, torch.full((3, 4), fill)), dim=1)

    wide = token_rewards(
        scores, widen(actor, 1e30), widen(ref, float("nan")), widen(mask, False), KL_COEF
    )
    assert torch.equal(wide[:, :5], narrow)
    assert not wide[:, 5:].any()
    assert not narrow[1, 2:].any()


def test_where_actor_equals_ref_only_the_score_is_left():
    scores, actor, _, mask = rollout([3, 5], 5)
    rewards = token_rewards(scores, actor, actor.clone(), mask, KL_COEF)
    assert rewards.sum(dim=1).tolist() == scores.tolist()
    assert rewards.count_nonzero() == 2


def test_shaping_normalises_then_penalises_then_clips():
    scores = torch.tensor([14.0, 14.0, 10.0, 30.0, -30.0])
    ended = torch.tensor([True, False, False, True, True])
    shaped = shape_scores(scores, ended, mean=10.0, std=2.0, missing_eos_penalty=3.0, clip=2.5)
    assert shaped.tolist() == [2.0, -1.0, -2.5, 2.5, -2.5]


def test_each_part_of_shaping_is_optional():
    scores = torch.tensor([4.0, -8.0], dtype=torch.bfloat16)
    ended = torch.tensor([False, True])
    assert shape_scores(scores, ended).tolist() == [4.0, -8.0]
    assert shape_scores(scores, ended).dtype == torch.float32
    assert shape_scores(scores, ended, mean=1.0).tolist() == [3.0, -9.0]
    assert shape_scores(scores, ended, std=2.0).tolist() == [2.0, -4.0]
    assert shape_scores(scores, ended, missing_eos_penalty=1.0).tolist() == [3.0, -8.0]
    assert shape_scores(scores, ended, clip=5.0).tolist() == [4.0, -5.0]


@settings(deadline=None)
@given(st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=8), st.floats(0.1, 10), st.data())
def test_clip_bounds_the_final_score_whatever_the_rest(scores, clip, data):
    ended = data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)))
    shaped = shape_scores(
        torch.tensor(scores), torch.tensor(ended), 3.0, 0.5, missing_eos_penalty=100.0, clip=clip
    )
    assert shaped.abs().max() <= torch.tensor(clip)


def test_a_deviation_of_zero_is_refused():
    with pytest.raises(ValueError, match=r"std of 0\.0"):
        shape_scores(torch.ones(2), torch.tensor([True, True]), std=0.0)


def test_what_no_source_can_say_is_unknown_and_what_some_can_is_their_weighted_sum():
    nan = float("nan")
    rewards = torch.tensor([[1.0, 2.0], [nan, 2.0], [1.0, nan], [nan, nan]])
    total = weighted_sum(rewards, torch.tensor([0.5, -1.0]))
    assert total[:3].tolist() == [-1.5, -2.0, 0.5]
    assert total[3].isnan()


def test_the_overlong_penalty_rises_over_the_buffer_alone():
    lengths = torch.tensor([1, 80, 85, 90, 100])
    assert overlong_penalty(lengths, 100, 0.2).tolist() == [0.0, 0.0, 0.25, 0.5, 1.0]
    with pytest.raises(ValueError, match="buffer"):
        overlong_penalty(lengths, 100, 0.0)
