"""The rows above the charts: what the run is doing, its steps, and why it waits or failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dschat_tui.dashboard.screens.run.model import RunModel
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.dashboard.widgets.stepper import StepView
from dschat_tui.logs.model import LogModel
from dschat_tui.runs.progress import progress_of
from dschat_tui.runs.state import PAUSED
from dschat_tui.text import ASCII, Glyphs, clean, shown_path
from engine.config.steps import BY_NAME

# a run whose run.json has not been touched for so long may have lost its supervisor
LOST_SECONDS = 60.0


def header_row(
    run: RunModel, notes: Sequence[str], leads_to: str, width: int, glyphs: Glyphs
) -> Row:
    """The run's path and state, what needs attention, and how much of its log was read.

    Args:
        run: the run.
        notes: what the screen has to say, such as that it is paused.
        leads_to: what comes when the screen is left after the run is done; empty for nothing.
        width: cells of the screen.
        glyphs: the characters to draw with.
    """
    dot, is_ascii = f" {glyphs.dot} ", glyphs is ASCII
    path = clean(shown_path(run.source.path), is_ascii)
    room = width // (4 if run.is_stopping else 3)
    if len(path) > room:
        path = glyphs.cut + path[-room:]
    row: Row = [(f" {path}", "strong")]
    state = run.state["state"] if run.state else run.state_of(run.key)
    if run.speed is not None:
        state = f"replay {run.speed:g}x"
    if run.is_stopping:
        from dschat_tui.runs.stopping import stopping_text

        row.append((dot + stopping_text(run.run_state, run.stop_requests, "x"), "warn"))
    else:
        row.append((dot + state, "text"))
    if run.is_running and time.time() - run.run_state["updated"] > LOST_SECONDS:
        row.append((f"{dot}no sign of its supervisor", "warn"))
    if leads_to and state == "done":
        row.append((f"{dot}q: {leads_to}", "warn"))
    if run.problem:
        row.append((dot + clean(run.problem, is_ascii), "bad"))
    row += [(dot + note, "warn") for note in notes if note]
    if not run.logs:
        row.append((f"{dot}reading", "muted"))
    elif not run.log.status.lines:
        row.append((f"{dot}no log yet", "muted"))
    else:
        row.append((f"{dot}{run.log.status.lines} lines", "muted"))
    return row


def step_view(run: RunModel, key: str, ascii_only: bool) -> StepView:
    """What the stepper shows of a step."""
    log = run.logs.get(key) or LogModel()
    step, record = BY_NAME[run.step_of(key)], run.record(key)
    seconds = None
    if record is not None and record["started"]:
        seconds = (record["ended"] or time.time()) - record["started"]
    progress = progress_of(log)
    model = log.status.model
    return StepView(
        number=step.number,
        title=step.short_title,
        state=run.state_of(key),
        seconds=seconds,
        done=progress.done,
        total=progress.total,
        remaining=progress.remaining_seconds,
        phase=progress.phase_text(ascii_only),
        # the last two parts of the folder say enough
        model="" if model is None else clean("/".join(Path(model).parts[-2:]), ascii_only),
        is_shown=key == run.key,
    )


def notice_rows(run: RunModel, glyphs: Glyphs) -> list[Row]:
    """Why the run waits or the step failed, and what to do: two rows, or none."""
    is_ascii, cause = glyphs is ASCII, run.cause()
    if cause is not None:
        line, advice = clean(cause["line"], is_ascii), clean(cause["advice"], is_ascii)
        return [
            [(f"{glyphs.failed} {cause['id']}: ", "bad"), (line, "text")],
            [(f"  {advice}", "warn")],
        ]
    if run.speed is not None or run.run_state["state"] != PAUSED:
        return []
    # here, not above: loads the configuration, and the first picture comes first
    from dschat_tui.runs.gates import told, waiting

    missed = ", ".join(told(record) for record in waiting(run.run_state))
    return [
        [(f"{glyphs.check} paused: ", "warn"), (clean(missed, is_ascii), "text")],
        [("  u: give a reason and resume. Or start another run with a longer step", "warn")],
    ]
