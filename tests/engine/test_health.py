"""One table says where quantities are healthy: trainer, dashboard and help agree by it."""

from __future__ import annotations

import ast
import math
import re

import pytest

from dschat_tui.logs import health as verdicts_module
from dschat_tui.logs.health import CHECK, Vitals, verdicts
from dschat_tui.logs.quantities import QUANTITIES
from dschat_tui.logs.records import Status
from dschat_tui.logs.series import Series
from engine import health
from engine.trainers import watchdog as watchdog_module
from engine.trainers.watchdog import Watchdog

LIMITS = [limit for limit in vars(health).values() if isinstance(limit, health.Limit)]
HEALTHY = {
    "answer_length": 12.0,
    "kl": 1.0,
    "reward_at_clip_share": 0.0,
    "reward_ema": 0.0,
    "score_std": 1.0,
}


def warns(name: str, value: float) -> bool:
    """Whether the trainer warns of a quantity that stays at a value for some steps."""
    warnings: list[str] = []
    report = type("Report", (), {"warning": staticmethod(warnings.append)})
    watchdog = Watchdog(report, {})
    for _ in range(10):
        watchdog.watch_rollouts({**HEALTHY, name: value})
    return bool(warnings)


def is_to_be_checked(name: str, value: float) -> bool:
    """Whether the dashboard wants a quantity checked that stays at a value."""
    series = Series()
    for index in range(40):
        series.append(value, index)
    step = "reward" if name == "accuracy" else "ppo"
    found = verdicts(Vitals({name: series}, Status(step=step, done=40)))
    return any(verdict.level == CHECK for verdict in found if verdict.id == name)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("reward_at_clip_share", [share / 100 for share in range(101)]),
        ("answer_length", [length / 4 for length in range(1, 41)]),
        ("kl", [nats / 4 for nats in range(-20, 161)]),
        ("frac_reward_zero_std", [share / 100 for share in range(101)]),
        ("completions/clipped_ratio", [share / 100 for share in range(101)]),
    ],
)
def test_trainer_and_dashboard_alarm_at_the_same_values(name, values):
    warned = [warns(name, value) for value in values]
    assert any(warned)
    assert not all(warned)
    assert warned == [is_to_be_checked(name, value) for value in values]


@pytest.mark.parametrize(
    "limit", [limit for limit in LIMITS if limit.name in HEALTHY | QUANTITIES], ids=lambda x: x.name
)
def test_the_dashboard_alarms_beyond_the_bounds_of_the_table(limit):
    name = limit.name
    for bound, outwards in ((limit.lowest, -1e-6), (limit.highest, 1e-6)):
        if math.isfinite(bound):
            assert not is_to_be_checked(name, bound - outwards)
            assert is_to_be_checked(name, bound + outwards)


def test_help_states_the_numbers_of_the_table_and_no_others():
    limited = [quantity for quantity in QUANTITIES.values() if quantity.limit is not None]
    assert {quantity.limit.name for quantity in limited} >= {"kl", "reward_at_clip_share"}
    for quantity in limited:
        assert str(quantity.limit) in quantity.help
        assert set(re.findall(r"[0-9.]*[0-9]", f"{quantity.meaning} {quantity.normal}")) <= {
            "0",
            "1",
        }


@pytest.mark.parametrize("module", [watchdog_module, verdicts_module], ids=lambda m: m.__name__)
def test_no_other_module_has_a_bound_of_its_own(module):
    with open(module.__file__, encoding="utf-8") as file:
        nodes = list(ast.walk(ast.parse(file.read())))
    numbers = {n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is float}
    bounds = {abs(bound) for limit in LIMITS for bound in (limit.lowest, limit.highest)}
    assert not numbers & bounds
