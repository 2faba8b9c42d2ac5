"""The steps in one row: state, time, time left, and the model that each produces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from dschat_tui.dashboard.widgets.rows import Row, fit, row_text
from dschat_tui.text import Glyphs, duration

STATE_STYLES = {
    "done": "good",
    "running": "strong",
    "failed": "bad",
    "stopped": "warn",
    "paused": "warn",
    "pending": "muted",
    "unknown": "warn",
}


@dataclass(frozen=True)
class StepView:
    """What the stepper shows of a step; `model` is the folder that it produces."""

    number: int
    title: str
    state: str = "pending"
    seconds: float | None = None
    done: int = 0
    total: int = 0
    remaining: float | None = None
    phase: str = ""
    model: str = ""
    is_shown: bool = False


def stepper_row(steps: Sequence[StepView], width: int, glyphs: Glyphs) -> Row:
    """As much of the steps as fits: without models, then without progress, where it is narrow."""
    for detail in (3, 2, 1, 0):
        row: Row = []
        for step in steps:
            if row:
                row.append((f" {glyphs.arrow} ", "muted"))
            row += _step(step, detail, glyphs)
        if cell_len(row_text(row)) <= width:
            return row
    return fit(row, width, glyphs.cut)


def state_glyph(state: str, glyphs: Glyphs) -> str:
    """The character for a step's state."""
    glyph_of = {
        "done": glyphs.done,
        "running": glyphs.running,
        "failed": glyphs.failed,
        "stopped": glyphs.stopped,
        "pending": glyphs.pending,
    }
    return glyph_of.get(state, "?")


def _step(step: StepView, detail: int, glyphs: Glyphs) -> Row:
    style = STATE_STYLES.get(step.state, "text")
    name = f"{step.number} {step.title}" if step.number else step.title
    name = f"[{name}]" if step.is_shown else f" {name} "
    row: Row = [(name, "chosen" if step.is_shown else style)]
    row.append((f" {state_glyph(step.state, glyphs)}", style))
    if detail >= 1 and step.state not in ("pending", "done"):
        row.append((f" {step.state}", style))
    if detail >= 2:
        parts = []
        if step.seconds is not None:
            parts.append(duration(step.seconds))
        if step.state == "running":
            if step.total:
                parts.append(f"{step.done}/{step.total}")
            elif step.done:
                parts.append(f"step {step.done}")
            if step.phase and step.phase != "training":
                parts.append(step.phase)
            if step.remaining is not None:
                parts.append(f"ETA {duration(step.remaining)}")
        if parts:
            row.append((" " + " ".join(parts), "text"))
    if detail >= 3 and step.model:
        row.append((f" {step.model}", "muted"))
    return row
