"""The bounded series behind the charts."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from dschat_tui.logs.series import CAPACITY, Series


def filled(values: list[float], first_step: int = 0) -> Series:
    series = Series()
    for index, value in enumerate(values):
        series.append(value, first_step + index, offset=100 * index)
    return series


def test_few_values_are_kept_one_by_one() -> None:
    columns = filled([3.0, 1.0, 2.0], first_step=7).columns(80)
    assert [(c.low, c.high, c.mean) for c in columns] == [(v, v, v) for v in (3.0, 1.0, 2.0)]
    assert [(c.step, c.offset) for c in columns] == [(7, 0), (8, 100), (9, 200)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=4000).map(
        lambda values: [float(value) for value in values]
    ),
    st.integers(1, 200),
)
def test_columns_lose_no_extreme_and_no_weight(values: list[float], wanted: int) -> None:
    series = filled(values)
    columns = series.columns(wanted)
    assert 1 <= len(columns) <= wanted
    assert min(c.low for c in columns) == min(values) == series.minimum
    assert max(c.high for c in columns) == max(values) == series.maximum
    starts = [int(c.step) for c in columns]
    for column, start, end in zip(columns, starts, [*starts[1:], len(values)], strict=True):
        part = values[start:end]
        assert (column.low, column.high) == (min(part), max(part))
        assert math.isclose(column.mean, sum(part) / len(part), abs_tol=1e-9)
        assert column.offset == 100 * start


def test_memory_does_not_grow_with_the_log() -> None:
    series = Series()
    for step in range(100_000):
        series.append(float(step), step, step)
    every = series.columns(10**6)
    assert CAPACITY // 2 <= len(every) <= CAPACITY
    assert (len(series), series.last, series.last_step) == (100_000, 99_999.0, 99_999)


def test_values_that_are_not_finite_are_marked_and_left_out() -> None:
    values = [1.0, math.nan, 3.0, math.inf]
    series = filled(values)
    assert series.nonfinite == 2
    assert (series.minimum, series.maximum) == (1.0, 3.0)
    whole = series.columns(1)[0]
    assert (whole.low, whole.high, whole.mean, whole.has_nonfinite) == (1.0, 3.0, 2.0, True)
    alone = series.columns(4)[1]
    assert alone.low > alone.high
    assert math.isnan(alone.mean)
    assert [c.has_nonfinite for c in series.columns(4)] == [False, True, False, True]
    long = filled([math.nan] + [1.0] * 5000)
    assert [c.has_nonfinite for c in long.columns(10)] == [True] + [False] * 9


def test_range_of_steps() -> None:
    series = filled([float(i) for i in range(100)], first_step=1000)
    columns = series.columns(1000, first_step=1010, last_step=1019)
    assert [c.step for c in columns] == list(range(1010, 1020))
    assert series.columns(3, first_step=1010, last_step=1012)[0].mean == 10.0
    assert series.columns(10, first_step=2000, last_step=3000)[0].step == 1099
    assert series.columns(10, first_step=0, last_step=999) == []


def test_nothing_to_draw() -> None:
    assert Series().columns(80) == []
    assert filled([1.0]).columns(0) == []


def test_taking_over_what_another_thread_filled() -> None:
    shown, history = Series(), filled([float(i) for i in range(2000)])
    shown.append(5.0, 0)
    version = shown.version
    expected = history.columns(50)
    shown.take(history)
    assert shown.version > version
    assert shown.columns(50) == expected
    shown.append(-1.0, 2000)
    assert (shown.total, shown.minimum) == (2001, -1.0)


def test_version_tells_of_every_change() -> None:
    series = Series()
    versions = [series.version]
    for value in (1.0, 1.0, math.nan):
        series.append(value, 0)
        versions.append(series.version)
    assert len(set(versions)) == 4
