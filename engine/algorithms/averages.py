"""Means over counts that may be 0, and the exponential moving average of the actor's weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mean(total: float, count: float) -> float | None:
    """`total / count`; None where nothing was counted, as then nothing was measured."""
    return total / count if count else None


@torch.no_grad()
def ema_update(averages: Sequence[Tensor], parameters: Sequence[Tensor], decay: float) -> None:
    """Move each average towards its parameter, in place: decay * average + (1 - decay) * new.

    Args:
        averages: fp32, any shape; shards of a partitioned model do as well.
        parameters: of the same shapes, any float dtype and device.
        decay: share of the old average that is kept, 0 to 1.

    Raises:
        ValueError: the lists differ in length, or an average is not fp32: in 16 bits the small
            updates round away.
    """
    for average, parameter in zip(averages, parameters, strict=True):
        if average.dtype != torch.float32:
            raise ValueError(f"An average is {average.dtype}; keep averages in torch.float32.")
        average.lerp_(parameter.to(average.device, torch.float32), 1.0 - decay)
