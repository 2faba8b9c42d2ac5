"""What a sweep came to: sweep.csv, report.md with a picture, and two sweeps side by side."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dschat_tui.runs.state import DONE
from dschat_tui.sweep.matrix import value_text
from dschat_tui.sweep.results import QUANTITIES, Quantity
from dschat_tui.sweep.state import Record, SweepFolder, counted
from dschat_tui.text import duration, one_line

# What the effect of an axis, and a comparison, are told of.
COMPARED = ("samples_per_s", "step_s", "generate_s", "train_s")
MEMORY = ("peak_device_bytes", "peak_host_bytes")
PARTS = ("generate_s", "train_s", "other_s")
BAR_SIGNS = ("█", "▒", "░")
BAR_CELLS = 40
BY_KEY = {quantity.key: quantity for quantity in QUANTITIES}
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|#~])")

# The picture: pixels of a row, of the names on the left, of the longest bar, of what is behind it.
_ROW, _NAMES, _BAR, _BEHIND = 22, 330, 420, 90
_COLOURS = {"generate_s": "#2a78b5", "train_s": "#e08a2c", "other_s": "#9a9a9a"}


@dataclass(frozen=True)
class Effect:
    """What one axis does alone: cells in pairs that differ in nothing else.

    `changes` has for each quantity the relative change of each pair that measured it.
    """

    axis: str
    before: Any
    after: Any
    pairs: int
    changes: Mapping[str, Sequence[float]]


def write(folder: SweepFolder, state: Record) -> None:
    """Write sweep.csv, report.md and its picture anew."""
    folder.replace(folder.table, as_csv(state))
    picture = as_picture(state)
    if picture:
        folder.replace(folder.picture, picture)
    folder.replace(folder.report, as_markdown(state, folder.picture.name if picture else ""))


def columns(state: Record) -> list[str]:
    """The columns of sweep.csv."""
    axes = list(state["axes"])
    return ["name", *axes, "state", "reason", *(quantity.key for quantity in QUANTITIES)]


def as_csv(state: Record) -> str:
    """A row a cell, with the numbers of sweep.json as they are."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns(state))
    for cell in state["cells"]:
        values = [value_text(cell["values"][axis]) for axis in state["axes"]]
        numbers = [cell.get(quantity.key) for quantity in QUANTITIES]
        writer.writerow(
            [cell["name"], *values, cell["state"], one_line(cell["reason"] or ""), *numbers]
        )
    return text.getvalue()


def done_cells(state: Record) -> list[Record]:
    """The cells that measured something."""
    return [cell for cell in state["cells"] if cell["state"] == DONE]


def fastest(state: Record) -> Record | None:
    """The cell with the most samples a second."""
    cells = [cell for cell in done_cells(state) if cell.get("samples_per_s")]
    return max(cells, key=lambda cell: float(cell["samples_per_s"]), default=None)


def smallest(state: Record) -> tuple[Record, str] | None:
    """The cell with the lowest peak memory, and which: of a device, or of the host without one."""
    for key in MEMORY:
        cells = [cell for cell in done_cells(state) if cell.get(key)]
        if cells:
            return min(cells, key=lambda cell: int(cell[key])), key
    return None


def effects(state: Record) -> list[Effect]:
    """The effect of each axis alone, a value against the first one; of on and off: on."""
    found = []
    for axis, values in state["axes"].items():
        is_switch = all(isinstance(value, bool) for value in values)
        before, *others = sorted(values) if is_switch else values
        for after in others:
            pairs = _pairs(state, axis, before, after)
            changes = {
                key: [
                    b[key] / a[key] - 1
                    for a, b in pairs
                    if _is_number(a.get(key)) and _is_number(b.get(key)) and a[key]
                ]
                for key in (*COMPARED, *MEMORY)
            }
            found.append(Effect(axis, before, after, len(pairs), changes))
    return found


def _pairs(state: Record, axis: str, before: Any, after: Any) -> list[tuple[Record, Record]]:
    """Cells that are done and differ in one axis alone."""

    def others(cell: Record) -> str:
        return str([(name, value) for name, value in cell["values"].items() if name != axis])

    cells = done_cells(state)
    # `1 == True`, so by the text
    first = {others(c): c for c in cells if value_text(c["values"][axis]) == value_text(before)}
    second = {others(c): c for c in cells if value_text(c["values"][axis]) == value_text(after)}
    return [(first[key], second[key]) for key in first if key in second]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _seconds(cell: Mapping[str, Any], key: str) -> float:
    value: Any = cell.get(key)
    return max(0.0, float(value)) if _is_number(value) else 0.0


def shown(quantity: Quantity, value: Any) -> str:
    """A value of a quantity in a table."""
    if value is None:
        return "-"
    return f"{value / quantity.scale:.4g}" if _is_number(value) else str(value)


def told_quantities(state: Record) -> list[Quantity]:
    """The quantities that any cell has."""
    return [q for q in QUANTITIES if any(cell.get(q.key) is not None for cell in state["cells"])]


def change_text(changes: Sequence[float]) -> str:
    """The mean of relative changes, and the least and greatest of several."""
    if not changes:
        return "-"
    mean = f"{100 * sum(changes) / len(changes):+.1f} %"
    if len(changes) == 1:
        return mean
    return f"{mean} ({100 * min(changes):+.1f} to {100 * max(changes):+.1f})"


def as_markdown(state: Record, picture: str) -> str:
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
    quantities = told_quantities(state)
    lines += ["", "## Cells", ""]
    rows = [
        [f"`{cell['name']}`", cell["state"], *(shown(q, cell.get(q.key)) for q in quantities)]
        for cell in state["cells"]
    ]
    lines += _table(["cell", "state", *(q.title for q in quantities)], rows)
    lines += ["", *(f"- {q.title}: {q.help}" for q in quantities)]
    lines += _best_lines(state)
    lines += _effect_lines(state)
    lines += _bar_lines(state)
    if picture:
        lines += ["", f"![generate against train, a cell]({picture})"]
    lines += _reason_lines(state)
    return "\n".join(lines) + "\n"


def _preparation_lines(state: Record) -> list[str]:
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


def _best_lines(state: Record) -> list[str]:
    lines = ["", "## Fastest and smallest", ""]
    fast, small = fastest(state), smallest(state)
    if fast is not None:
        speed = shown(BY_KEY["samples_per_s"], fast["samples_per_s"])
        lines.append(f"- fastest: `{fast['name']}`, {speed} samples/s")
    if small is not None:
        cell, key = small
        lines.append(
            f"- smallest: `{cell['name']}`, {shown(BY_KEY[key], cell[key])} {BY_KEY[key].title}"
        )
    return lines if len(lines) > 3 else [*lines, "No cell has measured anything yet."]


def _effect_lines(state: Record) -> list[str]:
    lines = [
        "",
        "## Effect of each axis alone",
        "",
        "Mean change over pairs of cells that differ in this axis alone; in brackets the least "
        "and the greatest.",
        "",
    ]
    told = effects(state)
    keys = [key for key in (*COMPARED, *MEMORY) if any(e.changes[key] for e in told)]
    rows = [
        [
            f"`{effect.axis}`",
            f"{_markdown(value_text(effect.before))} → {_markdown(value_text(effect.after))}",
            str(effect.pairs),
            *(change_text(effect.changes[key]) for key in keys),
        ]
        for effect in told
        if effect.pairs
    ]
    if not rows:
        return [*lines, "No pairs yet."]
    return lines + _table(["axis", "change", "pairs", *(BY_KEY[k].title for k in keys)], rows)


def _bar_lines(state: Record) -> list[str]:
    cells = [cell for cell in done_cells(state) if _is_number(cell.get("step_s"))]
    if not cells:
        return []
    longest = max(cell["step_s"] for cell in cells)
    width = max(len(cell["name"]) for cell in cells)
    lines = ["", "## Time of a step", "", "`█` generate, `▒` train, `░` other", "", "```"]
    for cell in sorted(cells, key=lambda cell: float(cell["step_s"])):
        bar = bar_text(cell, longest, BAR_CELLS)
        lines.append(f"{cell['name']:<{width}}  {bar:<{BAR_CELLS}}  {cell['step_s']:.3g} s")
    return [*lines, "```"]


def bar_text(
    cell: Mapping[str, Any], longest: float, width: int, signs: Sequence[str] = BAR_SIGNS
) -> str:
    """The parts of a step as signs; `longest` is the step, in seconds, that fills the width."""
    bar, until = "", 0.0
    for key, sign in zip(PARTS, signs, strict=True):
        until += _seconds(cell, key)
        bar += sign * (round(until / longest * width) - len(bar))
    return bar


def _reason_lines(state: Record) -> list[str]:
    told = [cell for cell in state["cells"] if cell["state"] != DONE and cell["reason"]]
    if not told:
        return []
    lines = ["", "## Not done", ""]
    for cell in told:
        lines.append(f"- `{cell['name']}` {cell['state']}: {_markdown(cell['reason'])}")
        advice = (cell["cause"] or {}).get("advice")
        if advice:
            lines.append(f"  {_markdown(advice)}")
    return lines


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _markdown(text: str) -> str:
    """Text of others in Markdown, where it means nothing."""
    return _MARKDOWN.sub(r"\\\1", one_line(text))


def as_picture(state: Record) -> str:
    """Generate, train and other time of a step, a bar a cell, as SVG; empty without any."""
    cells = [cell for cell in done_cells(state) if _is_number(cell.get("step_s"))]
    if not cells:
        return ""
    longest = max(cell["step_s"] for cell in cells)
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
    for row, cell in enumerate(cells, start=1):
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
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 12}">{cell["step_s"]:.3g} s</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def compare(first: Record, second: Record) -> dict[str, Any]:
    """Cells of two sweeps in pairs by their names, and those that only one of them has."""
    cells = [{cell["name"]: cell for cell in state["cells"]} for state in (first, second)]
    both = [name for name in cells[0] if name in cells[1]]
    keys = [q.key for q in QUANTITIES]
    pairs = []
    for name in both:
        a, b = cells[0][name], cells[1][name]
        pairs.append(
            {
                "name": name,
                "states": [a["state"], b["state"]],
                "quantities": {
                    key: {
                        "first": a.get(key),
                        "second": b.get(key),
                        "change": b[key] / a[key] - 1
                        if _is_number(a.get(key)) and _is_number(b.get(key)) and a[key]
                        else None,
                    }
                    for key in keys
                    if a.get(key) is not None or b.get(key) is not None
                },
            }
        )
    return {
        "pairs": pairs,
        "only_first": [name for name in cells[0] if name not in cells[1]],
        "only_second": [name for name in cells[1] if name not in cells[0]],
    }
