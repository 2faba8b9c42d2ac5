"""From the scores of the reward model and of functions to the rewards that step 3 learns from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.algorithms.masks import masked_moments
from engine.algorithms.rewards import overlong_penalty, shape_scores, weighted_sum
from engine.config.schema import RunConfig
from engine.rlhf.experience import Experience

# Below this, scores are taken to be all the same, and are not blown up.
_SMALLEST_STD = 1e-6


class Rewards:
    """Adds up an answer's reward: the reward model's shaped score, functions, and penalties.

    The score is normalised by those of the SFT model's answers, loses the penalty for a missing
    EOS, and is clipped. Rewards of functions stay as they are, since their scale is the user's;
    where there are only functions, the penalty is taken off their sum.

    Attributes:
        normalization: mean and standard deviation of the SFT model's scores; None: not normalised.
    """

    def __init__(
        self, config: RunConfig, weights: Sequence[float] = (), model_weight: float = 1.0
    ) -> None:
        self._options = config.ppo
        self._overlong = config.algorithm.overlong_buffer
        self._weights = torch.tensor([*weights], dtype=torch.float32)
        self._model_weight = model_weight
        self.normalization: tuple[float, float] | None = None

    def normalize_by(self, scores: Sequence[Tensor]) -> tuple[float, float]:
        """Mean and std of the unchanged actor's scores; a collective of all ranks."""
        mean, variance = moments(torch.cat(tuple(scores)))
        self.normalization = float(mean), max(math.sqrt(variance), _SMALLEST_STD)
        return self.normalization

    def shaped_scores(self, experience: Experience) -> Tensor:
        """The reward of the reward model alone, `(batch,)`."""
        assert experience.scores is not None
        mean, std = self.normalization or (None, None)
        return shape_scores(
            experience.scores,
            experience.ended,
            mean=mean,
            std=std,
            missing_eos_penalty=self._options.missing_eos_penalty,
            clip=self._options.reward_clip,
        )

    def at_bound(self, experience: Experience) -> Tensor:
        """Which scores lie at the bound of `ppo.reward_clip`, bool `(batch,)`."""
        if experience.scores is None:
            return torch.zeros_like(experience.ended)
        return self.shaped_scores(experience).abs() >= self._options.reward_clip

    def __call__(self, experience: Experience) -> Tensor:
        """The rewards of answers, `(batch,)`; NaN where nothing could be said of one."""
        if experience.function_rewards is None:
            total = self.shaped_scores(experience)
        else:
            total = self._with_functions(experience, experience.function_rewards)
        if self._overlong:
            lengths = experience.mask.sum(dim=1)
            longest = self._options.max_answer_length
            total = total - overlong_penalty(lengths, longest, self._overlong)
        return total

    def _with_functions(self, experience: Experience, rewards: Tensor) -> Tensor:
        weights = self._weights.to(rewards.device)
        if experience.scores is not None:
            scores = self.shaped_scores(experience).unsqueeze(1)
            model = torch.tensor([self._model_weight], device=rewards.device)
            return weighted_sum(torch.cat((scores, rewards), dim=1), torch.cat((model, weights)))
        return shape_scores(
            weighted_sum(rewards, weights),
            experience.ended,
            missing_eos_penalty=self._options.missing_eos_penalty,
        )


def moments(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of one number per answer, over all answers of all ranks that have one."""
    return masked_moments(values, ~values.isnan())
