"""From the scores of the reward model to the rewards that step 3 learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.algorithms.masks import masked_moments
from engine.algorithms.rewards import shape_scores
from engine.config.schema import PpoConfig

# Below this, scores are taken to be all the same, and are not blown up.
_SMALLEST_STD = 1e-6


class RewardShaping:
    """Normalises scores by those of the SFT model's answers, takes off penalties, and clips.

    Attributes:
        normalization: mean and standard deviation of the SFT model's scores; None: not normalised.
    """

    def __init__(self, options: PpoConfig) -> None:
        self._options = options
        self.normalization: tuple[float, float] | None = None

    def normalize_by(self, scores: Sequence[Tensor]) -> tuple[float, float]:
        """Mean and std of the unchanged actor's scores; a collective of all ranks."""
        mean, variance = moments(torch.cat(tuple(scores)))
        self.normalization = float(mean), max(math.sqrt(variance), _SMALLEST_STD)
        return self.normalization

    def __call__(self, scores: Tensor, ended: Tensor) -> Tensor:
        """The rewards of answers, `(batch,)`, from their scores and whether they have an EOS."""
        mean, std = self.normalization or (None, None)
        return shape_scores(
            scores,
            ended,
            mean=mean,
            std=std,
            missing_eos_penalty=self._options.missing_eos_penalty,
            clip=self._options.reward_clip,
        )


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one number per answer, over all answers of all ranks."""
    return masked_moments(values, torch.ones_like(values, dtype=torch.bool))
