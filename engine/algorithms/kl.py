"""KL divergence of the actor from the reference: estimators and the adaptive coefficient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from engine.algorithms.masks import at_least_fp32


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL(actor, ref) per token by the log-ratio: unbiased, may be negative.

    Source of k1, k2 and k3: Schulman, Approximating KL Divergence (2020).

    Args:
        log_probs: of tokens sampled from the actor, `(batch, answer)`.
        ref_log_probs: of the same tokens under the reference, `(batch, answer)`.

    Returns:
        `(batch, answer)`, fp32 or more.
    """
    return at_least_fp32(log_probs) - at_least_fp32(ref_log_probs)


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL(actor, ref) per token by half the squared log-ratio: biased, never negative.

    Arguments and shape as in `k1`.
    """
    return 0.5 * k1(log_probs, ref_log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate KL(actor, ref) per token with a control variate: unbiased, never negative.

    Arguments and shape as in `k1`.
    """
    log_ratio = k1(log_probs, ref_log_probs)
    # Not every expm1 rounds exactly, and one ulp low would take the sum below 0.
    return (torch.expm1(-log_ratio) + log_ratio).clamp(min=0.0)


ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


class AdaptiveKLController:
    """A KL coefficient that steers the KL per sequence towards a target (Ziegler et al. 2019)."""

    def __init__(self, initial: float, target: float, horizon: float) -> None:
        """Start at a coefficient.

        Args:
            initial: the first coefficient.
            target: KL per sequence, in nats, at which the coefficient stays as it is.
            horizon: sequences over which the coefficient may change by a fifth.

        Raises:
            ValueError: target or horizon is not above 0.
        """
        if target <= 0 or horizon <= 0:
            raise ValueError(
                f"Adaptive KL needs a target and a horizon above 0, not {target} and {horizon}."
            )
        self.value = initial
        self.target = target
        self.horizon = horizon

    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        """Move the coefficient after a batch, by a factor within 1 +- 0.2 n / horizon.

        Args:
            kl_per_sequence: mean over all ranks of the KL summed over an answer, in nats.
            num_sequences: n, the sequences of all ranks in the batch.

        Raises:
            ValueError: the KL is NaN, or so many sequences came that the coefficient could
                reach 0.
        """
        if math.isnan(kl_per_sequence):
            raise ValueError(
                "The KL per sequence is nan, so the KL coefficient cannot adapt; "
                "look for nan in the log-probabilities of the actor and the ref."
            )
        if num_sequences >= 5 * self.horizon:
            raise ValueError(
                f"{num_sequences} sequences an update are too many for an adaptive KL horizon "
                f"of {self.horizon}; raise the horizon above {num_sequences / 5:g}."
            )
        error = min(max(kl_per_sequence / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must keep."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take the coefficient from a checkpoint; target and horizon stay the configured ones."""
        self.value = state["value"]
