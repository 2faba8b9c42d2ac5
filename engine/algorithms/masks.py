"""Which tokens of an answer count, and statistics over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def at_least_fp32(values: Tensor) -> Tensor:
    """The values in fp32, or in fp64 where they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _is_eos(answers: Tensor, eos_ids: Sequence[int]) -> Tensor:
    return torch.isin(answers, torch.tensor(eos_ids, dtype=answers.dtype, device=answers.device))


def answer_lengths(answers: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Count the tokens of each answer up to and including its first EOS.

    Padding is never looked at, so pad may equal EOS. An answer without EOS has the full width.

    Args:
        answers: token ids without the prompt, `(batch, answer)`.
        eos_ids: every id that ends an answer.

    Returns:
        int64 lengths, `(batch,)`.
    """
    is_eos = _is_eos(answers, eos_ids).long()
    eos_before = is_eos.cumsum(dim=1) - is_eos
    return (eos_before == 0).sum(dim=1)


def ended_with_eos(answers: Tensor, eos_ids: Sequence[int]) -> Tensor:
    """Tell which answers `(batch, answer)` hold an EOS; bool `(batch,)`."""
    return _is_eos(answers, eos_ids).any(dim=1)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Mark the first `lengths` entries of each row; `(batch,)` to bool `(batch, width)`."""
    return torch.arange(width, device=lengths.device) < lengths.unsqueeze(1)


def _sum_over_ranks(totals: Tensor, group: dist.ProcessGroup | None) -> None:
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals, group=group)


@torch.no_grad()
def masked_moments(
    values: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and population variance over the mask, of all ranks together.

    With torch.distributed initialised this is a collective: each rank of `group` (all ranks by
    default) must call it, also one whose mask is empty.

    Args:
        values: `(batch, answer)`.
        mask: bool `(batch, answer)`.
        group: the ranks that share the statistics.

    Returns:
        fp64 scalars `(mean, variance)`; zeros where no rank has a token.
    """
    selected = torch.masked_select(values, mask).double()
    totals = torch.stack((selected.sum(), mask.sum().double()))
    _sum_over_ranks(totals, group)
    count = totals[1].clamp(min=1)
    mean = totals[0] / count
    # A second pass, since E[x^2] - E[x]^2 cancels where the mean is large.
    squares = (selected - mean).square().sum()
    _sum_over_ranks(squares, group)
    return mean, squares / count


@torch.no_grad()
def masked_std(values: Tensor, mask: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Unbiased standard deviation over the mask, of all ranks together; NaN below two values.

    A collective like `masked_moments`; shapes as there.
    """
    _, variance = masked_moments(values, mask, group)
    count = mask.sum().double()
    _sum_over_ranks(count, group)
    return (variance * count / (count - 1)).sqrt().masked_fill(count < 2, torch.nan)


@torch.no_grad()
def whiten(
    values: Tensor,
    mask: Tensor,
    shift_mean: bool = True,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale values to mean 0 and standard deviation 1 over the mask, of all ranks together.

    1e-8 is added to the variance, as in lm-human-preferences, so that equal values give 0 and
    not amplified rounding. A collective like `masked_moments`.

    Args:
        values: `(batch, answer)`.
        mask: bool `(batch, answer)`.
        shift_mean: False keeps the mean and changes only the standard deviation.
        group: the ranks that share the statistics.

    Returns:
        `(batch, answer)`, fp32 or more, zero outside of the mask.
    """
    mean, variance = masked_moments(values, mask, group)
    whitened = (values.double() - mean) * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        whitened = whitened + mean
    kept = torch.promote_types(values.dtype, torch.float32)
    return whitened.to(kept).masked_fill(~mask, 0.0)
