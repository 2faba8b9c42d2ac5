"""What in a log needs attention, in plain words: pure functions over its series.

Each verdict has its reading, the rule that was applied, and the normal range of the quantity. None
is a proof: "check" means that it needs attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from dschat_tui.logs.quantities import QUANTITIES
from dschat_tui.logs.records import Status
from dschat_tui.logs.series import Series
from engine.config.steps import BY_NAME
from engine.health import (
    ACCURACY,
    ANSWER_LENGTH,
    ANSWER_LENGTH_CHANGE,
    CLIP_FRACTION,
    CUT_OFF,
    EOS_SHARE,
    EXPLAINED_VARIANCE,
    FIRST_RATIO,
    GENERATION_SHARE,
    KL,
    LOSS_SCALE_FLOOR,
    NO_SPREAD,
    OVERFLOW_SHARE,
    PLATEAU,
    RATIO,
    REWARD_AT_CLIP,
    SILENT_SECONDS,
    SILENT_STEPS,
    Limit,
)

OK, NOTE, CHECK = "ok", "note", "check"

# "now" is the mean of the last tenth, but of no fewer values than this
RECENT_VALUES = 3
COLUMNS = 40
MIN_VALUES_OF_A_TREND = 10

PLATEAU_VALUES = 40
# the policy that answered, up to rounding
_RATIO_OF_NO_UPDATE = 1.001


@dataclass(frozen=True)
class Verdict:
    """One verdict: `level` is ok, note or check."""

    id: str
    level: str
    title: str
    reading: str
    rule: str
    normal: str


@dataclass(frozen=True)
class Vitals:
    """What verdicts are based on; `silent_s` is how long nothing was written, None if it ended."""

    series: Mapping[str, Series]
    status: Status
    silent_s: float | None = None


def verdicts(vitals: Vitals) -> list[Verdict]:
    """All verdicts that the log has numbers for, those to check first."""
    found = [verdict for rule in RULES if (verdict := rule(vitals)) is not None]
    order = (CHECK, NOTE, OK)
    return sorted(found, key=lambda verdict: order.index(verdict.level))


def _means(series: Series | None) -> list[float]:
    if series is None:
        return []
    return [c.mean for c in series.columns(COLUMNS) if not math.isnan(c.mean)]


def _now(series: Series | None) -> float | None:
    """The mean of the newest tenth of a quantity, or None where there is none yet."""
    means = _means(series)
    if series is None or not means:
        return None
    if len(series) <= COLUMNS:
        means = means[-max(RECENT_VALUES, len(means) // 10) :]
    else:
        means = means[-max(1, len(means) // 10) :]
    return sum(means) / len(means)


def _halves(series: Series | None) -> tuple[float, float] | None:
    """Means of the first and second half, or None before there are enough values."""
    means = _means(series)
    if len(means) < MIN_VALUES_OF_A_TREND:
        return None
    half = len(means) // 2
    return sum(means[:half]) / half, sum(means[half:]) / (len(means) - half)


def _normal(name: str) -> str:
    return QUANTITIES[name].normal


def _held(
    name: str, title: str, reading: str, rule: str, holds: bool, normal: str | None = None
) -> Verdict:
    return Verdict(name, OK if holds else CHECK, title, reading, rule, normal or _normal(name))


def _within(limit: Limit, title: str) -> Callable[[Vitals], Verdict | None]:
    """The rule that a quantity is within its limit now."""

    def rule(vitals: Vitals) -> Verdict | None:
        value = _now(vitals.series.get(limit.name))
        if value is None:
            return None
        unit = f" {limit.unit}" if limit.unit else ""
        return _held(limit.name, title, f"{value:.4g}{unit}", str(limit), limit.holds(value))

    return rule


def not_finite(vitals: Vitals) -> Verdict | None:
    """NaN or infinity in a quantity."""
    bad = {name: s.nonfinite for name, s in vitals.series.items() if s.nonfinite}
    if not vitals.series:
        return None
    counts = ", ".join(f"{name} {count} times" for name, count in bad.items())
    return Verdict(
        "not_finite",
        CHECK if bad else OK,
        "NaN and infinity",
        counts or "none",
        "no value is NaN or infinite",
        "none; lower the learning rate, or use bf16",
    )


def loss_scale_floor(vitals: Vitals) -> Verdict | None:
    """The fp16 loss scale at its minimum, where every step is skipped."""
    count = vitals.status.counters.get("loss_scale_floor", 0)
    if not count:
        return None
    return _held(
        "loss_scale_floor",
        "loss scale at its floor",
        f"{count} times",
        str(LOSS_SCALE_FLOOR),
        LOSS_SCALE_FLOOR.holds(count),
        "never; steps are skipped and nothing is learnt: stop, lower the learning rate or use bf16",
    )


def overflow_rate(vitals: Vitals) -> Verdict | None:
    """How many steps overflowed."""
    count, done = vitals.status.counters.get("overflow", 0), vitals.status.done
    if not count:
        return None
    share = count / max(done, count)
    return _held(
        "overflow_rate",
        "overflows",
        f"{count} in {done} steps",
        str(OVERFLOW_SHARE),
        OVERFLOW_SHARE.holds(share) or done < MIN_VALUES_OF_A_TREND,
        "a few at the start of fp16, then one in some hundred steps",
    )


def kl_trend(vitals: Vitals) -> Verdict | None:
    """The KL running away: the second half far above the first."""
    halves = _halves(vitals.series.get("kl"))
    if halves is None:
        return None
    first, second = halves
    high = KL.highest / 4
    holds = second < max(4 * first, high)
    reading = f"{first:.4g}, then {second:.4g}"
    rule = f"the second half below 4 times the first, or below {high:g}"
    return _held("kl_trend", "KL trend", reading, rule, holds, _normal("kl"))


def reward_hacking(vitals: Vitals) -> Verdict | None:
    """Reward rising while the KL runs away: the reward model is being fooled."""
    reward, kl = (_halves(vitals.series.get(name)) for name in ("reward", "kl"))
    if reward is None or kl is None:
        return None
    high = KL.highest / 2
    hacks = reward[1] > reward[0] and kl[1] > high and kl[1] > 2 * kl[0]
    return _held(
        "reward_hacking",
        "reward against KL",
        f"reward {reward[0]:.3g} to {reward[1]:.3g}, KL {kl[0]:.3g} to {kl[1]:.3g}",
        f"no rising reward while KL doubles beyond {high:g}",
        not hacks,
        "both rise slowly; read the best answers, raise ppo.kl_coef",
    )


def ratio(vitals: Vitals) -> Verdict | None:
    """The mean ratio of new to old probabilities."""
    mean, largest = (_now(vitals.series.get(name)) for name in ("ratio_mean", "ratio_max"))
    if mean is None:
        return None
    reading = f"{mean:.4g}" + ("" if largest is None else f", at most {largest:.4g}")
    return _held("ratio_mean", "ratio", reading, str(RATIO), RATIO.holds(mean))


def clip_fraction(vitals: Vitals) -> Verdict | None:
    """How many ratios are clipped; of one update per rollout all are 1, and there is no verdict."""
    largest = _now(vitals.series.get("ratio_max"))
    if largest is not None and largest < _RATIO_OF_NO_UPDATE:
        return None
    return _within(CLIP_FRACTION, "clip fraction")(vitals)


def answer_length_change(vitals: Vitals) -> Verdict | None:
    """Answers that grow or shrink: a way to please the reward model without being better."""
    halves = _halves(vitals.series.get("answer_length"))
    if halves is None:
        return None
    first, second = halves
    change = second / first - 1 if first else 0.0
    return _held(
        "answer_length_change",
        "change of the answer length",
        f"{first:.3g}, then {second:.3g} tokens",
        str(ANSWER_LENGTH_CHANGE),
        ANSWER_LENGTH_CHANGE.holds(change),
        _normal("answer_length"),
    )


def generation_share(vitals: Vitals) -> Verdict | None:
    """How much of a step is generation."""
    whole, part = (_now(vitals.series.get(name)) for name in ("e2e_s", "generate_s"))
    if not whole or part is None:
        return None
    share = part / whole
    return Verdict(
        "generation_share",
        OK if GENERATION_SHARE.holds(share) else CHECK,
        "time spent generating",
        f"{share:.0%} of {whole:.3g} s",
        str(GENERATION_SHARE),
        f"less; {GENERATION_SHARE.why}",
    )


def accuracy(vitals: Vitals) -> Verdict | None:
    """Whether the reward model ranks the better answer higher."""
    series = vitals.series.get("eval_accuracy") or vitals.series.get("accuracy")
    step = vitals.status.step
    value = _now(series) if step and BY_NAME[step].phase == "reward" else None
    if value is None:
        return None
    return _held(
        "accuracy", "pairs ranked correctly", f"{value:.3g}", str(ACCURACY), ACCURACY.holds(value)
    )


def margin(vitals: Vitals) -> Verdict | None:
    """Whether chosen answers score above rejected ones."""
    value = _now(vitals.series.get("eval_margin") or vitals.series.get("margin"))
    if value is None:
        return None
    return _held("margin", "chosen minus rejected", f"{value:.3g}", "above 0", value > 0)


def plateau(vitals: Vitals) -> Verdict | None:
    """No progress in the second half: means of its quarters nearer than the noise."""
    name = "reward" if vitals.status.step == "ppo" else "loss"
    series = vitals.series.get(name)
    if series is None or len(series) < PLATEAU_VALUES:
        return None
    means = _means(series)
    half = means[len(means) // 2 :]
    third, fourth = half[: len(half) // 2], half[len(half) // 2 :]
    change = sum(fourth) / len(fourth) - sum(third) / len(third)
    centre = sum(half) / len(half)
    spread = math.sqrt(sum((x - centre) ** 2 for x in half) / len(half))
    moves = spread > 0 and PLATEAU.holds(abs(change) / spread)
    return Verdict(
        "plateau",
        OK if moves else NOTE,
        f"progress of the {name}",
        f"changed by {change:+.3g} over the last quarter",
        f"{PLATEAU}, {spread:.2g}",
        "flat near the end is normal; flat from the start is not",
    )


def seconds_per_step(series: Mapping[str, Series]) -> float | None:
    """The median seconds per step by the log, or None where it does not report them."""
    for name in ("e2e_s", "latency_s"):
        means = _means(series.get(name))
        if means:
            return median(means)
    return None


def stall(vitals: Vitals) -> Verdict | None:
    """Nothing written for much longer than a step takes."""
    if vitals.silent_s is None:
        return None
    step = seconds_per_step(vitals.series)
    limit = max(SILENT_SECONDS.highest, SILENT_STEPS.highest * (step or 0.0))
    waits = f"nothing written for {vitals.silent_s:.0f} s"
    return Verdict(
        "stall",
        OK if vitals.silent_s <= limit else CHECK,
        "signs of life",
        waits if vitals.silent_s > limit else f"wrote {vitals.silent_s:.0f} s ago",
        f"{SILENT_STEPS} or {SILENT_SECONDS.highest:g} s, here {limit:.0f} s",
        "a line each step; long phases name themselves (loading, tokenising, compiling)",
    )


RULES: tuple[Callable[[Vitals], Verdict | None], ...] = (
    not_finite,
    loss_scale_floor,
    overflow_rate,
    stall,
    _within(KL, "KL to the reference"),
    kl_trend,
    reward_hacking,
    _within(FIRST_RATIO, "ratio of the first minibatch"),
    ratio,
    clip_fraction,
    _within(EXPLAINED_VARIANCE, "critic"),
    _within(ANSWER_LENGTH, "answer length"),
    answer_length_change,
    _within(EOS_SHARE, "answers that end"),
    _within(CUT_OFF, "answers that are cut off"),
    _within(NO_SPREAD, "groups without spread"),
    _within(REWARD_AT_CLIP, "rewards at their clip"),
    accuracy,
    margin,
    plateau,
    generation_share,
)
