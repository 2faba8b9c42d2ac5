"""Counts what PPO's updates do, without a wait for the device in between."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TypedDict

from torch import Tensor

from engine.algorithms.policy import PolicyLoss, ValueLoss
from engine.distributed import max_over_ranks, sum_over_ranks


class UpdateMetrics(TypedDict):
    """What the updates did, by the names of metrics.jsonl; None where there is no such loss."""

    actor_loss: float
    critic_loss: float | None
    unsupervised_loss: float | None
    approx_kl: float
    clip_fraction: float
    value_clip_fraction: float | None
    first_ratio_mean: float
    ratio_mean: float
    ratio_max: float
    actor_gradient_norm: float
    critic_gradient_norm: float | None


@dataclass(frozen=True)
class UpdateTotals:
    """What the updates on one rollout batch did.

    Attributes:
        metrics: by their names in metrics.jsonl, over all ranks.
        tokens: that the losses are means over, of all ranks.
        flops: of this rank.
    """

    metrics: UpdateMetrics
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
        self.sums.setdefault("first_tokens", policy.token_count)
        self.sums["actor_loss"] += policy.loss_sum.detach()
        self.sums["tokens"] += policy.token_count
        self.sums["clipped"] += policy.clipped_low_count + policy.clipped_high_count
        self.sums["ratio"] += policy.ratio_sum
        self.sums["approx_kl"] += policy.approx_kl_sum
        if critic is not None:
            self.sums["critic_loss"] += critic.loss_sum.detach()
            self.sums["value_clipped"] += critic.clipped_count
        self.ratio_max = policy.ratio_max.clamp(min=self.ratio_max)

    def over_ranks(self) -> UpdateTotals:
        """What the updates of all ranks add up to; a collective, and the read of the device."""
        names = sorted(self.sums)
        totals = sum_over_ranks(*(self.sums[name] for name in names))
        sums = defaultdict(float, zip(names, totals, strict=True))
        tokens, text_tokens = sums["tokens"], sums["unsupervised_tokens"]
        text_loss = sums["unsupervised_loss"] / text_tokens if text_tokens else None
        has_critic = "critic_loss" in sums
        return UpdateTotals(
            {
                "actor_loss": sums["actor_loss"] / tokens,
                "critic_loss": sums["critic_loss"] / tokens if has_critic else None,
                "unsupervised_loss": text_loss,
                "approx_kl": sums["approx_kl"] / tokens,
                "clip_fraction": sums["clipped"] / tokens,
                "value_clip_fraction": sums["value_clipped"] / tokens
                if "value_clipped" in sums
                else None,
                "first_ratio_mean": sums["first_ratio"] / sums["first_tokens"],
                "ratio_mean": sums["ratio"] / tokens,
                "ratio_max": max_over_ranks(self.ratio_max),
                "actor_gradient_norm": self.actor_gradient_norm,
                "critic_gradient_norm": self.critic_gradient_norm if has_critic else None,
            },
            tokens,
            self.flops,
        )
