"""The results of a sweep: sweep.csv, report.md with a picture, and two sweeps compared."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from operator import itemgetter
from typing import TypedDict

from dschat_tui.runs.state import DONE
from dschat_tui.sweep.matrix import value_text
from dschat_tui.sweep.results import QUANTITIES, Quantity
from dschat_tui.sweep.state import (
    CellRecord,
    Number,
    RunRecord,
    SweepFolder,
    SweepState,
    counted,
    measured,
    number,
)
from dschat_tui.text import duration, one_line

# The quantities of which the effect of an axis, and a comparison, are shown.
COMPARED = ("samples_per_s", "step_s", "generate_s", "train_s")
MEMORY = ("peak_device_bytes", "peak_host_bytes")
PARTS = ("generate_s", "train_s", "other_s")
BAR_GLYPHS = ("█", "▒", "░")
BAR_CELLS = 40
BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~])")

# The picture: pixels per row, of the names on the left, of the longest bar, and to its right.
_ROW, _NAMES, _BAR, _BEHIND = 22, 330, 420, 90
_COLOURS = {"generate_s": "#2a78b5", "train_s": "#e08a2c", "other_s": "#9a9a9a"}


@dataclass(frozen=True)
class Effect:
    """What one axis does alone: cells in pairs that differ in nothing else.

    `changes` holds for each quantity the relative change of each pair that measured it.
    """

    axis: str
    before: object
    after: object
    pairs: int
    changes: Mapping[str, Sequence[float]]


def write(folder: SweepFolder, state: SweepState) -> None:
    """Rewrite sweep.csv, report.md and its picture."""
    folder.replace(folder.table, as_csv(state))
    picture = as_picture(state)
    if picture:
        folder.replace(folder.picture, picture)
    folder.replace(folder.report, as_markdown(state, folder.picture.name if picture else ""))


def columns(state: SweepState) -> list[str]:
    """The columns of sweep.csv."""
    axes = list(state["axes"])
    return ["name", *axes, "state", "reason", *(quantity.key for quantity in QUANTITIES)]


def as_csv(state: SweepState) -> str:
    """A row per cell, with the numbers of sweep.json as they are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(state))
    for cell in state["cells"]:
        values = [value_text(cell["values"][axis]) for axis in state["axes"]]
        numbers = [measured(cell, quantity.key) for quantity in QUANTITIES]
        writer.writerow([cell["name"], *values, cell["state"], one_line(cell["reason"]), *numbers])
    return text.getvalue()


def done_cells(state: SweepState) -> list[CellRecord]:
    """The cells that measured something."""
    return [cell for cell in state["cells"] if cell["state"] == DONE]


def fastest(state: SweepState) -> CellRecord | None:
    """The cell with the most samples per second."""
    speeds = [(number(cell, "samples_per_s") or 0.0, cell) for cell in done_cells(state)]
    speed, cell = max(speeds, key=itemgetter(0), default=(0.0, None))
    return cell if speed else None


def smallest(state: SweepState) -> tuple[CellRecord, str] | None:
    """The cell with the lowest peak memory, and which: of a device, or of the host without one."""
    for key in MEMORY:
        sizes = [(size, cell) for cell in done_cells(state) if (size := number(cell, key))]
        if sizes:
            return min(sizes, key=itemgetter(0))[1], key
    return None


def effects(state: SweepState) -> list[Effect]:
    """The effect of each axis alone: each value against the first, for switches on against off."""
    found = []
    for axis, values in state["axes"].items():
        is_switch = all(isinstance(value, bool) for value in values)
        before, *others = [v for v in (False, True) if v in values] if is_switch else values
        for after in others:
            pairs = _pairs(state, axis, before, after)
            changes = {
                key: [c for a, b in pairs if (c := relative_change(a, b, key)) is not None]
                for key in (*COMPARED, *MEMORY)
            }
            found.append(Effect(axis, before, after, len(pairs), changes))
    return found


def _pairs(
    state: SweepState, axis: str, before: object, after: object
) -> list[tuple[CellRecord, CellRecord]]:
    """Cells that are done and differ in one axis alone."""

    def others(cell: CellRecord) -> str:
        return str([(name, value) for name, value in cell["values"].items() if name != axis])

    cells = done_cells(state)
    # `1 == True`, so by the text
    first = {others(c): c for c in cells if value_text(c["values"][axis]) == value_text(before)}
    second = {others(c): c for c in cells if value_text(c["values"][axis]) == value_text(after)}
    return [(first[key], second[key]) for key in first if key in second]


def relative_change(first: RunRecord, second: RunRecord, key: str) -> float | None:
    """By which share a quantity of the second cell differs from the first one's, where known."""
    before, after = number(first, key), number(second, key)
    return after / before - 1 if before and after is not None else None


def _seconds(cell: CellRecord, key: str) -> float:
    return max(0.0, number(cell, key) or 0.0)


def shown(quantity: Quantity, value: Number | None) -> str:
    """A value of a quantity in a table."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value / quantity.scale:.4g}"


def measured_quantities(state: SweepState) -> list[Quantity]:
    """The quantities that any cell has."""
    return [
        q for q in QUANTITIES if any(measured(cell, q.key) is not None for cell in state["cells"])
    ]


def change_text(changes: Sequence[float]) -> str:
    """The mean of relative changes, and the least and greatest of several."""
    if not changes:
        return "-"
    mean = f"{100 * sum(changes) / len(changes):+.1f} %"
    if len(changes) == 1:
        return mean
    return f"{mean} ({100 * min(changes):+.1f} to {100 * max(changes):+.1f})"


def as_markdown(state: SweepState, picture: str) -> str:
    """report.md."""
    steps = ", ".join(map(str, state["steps"]))
    lines = [
        f"# Sweep of {_markdown(str(state['profile']))}, step {steps}",
        "",
        f"{counted(state)}; {duration(state['seconds'])} in all. "
        f"Measured without the first {state['warmup_steps']} steps of a cell.",
        "",
        "Axes: "
        + "; ".join(
            f"`{axis}` = {', '.join(_markdown(value_text(value)) for value in values)}"
            for axis, values in state["axes"].items()
        ),
    ]
    lines += _preparation_lines(state)
    quantities = measured_quantities(state)
    lines += ["", "## Cells", ""]
    rows = [
        [f"`{cell['name']}`", cell["state"], *(shown(q, measured(cell, q.key)) for q in quantities)]
        for cell in state["cells"]
    ]
    lines += _table(["cell", "state", *(q.title for q in quantities)], rows)
    lines += ["", *(f"- {q.title}: {q.help}" for q in quantities)]
    lines += _best_lines(state)
    lines += _effect_lines(state)
    lines += _bar_lines(state)
    if picture:
        lines += ["", f"![generate against train, per cell]({picture})"]
    lines += _reason_lines(state)
    return "\n".join(lines) + "\n"


def _preparation_lines(state: SweepState) -> list[str]:
    return [
        line
        for record in state["preparations"]
        for line in (
            "",
            f"Prepared once: `{record['name']}`, step "
            f"{' and '.join(map(str, record['steps']))}: {record['state']}"
            + (f", {duration(record['seconds'])}" if record["seconds"] else "")
            + (f". {_markdown(record['reason'])}" if record["reason"] else ""),
        )
    ]


def _best_lines(state: SweepState) -> list[str]:
    lines = ["", "## Fastest and smallest", ""]
    fast, small = fastest(state), smallest(state)
    if fast is not None:
        speed = shown(BY_KEY["samples_per_s"], number(fast, "samples_per_s"))
        lines.append(f"- fastest: `{fast['name']}`, {speed} samples/s")
    if small is not None:
        cell, key = small
        size = f"{shown(BY_KEY[key], number(cell, key))} {BY_KEY[key].title}"
        lines.append(f"- smallest: `{cell['name']}`, {size}")
    return lines if len(lines) > 3 else [*lines, "No cell has measured anything yet."]


def _effect_lines(state: SweepState) -> list[str]:
    lines = [
        "",
        "## Effect of each axis alone",
        "",
        "Mean change over pairs of cells that differ in this axis alone; in brackets the least "
        "and the greatest.",
        "",
    ]
    found = effects(state)
    keys = [key for key in (*COMPARED, *MEMORY) if any(e.changes[key] for e in found)]
    rows = [
        [
            f"`{effect.axis}`",
            f"{_markdown(value_text(effect.before))} → {_markdown(value_text(effect.after))}",
            str(effect.pairs),
            *(change_text(effect.changes[key]) for key in keys),
        ]
        for effect in found
        if effect.pairs
    ]
    if not rows:
        return [*lines, "No pairs yet."]
    return lines + _table(["axis", "change", "pairs", *(BY_KEY[k].title for k in keys)], rows)


def _bar_lines(state: SweepState) -> list[str]:
    cells = _timed_cells(state)
    if not cells:
        return []
    longest = max(seconds for seconds, _ in cells)
    width = max(len(cell["name"]) for _, cell in cells)
    lines = ["", "## Time of a step", "", "`█` generate, `▒` train, `░` other", "", "```"]
    for seconds, cell in sorted(cells, key=itemgetter(0)):
        bar = bar_text(cell, longest, BAR_CELLS)
        lines.append(f"{cell['name']:<{width}}  {bar:<{BAR_CELLS}}  {seconds:.3g} s")
    return [*lines, "```"]


def _timed_cells(state: SweepState) -> list[tuple[float, CellRecord]]:
    """The cells that are done, each with the seconds of its step where they are known."""
    return [(s, cell) for cell in done_cells(state) if (s := number(cell, "step_s")) is not None]


def bar_text(
    cell: CellRecord, longest: float, width: int, glyphs: Sequence[str] = BAR_GLYPHS
) -> str:
    """The parts of a step as glyphs; `longest` is the step, in seconds, that fills the width."""
    bar, until = "", 0.0
    for key, glyph in zip(PARTS, glyphs, strict=True):
        until += _seconds(cell, key)
        bar += glyph * (round(until / longest * width) - len(bar))
    return bar


def _reason_lines(state: SweepState) -> list[str]:
    cells = [cell for cell in state["cells"] if cell["state"] != DONE and cell["reason"]]
    if not cells:
        return []
    lines = ["", "## Not done", ""]
    for cell in cells:
        lines.append(f"- `{cell['name']}` {cell['state']}: {_markdown(cell['reason'])}")
        if cell["cause"]:
            lines.append(f"  {_markdown(cell['cause']['advice'])}")
    return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _markdown(text: str) -> str:
    """Text from logs and configurations, escaped so that Markdown shows it as it is."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def as_picture(state: SweepState) -> str:
    """Generate, train and other time of a step, a bar per cell, as SVG; empty without any."""
    cells = _timed_cells(state)
    if not cells:
        return ""
    longest = max(seconds for seconds, _ in cells)
    width, height = _NAMES + _BAR + _BEHIND, _ROW * (len(cells) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (key, colour) in enumerate(_COLOURS.items()):
        left = _NAMES + 110 * index
        parts.append(f'<rect x="{left}" y="6" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{left + 17}" y="16">{BY_KEY[key].title.removesuffix(" s")}</text>')
    for row, (seconds, cell) in enumerate(cells, start=1):
        y = _ROW * row + 8
        x = float(_NAMES)
        name = escape(cell["name"])
        parts.append(f'<text x="{_NAMES - 8}" y="{y + 12}" text-anchor="end">{name}</text>')
        for key, colour in _COLOURS.items():
            length = _seconds(cell, key) / longest * _BAR
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="15" fill="{colour}"/>'
            )
            x += length
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 12}">{seconds:.3g} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class Compared(TypedDict):
    """A quantity of two cells of the same name; `change` is relative to the first."""

    first: Number | None
    second: Number | None
    change: float | None


class Pair(TypedDict):
    """Two cells of the same name."""

    name: str
    states: list[str]
    quantities: dict[str, Compared]


class Comparison(TypedDict):
    """Cells of two sweeps in pairs by their names, and those that only one of them has."""

    pairs: list[Pair]
    only_first: list[str]
    only_second: list[str]


def compare(first: SweepState, second: SweepState) -> Comparison:
    """Compare the cells of two sweeps."""
    cells, others = ({cell["name"]: cell for cell in s["cells"]} for s in (first, second))
    pairs: list[Pair] = []
    for name, a in cells.items():
        if name in others:
            b = others[name]
            compared = {q.key: _compared(a, b, q.key) for q in QUANTITIES}
            known = {
                key: each
                for key, each in compared.items()
                if each["first"] is not None or each["second"] is not None
            }
            states = [a["state"], b["state"]]
            pairs.append({"name": name, "states": states, "quantities": known})
    return {
        "pairs": pairs,
        "only_first": [name for name in cells if name not in others],
        "only_second": [name for name in others if name not in cells],
    }


def _compared(first: CellRecord, second: CellRecord, key: str) -> Compared:
    return {
        "first": measured(first, key),
        "second": measured(second, key),
        "change": relative_change(first, second, key),
    }
