"""Verdicts: what is normal is ok, what is not is to be checked, what is not told is not judged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from dschat_tui.logs.health import CHECK, NOTE, OK, Verdict, Vitals, verdicts
from dschat_tui.logs.records import Status
from dschat_tui.logs.series import Series


def series(value: Callable[[int], float], count: int = 200) -> Series:
    filled = Series()
    for step in range(count):
        filled.append(value(step), step)
    return filled


def judge(
    id: str,
    status: Status | None = None,
    silent_s: float | None = None,
    **functions: Callable[[int], float],
) -> Verdict | None:
    told = {name: series(function) for name, function in functions.items()}
    vitals = Vitals(told, status or Status(step="ppo", done=200), silent_s)
    return next((verdict for verdict in verdicts(vitals) if verdict.id == id), None)


@pytest.mark.parametrize(
    ("id", "name", "good", "bad"),
    [
        ("kl", "kl", lambda step: 3.0, lambda step: -2.0),
        ("kl", "kl", lambda step: 3.0, lambda step: step),
        ("kl_trend", "kl", lambda step: step / 50, lambda step: math.exp(step / 25)),
        ("first_ratio_mean", "first_ratio_mean", lambda step: 1.001, lambda step: 1.05),
        ("ratio_mean", "ratio_mean", lambda step: 1.02, lambda step: 1.4),
        ("clip_fraction", "clip_fraction", lambda step: 0.1, lambda step: 0.7),
        ("clip_fraction", "clip_fraction", lambda step: 0.1, lambda step: 0.0),
        ("explained_variance", "explained_variance", lambda s: s / 200, lambda s: -s / 100),
        ("answer_length", "answer_length", lambda step: 12, lambda step: 2),
        ("answer_length_change", "answer_length", lambda s: 100 + s / 10, lambda s: 20 + s),
        ("eos_share", "eos_share", lambda step: 0.8, lambda step: 0.8 - step / 200),
        ("reward_at_clip_share", "reward_at_clip_share", lambda s: 0.01, lambda s: s / 200),
        ("margin", "margin", lambda step: 0.3, lambda step: -0.1),
        ("not_finite", "reward", lambda step: 1.0, lambda step: math.nan if step == 7 else 1.0),
    ],
)
def test_a_quantity_is_judged(
    id: str, name: str, good: Callable[[int], float], bad: Callable[[int], float]
) -> None:
    verdict = judge(id, **{name: good})
    assert verdict is not None
    assert verdict.level == OK
    verdict = judge(id, **{name: bad})
    assert verdict is not None
    assert verdict.level == CHECK
    assert verdict.reading
    assert verdict.rule
    assert verdict.normal


def test_reward_rising_while_the_kl_runs_away() -> None:
    rising = {"reward": lambda step: step / 100, "kl": lambda step: step / 4.0}
    assert judge("reward_hacking", **rising).level == CHECK
    tame = {"reward": lambda step: step / 100, "kl": lambda step: step / 40.0}
    assert judge("reward_hacking", **tame).level == OK


def test_the_loss_scale_at_its_floor_alarms_within_three_steps() -> None:
    def level(count: int) -> str:
        status = Status(step="ppo", done=50, counters={"loss_scale_floor": count})
        verdict = judge("loss_scale_floor", status)
        assert verdict is not None
        return verdict.level

    assert [level(count) for count in (1, 2, 3, 1000)] == [OK, OK, CHECK, CHECK]


def test_overflows_are_a_share_of_the_steps() -> None:
    few = Status(step="ppo", done=200, counters={"overflow": 4})
    many = Status(step="ppo", done=200, counters={"overflow": 60})
    assert judge("overflow_rate", few).level == OK
    assert judge("overflow_rate", many).level == CHECK
    assert judge("overflow_rate", Status(step="ppo", done=200)) is None


def test_generation_is_a_share_of_the_time() -> None:
    def level(generate_s: float) -> str:
        verdict = judge("generation_share", e2e_s=lambda s: 10.0, generate_s=lambda s: generate_s)
        assert verdict is not None
        return verdict.level

    assert (level(6.0), level(9.5)) == (OK, CHECK)


def test_silence_is_measured_in_steps_and_at_least_a_minute() -> None:
    def level(silent_s: float, step_s: float) -> str:
        verdict = judge("stall", silent_s=silent_s, e2e_s=lambda step: step_s)
        assert verdict is not None
        return verdict.level

    assert level(50.0, 1.0) == OK
    assert level(70.0, 1.0) == CHECK
    assert level(300.0, 60.0) == OK
    assert level(700.0, 60.0) == CHECK
    assert judge("stall", silent_s=None, e2e_s=lambda step: 1.0) is None


def test_a_plateau_is_a_note() -> None:
    wiggle = lambda step: math.sin(step * 1.7)  # noqa: E731
    assert judge("plateau", reward=wiggle).level == NOTE
    assert judge("plateau", reward=lambda step: step / 20 + wiggle(step)).level == OK


def test_a_log_of_the_original_is_judged_by_what_it_holds() -> None:
    told = {name: series(lambda step: 1.0) for name in ("reward", "reward_ema", "actor_loss")}
    ids = {verdict.id for verdict in verdicts(Vitals(told, Status(step="ppo", done=200)))}
    assert ids == {"not_finite", "plateau"}


def test_nothing_is_said_of_an_empty_log_and_what_is_to_check_comes_first() -> None:
    assert verdicts(Vitals({}, Status())) == []
    told = {"kl": series(lambda step: 2.0), "eos_share": series(lambda step: 0.0)}
    levels = [verdict.level for verdict in verdicts(Vitals(told, Status(step="ppo", done=9)))]
    assert levels[0] == CHECK
    assert levels == sorted(levels, key=[CHECK, NOTE, OK].index)
