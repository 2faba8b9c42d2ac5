"""Rows gathered into columns: as if each value had been added to its series by itself."""

from __future__ import annotations

import math
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from dschat_tui.logs.points import Gatherer

NAMES = ("reward", "kl", "loss", "other_s")
VALUES = st.one_of(
    st.none(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(),
    st.just(10**400),
)


def alike(first: list[float], second: list[float]) -> bool:
    return repr(first) == repr(second)


@given(
    st.lists(
        st.lists(st.sampled_from(NAMES), unique=True, min_size=1).flatmap(
            lambda names: st.tuples(
                st.just(tuple(names)),
                st.lists(VALUES, min_size=len(names), max_size=len(names)),
            )
        ),
        max_size=40,
    ),
    st.integers(min_value=0, max_value=50),
)
def test_every_value_is_where_it_would_be_alone(rows, cut) -> None:
    gatherer = Gatherer()
    expected: defaultdict[str, list[tuple[float, int, int]]] = defaultdict(list)
    bad = set()
    for step, (names, values) in enumerate(rows):
        gatherer.add(names, values, step, 10 * step)
        for name, value in zip(names, values, strict=True):
            if value is None:
                continue
            is_finite = abs(value) <= 1.7976931348623157e308
            if not is_finite:
                bad.add((name, step))
                value = value if isinstance(value, float) else math.inf
            expected[name].append((value, step, 10 * step))
    gatherer.forget_from(cut)
    points, not_finite = gatherer.take()
    kept = {name: [p for p in told if p[1] < cut] for name, told in expected.items()}
    assert {name for name, told in kept.items() if told} == {
        name for name, columns in points.items() if columns.values
    }
    for name, columns in points.items():
        assert alike(list(zip(*columns, strict=True)), kept.get(name, []))
    assert {(found.name, found.step) for found in not_finite} == bad
    assert gatherer.take() == ({}, [])
