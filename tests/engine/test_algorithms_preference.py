import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.preference import (
    divergence_start,
    gather_last,
    last_token_index,
    pairwise_loss,
    pairwise_loss_all_tokens,
)

PAD = 0


def padded(texts, width=None):
    width = width or max(map(len, texts))
    ids = torch.tensor([[*text, *[PAD] * (width - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in texts])
    return ids, mask


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 3))
def test_left_and_right_padding_find_the_same_last_token(lengths, extra):
    width = max(lengths) + extra
    right = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    left = right.flip(1)
    values = torch.randn(len(lengths), width)
    assert last_token_index(right).tolist() == [n - 1 for n in lengths]
    assert last_token_index(left).tolist() == [width - 1] * len(lengths)
    assert torch.equal(last_token_index(right.bool()), last_token_index(right))
    moved = torch.stack([row.roll(width - n) for row, n in zip(values, lengths, strict=True)])
    assert torch.equal(gather_last(values, right), gather_last(moved, left))


def test_padding_on_both_sides_as_in_a_rollout():
    # A left-padded prompt followed by a right-padded answer.
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1]])
    values = torch.arange(12.0).view(2, 6).requires_grad_()
    found = gather_last(values, mask)
    assert found.tolist() == [4.0, 11.0]
    found.sum().backward()
    assert values.grad.nonzero().tolist() == [[0, 4], [1, 5]]


def test_a_row_without_tokens_is_refused_by_its_number():
    with pytest.raises(ValueError, match=r"Rows \[1\] have no real token"):
        last_token_index(torch.tensor([[1, 0], [0, 0]]))


def test_pairwise_loss_of_known_margins_is_summed_over_pairs():
    zeros = torch.zeros(3)
    assert pairwise_loss(zeros, zeros).item() == pytest.approx(3 * math.log(2))
    # A margin of log 3 is a preference of 3 : 1.
    margin = torch.tensor([math.log(3)])
    assert pairwise_loss(margin, torch.zeros(1)).item() == pytest.approx(math.log(4 / 3))
    assert pairwise_loss(torch.zeros(1), margin).item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pairwise_loss_and_gradient_are_finite_at_huge_margins(dtype):
    chosen = torch.tensor([1e4, -1e4, 6e4], dtype=dtype, requires_grad=True)
    rejected = torch.tensor([0.0, 0.0, -6e4], dtype=dtype)
    loss = pairwise_loss(chosen, rejected)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(1e4, rel=1e-2)
    assert chosen.grad.tolist() == [0.0, -1.0, 0.0]


def test_swapping_the_pair_mirrors_the_gradient():
    scores = torch.randn(5, generator=torch.Generator().manual_seed(0))
    others = torch.randn(5, generator=torch.Generator().manual_seed(1))

    def gradients(chosen, rejected):
        chosen, rejected = chosen.clone().requires_grad_(), rejected.clone().requires_grad_()
        pairwise_loss(chosen, rejected).backward()
        assert (chosen.grad < 0).all()
        assert torch.allclose(chosen.grad, -rejected.grad)
        return chosen.grad

    # sigmoid(-m) + sigmoid(m) = 1
    total = gradients(scores, others) + gradients(others, scores)
    assert torch.allclose(total, torch.full((5,), -1.0))


def test_divergence_starts_at_the_first_token_that_differs():
    chosen = [[5, 6, 7, 8], [5, 6], [5, 6, 7], [9, 6], [5, 6]]
    rejected = [[5, 6, 9, 8], [5, 6, 7], [5, 6], [5, 6], [5, 6]]
    ids, mask = padded(chosen, 5)
    other_ids, other_mask = padded(rejected, 5)
    assert divergence_start(ids, mask, other_ids, other_mask).tolist() == [2, 2, 2, 0, 2]


def test_a_text_that_ends_where_the_other_goes_on_with_pad_as_a_token_differs():
    ids, mask = padded([[5, 6]], 4)
    other_ids, other_mask = padded([[5, 6, PAD, PAD]], 4)
    assert torch.equal(ids, other_ids)
    assert divergence_start(ids, mask, other_ids, other_mask).tolist() == [2]


def test_all_tokens_loss_averages_from_the_first_difference_to_the_longer_end():
    ids, mask = padded([[5, 6, 7], [5, 6]], 6)
    other_ids, other_mask = padded([[5, 8, 7, 9], [5, 6, 7]], 6)
    values = torch.randn(2, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    others = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    loss = pairwise_loss_all_tokens(values, others, ids, mask, other_ids, other_mask)
    first = sum(pairwise_loss(values[0, t], others[0, t]).item() for t in (1, 2, 3)) / 3
    second = pairwise_loss(values[1, 2], others[1, 2]).item()
    assert loss.item() == pytest.approx(first + second, rel=1e-5)
    loss.backward()
    assert values.grad.nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 2]]

    counted = values.grad != 0
    noisy = torch.where(counted, values.detach(), torch.tensor(float("nan")))
    again = pairwise_loss_all_tokens(noisy, others, ids, mask, other_ids, other_mask)
    assert again == loss


def test_all_tokens_loss_of_the_same_text_is_zero():
    ids, mask = padded([[5, 6, 7]], 4)
    values = torch.randn(1, 4, requires_grad=True)
    loss = pairwise_loss_all_tokens(values, values + 1, ids, mask, ids, mask)
    loss.backward()
    assert loss == 0.0
    assert not values.grad.any()


def test_pairs_add_up_however_they_are_cut():
    generator = torch.Generator().manual_seed(2)
    lengths = [[int(n) for n in torch.randint(2, 8, (6,), generator=generator)] for _ in range(2)]
    texts = [
        [torch.randint(1, 9, (n,), generator=generator).tolist() for n in row] for row in lengths
    ]
    (ids, mask), (other_ids, other_mask) = (padded(each, 8) for each in texts)
    values, others = torch.randn(2, 6, 8, generator=generator)
    arguments = (values, others, ids, mask, other_ids, other_mask)
    whole = pairwise_loss_all_tokens(*arguments)
    parts = sum(
        pairwise_loss_all_tokens(*(each[i : i + 1] for each in arguments)) for i in range(6)
    )
    assert whole.item() == pytest.approx(parts.item(), rel=1e-5)
    scores = gather_last(values, mask)
    other_scores = gather_last(others, other_mask)
    halves = pairwise_loss(scores[:2], other_scores[:2]) + pairwise_loss(
        scores[2:], other_scores[2:]
    )
    assert pairwise_loss(scores, other_scores).item() == pytest.approx(halves.item(), rel=1e-5)
