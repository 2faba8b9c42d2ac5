"""Positions of tokens beside padding."""

from __future__ import annotations

import inspect

from torch import Tensor, nn


def position_arguments(model: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """`position_ids` `(batch, seq)` counted over real tokens, for models that take them.

    So left padding changes no position. BLOOM takes none: it biases attention by the mask itself.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)}
