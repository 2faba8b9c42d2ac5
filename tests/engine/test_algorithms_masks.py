import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.algorithms.masks import (
    answer_lengths,
    ended_with_eos,
    length_mask,
    masked_moments,
    whiten,
)

PAD, EOS, OTHER_EOS = 1, 2, 7


def test_first_eos_is_in_the_mask_and_later_ones_are_not():
    # Pad equals EOS: everything after the first one is padding.
    answers = torch.tensor([[5, 6, EOS, EOS, EOS], [EOS] * 5, [5, 6, 4, 3, 5]])
    lengths = answer_lengths(answers, [EOS])
    assert lengths.tolist() == [3, 1, 5]
    assert length_mask(lengths, 5).tolist() == [
        [True, True, True, False, False],
        [True, False, False, False, False],
        [True] * 5,
    ]
    assert ended_with_eos(answers, [EOS]).tolist() == [True, True, False]


def test_any_of_several_eos_ids_ends_an_answer():
    answers = torch.tensor([[5, OTHER_EOS, EOS, PAD], [5, EOS, OTHER_EOS, PAD], [5, 5, 5, 5]])
    assert answer_lengths(answers, [EOS, OTHER_EOS]).tolist() == [2, 2, 4]
    assert answer_lengths(answers, [EOS]).tolist() == [3, 2, 4]
    assert answer_lengths(answers, []).tolist() == [4, 4, 4]
    assert answer_lengths(answers[:, :0], [EOS]).tolist() == [0, 0, 0]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([PAD, EOS, 3, 4]), min_size=6, max_size=6), min_size=1),
    st.integers(1, 4),
)
def test_more_padding_after_eos_changes_no_length(rows, extra):
    answers = torch.tensor(rows)
    ended = ended_with_eos(answers, [EOS])
    wider = torch.cat((answers, torch.full((len(rows), extra), PAD)), dim=1)
    before, after = answer_lengths(answers, [EOS]), answer_lengths(wider, [EOS])
    assert torch.equal(before[ended], after[ended])
    assert [row[: n - 1].count(EOS) for row, n in zip(rows, before, strict=True)] == [0] * len(rows)


def test_moments_ignore_what_is_outside_of_the_mask():
    values = torch.tensor([[1.0, 3.0, float("nan")], [8.0, float("inf"), -1e30]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    mean, variance = masked_moments(values, mask)
    assert mean == 4.0
    assert variance.item() == pytest.approx((3**2 + 1**2 + 4**2) / 3)


def test_an_integer_mask_is_refused_rather_than_used_as_an_index():
    with pytest.raises(RuntimeError, match=r"[Bb]ool"):
        masked_moments(torch.ones(2, 2), torch.ones(2, 2, dtype=torch.long))


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (50.0, 0.1), (-1e4, 30.0)])
def test_whitened_values_have_mean_0_and_deviation_1(offset, scale):
    generator = torch.Generator().manual_seed(0)
    values = offset + scale * torch.randn(6, 40, generator=generator)
    mask = length_mask(torch.tensor([40, 1, 0, 17, 33, 8]), 40)
    white = whiten(values, mask)
    assert abs(white[mask].mean()) < 1e-5
    assert abs(white[mask].std(correction=0) - 1) < 1e-4
    assert not white[~mask].any()
    kept = whiten(values, mask, shift_mean=False)
    assert kept[mask].mean().item() == pytest.approx(values[mask].mean().item(), rel=1e-5, abs=1e-5)
    assert kept[mask].std(correction=0).item() == pytest.approx(1, abs=2e-3)


def test_numbers_outside_of_the_mask_do_not_move_whitening():
    values = torch.randn(3, 9, generator=torch.Generator().manual_seed(1))
    mask = length_mask(torch.tensor([9, 4, 0]), 9)
    noisy = values.masked_fill(~mask, 1e30)
    noisy[2, 8] = float("nan")
    assert torch.equal(whiten(values, mask), whiten(noisy, mask))


@pytest.mark.parametrize("lengths", [[1, 0], [0, 0]])
def test_one_token_or_none_gives_zero_and_not_nan(lengths):
    white = whiten(torch.full((2, 3), 4.0), length_mask(torch.tensor(lengths), 3))
    assert white.tolist() == [[0.0] * 3] * 2


def test_equal_values_whiten_to_zero():
    values = torch.full((4, 100), 0.1)
    assert whiten(values, torch.ones(4, 100, dtype=torch.bool)).abs().max() < 1e-5


def uneven_rows() -> tuple[torch.Tensor, torch.Tensor]:
    values = 1000 + torch.randn(6, 12, generator=torch.Generator().manual_seed(2))
    return values, length_mask(torch.tensor([12, 3, 7, 1, 0, 12]), 12)


def run_rank(rank: int, folder: str) -> None:
    """One of two ranks: whiten an uneven part of the rows with the other."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", 2),
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    values, mask = uneven_rows()
    rows = slice(0, 2) if rank == 0 else slice(2, 6)
    empty = mask[rows] if rank == 0 else torch.zeros_like(mask[rows])
    result = {
        "white": whiten(values[rows], mask[rows]),
        "kept": whiten(values[rows], mask[rows], shift_mean=False),
        "moments": masked_moments(values[rows], mask[rows]),
        "first_rank_only": masked_moments(values[rows], empty),
    }
    torch.save(result, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_whiten_like_one_that_holds_all_rows(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))

    values, mask = uneven_rows()
    assert torch.allclose(torch.cat((first["white"], second["white"])), whiten(values, mask))
    whole = whiten(values, mask, shift_mean=False)
    assert torch.allclose(torch.cat((first["kept"], second["kept"])), whole)
    for both, one in zip(first["moments"], masked_moments(values, mask), strict=True):
        assert both.item() == pytest.approx(one.item(), rel=1e-12)
    assert first["moments"] == second["moments"]
    alone = [each.item() for each in masked_moments(values[:2], mask[:2])]
    assert [each.item() for each in second["first_rank_only"]] == pytest.approx(alone, rel=1e-12)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2])
