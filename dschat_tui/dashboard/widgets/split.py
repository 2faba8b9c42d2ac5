"""How the time of a step splits into generation, training and the rest."""

from __future__ import annotations

from collections.abc import Mapping

from dschat_tui.dashboard.widgets.rows import Row, fit
from dschat_tui.logs.series import Series
from dschat_tui.text import Glyphs, short_number

PARTS = (("generate_s", "generate"), ("train_s", "train"), ("other_s", "other"))
# the bar shows the mean of the newest columns, of a series divided into 40
RECENT_COLUMNS = 4
_COLUMNS = 40


def split_rows(
    title: str, series: Mapping[str, Series], width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """Title, the bar, then each part with its seconds and share."""
    seconds = [_recent(series.get(name)) for name, _ in PARTS]
    total = sum(seconds)
    if total <= 0:
        return [[(title, "strong")], [("no times yet", "muted")]][:height]
    rows: list[Row] = [[(title, "strong"), (f"  {short_number(total)} s", "text")]]
    bar = _bar(seconds, width, glyphs)
    rows += [bar] * max(1, min(3, height - 5))
    for (_, label), value, index in zip(PARTS, seconds, range(3), strict=True):
        share = f"{value / total:.0%}"
        rows.append(
            [
                (f"{glyphs.parts[index]} ", f"line{index}"),
                (f"{label:<9}", "text"),
                (f"{short_number(value):>7} s {share:>5}", "text"),
            ]
        )
    speeds = []
    for name, label in (("tokens_per_s", "tokens/s"), ("samples_per_s", "samples/s")):
        if name in series:
            speeds.append(f"{short_number(series[name].last)} {label}")
    if speeds:
        rows.append([(", ".join(speeds), "muted")])
    return [fit(row, width, glyphs.cut) for row in rows[:height]]


def _recent(series: Series | None) -> float:
    if series is None:
        return 0.0
    means = [c.mean for c in series.columns(_COLUMNS) if c.mean == c.mean][-RECENT_COLUMNS:]
    return sum(means) / len(means) if means else 0.0


def _bar(values: list[float], width: int, glyphs: Glyphs) -> Row:
    total, row, used, so_far = sum(values), [], 0, 0.0
    for index, value in enumerate(values):
        so_far += value
        end = round(so_far / total * width)
        row.append((glyphs.parts[index] * (end - used), f"line{index}"))
        used = end
    return row
