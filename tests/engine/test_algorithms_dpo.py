"""Direct preference optimisation: its loss and what the loss is made of."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.language_modeling import IGNORED_LABEL, causal_lm_loss, sequence_log_probs
from engine.algorithms.preference import dpo_loss, implicit_rewards

RATIOS = st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=1, max_size=6)
SMOOTHING = st.floats(0, 0.5)


def rewards_of(pairs: list[tuple[float, float]]) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = torch.tensor(pairs).unbind(dim=1)
    return chosen.requires_grad_(), rejected.clone().requires_grad_()


def random_rows(rows: int = 4, seq: int = 9, vocabulary: int = 7):
    """Logits, and labels of rows that have a prompt, an answer and padding."""
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, seq, vocabulary, generator=generator)
    labels = torch.randint(vocabulary, (rows, seq), generator=generator)
    for row in range(rows):
        labels[row, : 2 + row % 2] = IGNORED_LABEL
        labels[row, seq - row :] = IGNORED_LABEL
    return logits, labels


@settings(deadline=None)
@given(st.lists(st.floats(-300, 0), min_size=2, max_size=8), st.floats(0.01, 5), SMOOTHING)
def test_a_policy_that_is_its_reference_loses_ln_2_a_pair(log_probs, beta, smoothing):
    own = torch.tensor(log_probs[: len(log_probs) // 2 * 2])
    chosen, rejected = implicit_rewards(own, own.clone(), beta).chunk(2)
    loss = dpo_loss(chosen, rejected, smoothing)
    assert float(loss) == pytest.approx(len(chosen) * math.log(2), rel=1e-5)


@settings(deadline=None)
@given(st.lists(st.floats(-4, 0), min_size=1, max_size=6), st.floats(0, 0.4))
def test_the_gradient_pushes_chosen_up_and_rejected_as_far_down(margins, smoothing):
    chosen, rejected = rewards_of([(margin, 0.0) for margin in margins])
    dpo_loss(chosen, rejected, smoothing).backward()
    assert (chosen.grad < 0).all()
    torch.testing.assert_close(chosen.grad, -rejected.grad)


def test_pairs_that_are_rated_wrong_weigh_more():
    chosen, rejected = rewards_of([(-2.0, 2.0), (0.0, 0.0), (2.0, -2.0)])
    dpo_loss(chosen, rejected).backward()
    assert chosen.grad[0] < chosen.grad[1] < chosen.grad[2] < 0


@settings(deadline=None)
@given(RATIOS, st.floats(-50, 50), SMOOTHING)
def test_only_the_difference_within_a_pair_matters(pairs, shift, smoothing):
    chosen, rejected = torch.tensor(pairs, dtype=torch.float64).unbind(dim=1)
    moved = dpo_loss(chosen + shift, rejected + shift, smoothing)
    torch.testing.assert_close(moved, dpo_loss(chosen, rejected, smoothing), rtol=1e-4, atol=1e-4)


@settings(deadline=None)
@given(RATIOS, SMOOTHING, st.integers(0, 6))
def test_a_batch_loses_what_its_parts_lose(pairs, smoothing, cut):
    chosen, rejected = torch.tensor(pairs).unbind(dim=1)
    parts = [
        dpo_loss(chosen[part], rejected[part], smoothing)
        for part in (slice(0, cut), slice(cut, None))
    ]
    whole = dpo_loss(chosen, rejected, smoothing)
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-4, atol=1e-4)


def test_smoothing_wants_a_margin_that_is_just_as_sure_as_the_labels():
    smoothing = 0.2
    margin = math.log((1 - smoothing) / smoothing)
    chosen, rejected = rewards_of([(margin, 0.0), (margin + 1, 0.0), (margin - 1, 0.0)])
    dpo_loss(chosen, rejected, smoothing).backward()
    assert chosen.grad[0] == pytest.approx(0.0, abs=1e-6)
    assert chosen.grad[1] > 0 > chosen.grad[2]


def test_labels_that_say_nothing_teach_nothing():
    chosen, rejected = rewards_of([(3.0, -1.0), (-1.0, 3.0)])
    loss = dpo_loss(chosen, rejected, 0.5)
    torch.testing.assert_close(loss, dpo_loss(rejected, chosen, 0.5))


def test_a_larger_beta_scales_the_rewards():
    own, reference = torch.randn(5), torch.randn(5)
    small, large = (implicit_rewards(own, reference, beta) for beta in (0.1, 0.4))
    torch.testing.assert_close(4 * small, large)
    assert torch.equal(small > 0, own > reference)


def test_prompt_and_padding_do_not_count():
    logits, labels = random_rows()
    before = sequence_log_probs(logits, labels)
    ignored = torch.cat((labels[:, 1:] == IGNORED_LABEL, torch.ones(4, 1, dtype=bool)), dim=1)
    noisy = logits + 100 * torch.randn_like(logits) * ignored.unsqueeze(-1)
    assert torch.equal(sequence_log_probs(noisy, labels), before)
    noisy.requires_grad_()
    sequence_log_probs(noisy, labels).sum().backward()
    assert noisy.grad[ignored].abs().max() == 0
    assert (noisy.grad[~ignored].abs().sum(dim=-1) > 0).all()


def test_more_padding_changes_nothing():
    logits, labels = random_rows()
    wide_logits = torch.nn.functional.pad(logits, (0, 0, 0, 3), value=5.0)
    wide_labels = torch.nn.functional.pad(labels, (0, 3), value=IGNORED_LABEL)
    torch.testing.assert_close(
        sequence_log_probs(wide_logits, wide_labels), sequence_log_probs(logits, labels)
    )


def test_rows_together_have_the_loss_of_language_modelling():
    logits, labels = random_rows()
    loss, tokens = causal_lm_loss(logits, labels)
    torch.testing.assert_close(-sequence_log_probs(logits, labels).sum(), loss)
    one = sequence_log_probs(logits[:1], labels[:1])
    sure = torch.nn.functional.one_hot(labels[:1].clamp(min=0), 7).roll(-1, dims=1) * 50.0
    assert float(one) < float(sequence_log_probs(sure, labels[:1])) == pytest.approx(0, abs=1e-6)
    assert int(tokens) == int((labels[:, 1:] != IGNORED_LABEL).sum())
