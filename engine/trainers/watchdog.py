"""Notices training that has gone wrong: stops what cannot recover, warns of what is doubtful."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from deepspeed import DeepSpeedEngine

from engine.health import (
    ANSWER_LENGTH,
    CUT_OFF,
    FLAT_REWARD,
    KL,
    LOSS_SCALE_FLOOR,
    NO_SPREAD,
    REWARD_AT_CLIP,
)
from engine.report import Report
from engine.trainers.overflow import loss_scale

# Steps in a row before an alarm: one bad step is not a trend.
_FLOOR_STEPS = int(LOSS_SCALE_FLOOR.highest) + 1
_TREND_STEPS = 5
# Steps over which the reward must move.
_FLAT_STEPS = 30

_ADVICE = (
    "Training diverged. The last checkpoint is from before; lower the learning rate, or set "
    "dtype=bf16 where it is fp16"
)


class Watchdog:
    """Watches one step's metrics and engines."""

    def __init__(self, report: Report, engines: Mapping[str, DeepSpeedEngine]) -> None:
        self._report = report
        self._engines = engines
        self._in_a_row: Counter[str] = Counter()
        self._rewards: list[float] = []

    def check(self, step: int, values: Mapping[str, float]) -> None:
        """Stop where going on would waste the run; checkpoints of earlier steps stay.

        In fp16 a step that overflowed is skipped and its gradient norm is not finite: only a loss
        scale that stays at its floor ends training there.

        Args:
            step: from 0.
            values: losses, rewards and gradient norms of the step.

        Raises:
            FloatingPointError: a value is not finite, or the loss scale stays at its floor.
        """
        skipping = [name for name, engine in self._engines.items() if not engine.was_step_applied()]
        for name, engine in self._engines.items():
            at_floor = name in skipping and engine.fp16_enabled() and loss_scale(engine) <= 1
            if self._held(f"{name} floor", at_floor, _FLOOR_STEPS):
                raise FloatingPointError(
                    f"the loss scale of the {name} stayed at its floor for {_FLOOR_STEPS} steps, "
                    f"the last of them step {step}: every step is skipped. {_ADVICE}"
                )
        for name, value in values.items():
            if not math.isfinite(value) and not (skipping and name.endswith("gradient_norm")):
                raise FloatingPointError(f"{name} is {value} at step {step}. {_ADVICE}")

    def watch_rollouts(self, values: Mapping[str, float]) -> None:
        """Warn of answers that collapse, a KL out of bounds, a reward at its bound or flat.

        Args:
            values: the metrics of a PPO step.
        """
        length, kl = values["answer_length"], values["kl"]
        if self._held("short", not ANSWER_LENGTH.holds(length), _TREND_STEPS):
            self._report.warning(
                f"answers have {length:.1f} tokens on average, below {ANSWER_LENGTH.lowest:g} for "
                f"{_TREND_STEPS} steps; check the reward model and ppo.kl_coef"
            )
        if self._held("kl", kl > KL.highest, 1):
            self._report.warning(
                f"the KL is {kl:.1f} nats an answer, above {KL.highest:g}: the actor is far "
                "from the SFT model; check answers for nonsense, raise ppo.kl_coef"
            )
        # The estimate of one batch may be below 0 by chance, but not those of several in a row.
        if self._held("negative kl", kl < KL.lowest, _TREND_STEPS):
            self._report.warning(
                f"the KL is {kl:.1f} nats per answer, below {KL.lowest:g} for {_TREND_STEPS} "
                "steps: answers are not sampled from the probabilities that they are scored by; "
                "see whether hybrid_engine.enabled=false changes it"
            )
        share = values["reward_at_clip_share"]
        if self._held("clip", not REWARD_AT_CLIP.holds(share), _TREND_STEPS):
            self._report.warning(
                f"{share:.0%} of the scores are at the bound for {_TREND_STEPS} steps, where "
                "answers no longer differ; raise ppo.reward_clip or set ppo.normalize_reward"
            )
        self._watch_groups(values)
        self._rewards = [*self._rewards[1 - _FLAT_STEPS :], values["reward_ema"]]
        moved = max(self._rewards) - min(self._rewards)
        # Multiplied, since the standard deviation of equal scores is 0.
        least = FLAT_REWARD.lowest * values["score_std"]
        flat = len(self._rewards) == _FLAT_STEPS and moved < least
        if self._held("flat", flat, 1):
            self._report.warning(
                f"the reward moved by {moved:.3g} in {_FLAT_STEPS} steps: it is flat; check the "
                "learning rates, and whether the reward model distinguishes answers"
            )

    def _watch_groups(self, values: Mapping[str, float]) -> None:
        """Warn of groups that teach nothing and of answers cut off, where these are measured."""
        flat = values.get(NO_SPREAD.name, 0.0)
        if self._held("no spread", not NO_SPREAD.holds(flat), _TREND_STEPS):
            self._report.warning(
                f"{flat:.0%} of the groups have equal rewards for {_TREND_STEPS} steps: "
                f"{NO_SPREAD.why}"
            )
        cut = values.get(CUT_OFF.name, 0.0)
        if self._held("cut off", not CUT_OFF.holds(cut), _TREND_STEPS):
            self._report.warning(
                f"{cut:.0%} of the answers are cut off for {_TREND_STEPS} steps: {CUT_OFF.why}"
            )

    def _held(self, name: str, true_now: bool, steps: int) -> bool:
        """Whether something has now been true for so many steps in a row; True once each time."""
        self._in_a_row[name] = self._in_a_row[name] + 1 if true_now else 0
        return self._in_a_row[name] == steps
