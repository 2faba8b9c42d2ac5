"""Counts what the updates of step 3 do, without a wait for the device in between."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypedDict

from torch import Tensor

from engine.algorithms.averages import mean
from engine.algorithms.policy import Objective, PolicyLoss, ValueLoss
from engine.distributed import max_over_ranks, sum_over_ranks


class UpdateMetrics(TypedDict):
    """What the updates did, by the names of metrics.jsonl; None where there is no such loss."""

    actor_loss: float | None
    critic_loss: float | None
    unsupervised_loss: float | None
    approx_kl: float | None
    clip_fraction: float | None
    value_clip_fraction: float | None
    first_ratio_mean: float | None
    ratio_mean: float | None
    ratio_max: float
    actor_gradient_norm: float
    critic_gradient_norm: float | None


@dataclass(frozen=True)
class UpdateTotals:
    """What the updates on one rollout batch did.

    Attributes:
        metrics: by their names in metrics.jsonl, over all ranks.
        clipped: shares of the ratios beyond their lower and their upper bound.
        tokens: that were learnt from, of all ranks.
        flops: of this rank.
    """

    metrics: UpdateMetrics
    clipped: tuple[float | None, float | None]
    tokens: float
    flops: float


@dataclass
class UpdateStats:
    """What the updates on one rollout batch add up to, on this rank.

    Sums and maximum stay on the device until the report: to read one, the host would wait for all
    work that is queued there, once per micro batch.
    """

    sums: defaultdict[str, Tensor | float] = field(default_factory=lambda: defaultdict(float))
    ratio_max: Tensor | float = 0.0
    flops: float = 0.0
    actor_gradient_norm: float = math.nan
    critic_gradient_norm: float = math.nan

    def add(self, policy: PolicyLoss, critic: ValueLoss | None) -> None:
        """Count one micro batch."""
        # The policy of the first micro batch is the one that answered.
        self.sums.setdefault("first_ratio", policy.ratio_sum)
        self.sums.setdefault("first_ratios", policy.ratio_count)
        self.sums["actor_loss"] += policy.loss_sum.detach()
        self.sums["tokens"] += policy.token_count
        self.sums["answers"] += policy.answer_count
        self.sums["ratios"] += policy.ratio_count
        self.sums["clipped_low"] += policy.clipped_low_count
        self.sums["clipped_high"] += policy.clipped_high_count
        self.sums["ratio"] += policy.ratio_sum
        self.sums["approx_kl"] += policy.approx_kl_sum
        if critic is not None:
            self.sums["critic_loss"] += critic.loss_sum.detach()
            self.sums["value_clipped"] += critic.clipped_count
        self.ratio_max = policy.ratio_max.clamp(min=self.ratio_max)

    def over_ranks(self, objective: Objective) -> UpdateTotals:
        """What the updates of all ranks add up to; a collective, and the read of the device.

        Args:
            objective: that says what the actor's loss is a mean over.
        """
        names = sorted(self.sums)
        totals = sum_over_ranks(*(self.sums[name] for name in names))
        sums = defaultdict(float, zip(names, totals, strict=True))
        tokens, ratios = sums["tokens"], sums["ratios"]
        has_critic = "critic_loss" in sums
        return UpdateTotals(
            {
                "actor_loss": mean(
                    sums["actor_loss"], objective.normalizer(tokens, sums["answers"])
                ),
                "critic_loss": mean(sums["critic_loss"], tokens) if has_critic else None,
                "unsupervised_loss": mean(sums["unsupervised_loss"], sums["unsupervised_tokens"]),
                "approx_kl": mean(sums["approx_kl"], tokens),
                "clip_fraction": mean(sums["clipped_low"] + sums["clipped_high"], ratios),
                "value_clip_fraction": mean(sums["value_clipped"], tokens) if has_critic else None,
                "first_ratio_mean": mean(sums["first_ratio"], sums["first_ratios"]),
                "ratio_mean": mean(sums["ratio"], ratios),
                "ratio_max": max_over_ranks(self.ratio_max),
                "actor_gradient_norm": self.actor_gradient_norm,
                "critic_gradient_norm": self.critic_gradient_norm if has_critic else None,
            },
            (mean(sums["clipped_low"], ratios), mean(sums["clipped_high"], ratios)),
            tokens,
            self.flops,
        )
