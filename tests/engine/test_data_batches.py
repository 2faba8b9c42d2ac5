"""Batches: who gets which rows, in which order, padded how."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.data.batches import GlobalBatches, PairCollator, PromptCollator, SftCollator
from engine.data.order import shuffled

LENGTHS = np.random.RandomState(0).randint(1, 200, size=1000)


def epochs(seed, *numbers):
    """The batches of some epochs over `LENGTHS`, each a list of lists of row indices."""
    batches = GlobalBatches(LENGTHS, 32, seed)
    return [batches.epoch(number).tolist() for number in numbers]


def test_an_epoch_uses_every_row_at_most_once_and_epochs_differ():
    first, second = epochs(1, 0, 1)
    rows = [row for batch in first for row in batch]
    assert len(rows) == len(set(rows)) == 992
    assert all(len(batch) == 32 for batch in first)
    assert len(GlobalBatches(LENGTHS, 32, seed=1)) == len(first) == 31
    assert first != second
    assert first == epochs(1, 0)[0]
    assert first != epochs(2, 0)[0]


def test_rows_left_out_change_with_the_epoch():
    left_out = [set(range(1000)) - {r for b in epoch for r in b} for epoch in epochs(1, 0, 1)]
    assert left_out[0] != left_out[1]


def test_micro_batches_are_grouped_by_length_and_global_batches_are_not():
    batches = GlobalBatches(LENGTHS, 64, seed=1)
    for batch in batches.epoch(0):
        cuts = batches.local_micro_batches(batch, 0, 1, micro_batch_size=8)
        padded = sum(LENGTHS[cut].max() * len(cut) for cut in cuts)
        assert padded < 1.15 * LENGTHS[batch].sum()
    means = [LENGTHS[batch].mean() for batch in batches.epoch(0)]
    assert np.ptp(means) < LENGTHS.std()


def test_a_position_in_the_data_can_be_resumed():
    first, second = epochs(1, 0, 1)
    assert epochs(1, 1, 0, 1) == [second, first, second]
    assert first != second


def test_a_set_smaller_than_a_batch_is_one_batch():
    batches = GlobalBatches([3, 1, 2], 32, seed=1)
    assert [sorted(batch) for batch in batches.epoch(0)] == [[0, 1, 2]]
    with pytest.raises(ValueError, match="no rows"):
        GlobalBatches([], 4, seed=1)


@given(ranks=st.integers(1, 8), micro=st.integers(1, 9), seed=st.integers(0, 5))
def test_ranks_share_a_batch_without_overlap_and_with_as_many_rows(ranks, micro, seed):
    batches = GlobalBatches(LENGTHS, 8 * ranks, seed)
    batch = batches.epoch(0)[0]
    dealt = [batches.local_micro_batches(batch, rank, ranks, micro) for rank in range(ranks)]
    assert sorted(row for mine in dealt for cut in mine for row in cut) == sorted(batch)
    assert len({tuple(len(cut) for cut in mine) for mine in dealt}) == 1
    assert max(len(cut) for cut in dealt[0]) <= micro


def test_ranks_get_about_the_same_number_of_tokens():
    batches = GlobalBatches(LENGTHS, 64, seed=3)
    for batch in batches.epoch(0):
        totals = [
            sum(LENGTHS[row] for cut in batches.local_micro_batches(batch, r, 4) for row in cut)
            for r in range(4)
        ]
        assert max(totals) - min(totals) <= LENGTHS[batch].max()


def test_fewer_rows_than_ranks_is_an_error():
    batches = GlobalBatches([1, 2, 3], 3, seed=1)
    assert [len(batches.local_micro_batches([0, 1, 2], r, 2)[0]) for r in range(2)] == [1, 1]
    with pytest.raises(ValueError, match="3 rows cannot be distributed over 4 ranks"):
        batches.local_micro_batches([0, 1, 2], 0, 4)


@pytest.mark.parametrize(
    ("count", "size", "seed", "epoch", "expected"),
    [
        (11, 3, 1, 0, [[1, 6, 10], [7, 4, 5], [9, 0, 8]]),
        (11, 3, 1, 1, [[7, 0, 1], [3, 9, 4], [8, 2, 6]]),
        (7, 2, 1234, 5, [[6, 1], [0, 2], [5, 4]]),
    ],
)
def test_batches_are_those_of_runs_made_before(count, size, seed, epoch, expected):
    # Frozen: a resumed run would see other rows otherwise.
    batches = GlobalBatches([1] * count, size, seed)
    assert [list(batch) for batch in batches.epoch(epoch)] == expected


def test_an_epoch_is_ordered_once_for_all_its_steps(monkeypatch):
    ordered = []

    def count_and_shuffle(count, *key):
        ordered.append(key)
        return shuffled(count, *key)

    monkeypatch.setattr("engine.data.batches.shuffled", count_and_shuffle)
    batches = GlobalBatches(LENGTHS, 10, seed=1)
    for step in range(250):
        epoch, index = divmod(step, len(batches))
        assert len(batches.epoch(epoch)[index]) == 10
    assert ordered == [(1, 0), (1, 1), (1, 2)]


def test_the_order_is_a_fixed_permutation():
    order = shuffled(1000, 7, "x")
    assert sorted(order.tolist()) == list(range(1000))
    # Frozen: another order would change the split of runs made before.
    assert shuffled(8, 1234, "phases", 0).tolist() == FROZEN
    assert abs(np.corrcoef(order, np.arange(1000))[0, 1]) < 0.1


FROZEN = [2, 6, 0, 3, 4, 5, 7, 1]


def test_sft_padding_is_on_the_right_and_outside_the_loss():
    rows = [{"input_ids": [5, 6, 2], "labels": [-100, 6, 2]}, {"input_ids": [2], "labels": [2]}]
    batch = SftCollator(pad_token_id=2)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [2, 2, 2]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 2], [2, -100, -100]]
    assert SftCollator(0)([{"input_ids": [4, 0]}])["labels"].tolist() == [[4, 0]]


def test_pairs_are_stacked_chosen_first():
    rows = [
        {"chosen_ids": [1, 2], "rejected_ids": [1, 3, 4], "kind": None},
        {"chosen_ids": [5], "rejected_ids": [6], "kind": None},
    ]
    batch = PairCollator(pad_token_id=0)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 0], [5, 0, 0], [1, 3, 4], [6, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [2, 1, 3, 1]


def test_prompts_are_padded_on_the_left():
    batch = PromptCollator(pad_token_id=9)([{"prompt_ids": [9, 4]}, {"prompt_ids": [7]}])
    assert batch["input_ids"].tolist() == [[9, 4], [9, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1], [0, 1]]
    assert batch["input_ids"].dtype == torch.long
