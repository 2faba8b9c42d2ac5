"""Groups of answers to one prompt: which have no spread, and what takes their place."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.advantages import group_means
from engine.rlhf.experience import Experience


def has_spread(rewards: Tensor, size: int) -> Tensor:
    """Which groups have rewards that differ, bool `(groups,)`.

    Args:
        rewards: of answers, those to a prompt next to each other, `(batch,)`; NaN counts nowhere.
        size: answers of a group.
    """
    _, stds = group_means(rewards.double(), size)
    return stds.nan_to_num(0.0) > 0


def with_replacements(
    experience: Experience,
    is_good: Tensor,
    fresh: Experience,
    is_fresh_good: Tensor,
    pad_id: int,
) -> tuple[Experience, list[int]]:
    """The experience with as many of its bad groups replaced by good fresh ones as there are.

    Args:
        experience: answers to prompts, groups next to each other.
        is_good: which groups are to stay, bool `(groups,)`.
        fresh: further groups of the same size.
        is_fresh_good: which of those may take a place, bool `(groups,)`.
        pad_id: fills what is wider in the other.

    Returns:
        it, and the places of the groups that were replaced.
    """
    bad = torch.nonzero(~is_good).flatten().tolist()
    good = torch.nonzero(is_fresh_good).flatten().tolist()
    size, groups = len(experience) // len(is_good), list(range(len(is_good)))
    replaced = []
    for place, new in zip(bad, good, strict=False):
        groups[place] = len(is_good) + new
        replaced.append(place)
    rows = [group * size + row for group in groups for row in range(size)]
    return Experience.concatenate([experience, fresh], pad_id).rows(rows), replaced
