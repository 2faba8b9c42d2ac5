"""Charts as text: no event loop, no terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from dschat_tui.dashboard.widgets.chart import ASCII_MARKERS, AXIS_CELLS, BLOCK, BRAILLE, View, plot
from dschat_tui.dashboard.widgets.rows import row_text
from dschat_tui.dashboard.widgets.split import split_rows
from dschat_tui.dashboard.widgets.stepper import StepView, stepper_row
from dschat_tui.logs.series import Series
from dschat_tui.text import ASCII, UNICODE, clean, duration, short_number

PLAIN = View(markers=ASCII_MARKERS)


def series(values: Sequence[float]) -> Series:
    filled = Series()
    for step, value in enumerate(values):
        filled.append(value, step, 10 * step)
    return filled


def text(*curves: Sequence[float], width: int = 47, height: int = 10, view: View = PLAIN) -> str:
    named = [(f"curve {index}", series(values)) for index, values in enumerate(curves)]
    return "\n".join(row_text(row) for row in plot("Loss", named, width, height, view))


def test_a_falling_line_falls_from_corner_to_corner() -> None:
    rows = text([10.0 - step for step in range(10)], width=AXIS_CELLS + 10, height=10).split("\n")
    assert "10" in rows[1]
    assert rows[1].index("*") == AXIS_CELLS
    assert rows[8].rindex("*") == AXIS_CELLS + 9
    at = [row.index("*") for row in rows[1:9] if "*" in row]
    assert at == sorted(at)
    assert rows[9].endswith("step 9")


@pytest.mark.parametrize(("title", "told"), [("TFLOPs", "TFLOPs  "), ("Speed", "* TFLOPs 3")])
def test_a_narrow_chart_says_what_it_shows(title: str, told: str) -> None:
    named = [(name, series([3.0])) for name in ("TFLOPs", "generation", "training")]
    head = row_text(plot(title, named, 30, 10, PLAIN)[0])
    assert head.startswith(told)
    assert len(head) <= 30


@pytest.mark.parametrize("markers", [BRAILLE, BLOCK, ASCII_MARKERS])
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300),
    st.integers(1, 90),
    st.integers(1, 25),
    st.booleans(),
    st.sampled_from([0.0, 0.9]),
    st.none() | st.integers(-5, 400),
)
def test_any_values_fit_any_size(
    markers: object,
    values: list[float],
    width: int,
    height: int,
    log_scale: bool,
    smoothing: float,
    cursor: int | None,
) -> None:
    view = View(log_scale=log_scale, smoothing=smoothing, cursor=cursor, patterned=True)
    view = replace(view, markers=markers)
    named = [("a", series(values)), ("b", series(values[::-1]))]
    rows = plot("Loss", named, width, height, view)
    assert len(rows) <= height
    assert all(cell_len(row_text(row)) <= width for row in rows)


def test_what_is_not_finite_is_marked_where_it_was() -> None:
    values = [1.0] * 20 + [math.nan] + [2.0] * 20
    rows = text(values, width=AXIS_CELLS + 41).split("\n")
    assert rows[1][AXIS_CELLS:].index("X") == 20
    marks = [
        style
        for row in plot("Loss", [("loss", series(values))], 48, 10, View())
        for sign, style in row
        if sign == UNICODE.bad
    ]
    assert marks == ["bad"]
    assert "no finite values" in text([math.nan, math.inf])
    assert "no values yet" in text([])


def test_an_outlier_is_cut_off_with_an_arrow_and_leaves_the_rest_its_room() -> None:
    values = [float(step % 7) for step in range(60)]
    tame = text(values, width=AXIS_CELLS + 60)
    values[30] = 1e6
    rows = text(values, width=AXIS_CELLS + 60).split("\n")
    assert rows[1][AXIS_CELLS:].index("^") == 30
    assert "^" not in tame
    assert rows[1].split("+")[0] == tame.split("\n")[1].split("+")[0]


def test_the_band_reaches_from_the_least_to_the_greatest() -> None:
    values = [float(step % 2) for step in range(4000)]
    rows = text(values, width=AXIS_CELLS + 20).split("\n")
    columns = [[row.ljust(60)[AXIS_CELLS + x] for row in rows[1:9]] for x in range(15)]
    assert all(set(column) <= {":", "*"} and "*" in column for column in columns)


def test_cursor_and_zoom_are_steps_of_the_log() -> None:
    values = [float(step) for step in range(100)]
    shown = text(values, view=replace(PLAIN, cursor=50))
    assert "at 50" in shown
    assert "50" in shown.split("\n")[0]
    near = text(values, view=replace(PLAIN, first_step=40, last_step=60))
    rows = near.split("\n")
    assert rows[-1].split()[0] == "40"
    assert rows[-1].endswith("step 60")
    assert rows[1].strip().startswith("60")


def test_smoothing_calms_the_line_and_says_so() -> None:
    values = [float(step % 2) * 10 for step in range(30)]
    rough, smooth = text(values), text(values, view=replace(PLAIN, smoothing=0.9))

    def rows_with_line(chart: str) -> int:
        return sum("*" in row for row in chart.split("\n")[1:])

    assert rows_with_line(smooth) < rows_with_line(rough)
    assert "~0.9" in smooth


def test_a_log_scale_gives_each_decade_the_same_room() -> None:
    values = [10.0**step for step in range(8)]
    rows = text(values, width=AXIS_CELLS + 8, view=replace(PLAIN, log_scale=True)).split("\n")
    at = [row.rindex("*") for row in rows[1:9] if "*" in row]
    assert at == sorted(at, reverse=True)
    assert len(set(at)) == 8
    assert " log" in rows[0]


def test_without_colour_curves_differ_by_pattern() -> None:
    flat = [[3.0] * 50, [1.0] * 50]
    rows = text(*flat, view=View(patterned=True)).split("\n")
    lines = [row[AXIS_CELLS:] for row in rows[1:9] if any("⠀" < sign <= "⣿" for sign in row)]
    assert len(lines) == 2
    assert lines[0] != lines[1]
    plain = text(*flat, view=PLAIN)
    assert "*" in plain
    assert "o" in plain


def test_ascii_is_ascii() -> None:
    values = [1.0, math.nan, 3.0, 1e9, *[2.0] * 40]
    view = replace(PLAIN, cursor=3, smoothing=0.6)
    assert text(values, values, view=view).isascii()
    times = {name: series([1.0]) for name in ("e2e_s", "generate_s", "train_s", "other_s")}
    rows = split_rows("Time", times, 40, 8, ASCII)
    assert "\n".join(map(row_text, rows)).isascii()


def test_the_split_shares_the_width_by_time() -> None:
    times = {
        "generate_s": series([3.0]),
        "train_s": series([1.0]),
        "other_s": series([0.0]),
    }
    rows = [row_text(row) for row in split_rows("Time", times, 40, 8, ASCII)]
    assert rows[1].count("#") == 30
    assert rows[1].count("=") == 10
    assert any("generate" in row and "75%" in row for row in rows)


def test_the_stepper_tells_what_fits() -> None:
    steps = [
        StepView(1, "SFT", "done", 62.0, model="step1-sft/model"),
        StepView(2, "reward model", "running", 30.0, 12, 100, 240.0, "training", is_shown=True),
        StepView(3, "RLHF"),
    ]
    wide = row_text(stepper_row(steps, 160, UNICODE))
    assert "step1-sft/model" in wide
    assert "12/100" in wide
    assert "ETA 4:00" in wide
    for width in (120, 80, 60, 40, 20):
        row = row_text(stepper_row(steps, width, UNICODE))
        assert cell_len(row) <= width
    assert "[2 reward model]" in row_text(stepper_row(steps, 60, UNICODE))


@settings(deadline=None)
@given(st.text() | st.text(alphabet="\x1b[]0123;mHJ\r\n\t\x07ab\u202e\u200b"))
def test_no_text_moves_the_cursor_or_turns_the_line(dirty: str) -> None:
    shown = clean(dirty)
    assert not any(ord(sign) < 32 or 127 <= ord(sign) < 160 for sign in shown)
    assert "\u202e" not in shown
    assert clean(dirty, ascii_only=True).isascii()


def test_the_last_of_overwritten_texts_is_shown() -> None:
    assert clean("Loading:  0%\rLoading: 50%\r\n") == "Loading: 50%"
    assert clean("\x1b[31mred\x1b[0m [bold]text[/]") == "red [bold]text[/]"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_numbers_fit_the_axis(value: float) -> None:
    shown = short_number(value)
    assert len(shown) <= AXIS_CELLS - 1
    if math.isfinite(value) and abs(value) < 1e90 and (value == 0 or abs(value) > 1e-90):
        assert float(shown) == pytest.approx(value, rel=0.5)


def test_durations_for_people() -> None:
    assert [duration(s) for s in (5, 65, 3723, 800_000)] == ["0:05", "1:05", "1:02:03", "9 d 6 h"]
