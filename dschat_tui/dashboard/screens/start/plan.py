"""The plan panel: whether the run fits into memory, a bar for each step, and what is in it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len
from textual import work
from textual.worker import Worker, WorkerState, get_current_worker

from dschat_tui.dashboard.screens.start import work as start_work
from dschat_tui.dashboard.screens.start.draft import Draft
from dschat_tui.dashboard.screens.start.panel import StartPanel
from dschat_tui.dashboard.widgets.lines import LineList, Lines, Nothing
from dschat_tui.dashboard.widgets.rows import Row, fit, wrapped
from dschat_tui.text import ASCII, Glyphs, clean
from engine.config.steps import BY_NAME

if TYPE_CHECKING:
    from dschat_tui.dashboard.screens.start.work import Planned
    from dschat_tui.runs.memory_plan import Report
    from engine.config.schema import RunConfig
    from engine.planning import Item, StepPlan


class Part(NamedTuple):
    """A part of a bar: the letter that it begins with, its name, its style."""

    letter: str
    name: str
    style: str


PARTS = (
    Part("A", "actor", "line0"),
    Part("F", "reference", "band0"),
    Part("C", "critic", "line1"),
    Part("R", "reward", "band1"),
    Part("E", "actor_ema", "band0"),
    Part("O", "optimizer", "line2"),
    Part("X", "activations", "warn"),
    Part("K", "cache", "band2"),
    Part("P", "process", "muted"),
    Part("H", "heap", "muted"),
)
# what else a model holds are gradients, moments and buffers of its optimizer
_WEIGHTS = ("weights", "gathered", "partition", "copy", "average")
_OPTIMIZER = ("master", "Adam", "gradient", "reduction", "way back")
_SHORTEST_BAR = 10
_LABEL_WIDTH = 20


class PlanPanel(LineList, StartPanel):
    """Broken rules, then the plan."""

    tab_name = "plan"

    def __init__(self, draft: Draft) -> None:
        super().__init__(id=self.tab_name)
        self.draft = draft

    def make(self) -> None:
        """Plan the form; if it does not fit, look for a change that does afterwards."""
        if self.draft.form is not None:
            self._make(self.draft.form.config, self.draft.output(), False)

    @work(thread=True, exclusive=True, exit_on_error=False, group="plan")
    def _make(self, config: RunConfig, output: Path, is_searched: bool) -> Planned | None:
        worker = get_current_worker()
        time.sleep(start_work.SETTLE_SECONDS)
        return None if worker.is_cancelled else start_work.planned(config, output, is_searched)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show the plan, or what went wrong."""
        super().on_worker_state_changed(event)
        planned, form = event.worker.result, self.draft.form
        if event.state != WorkerState.SUCCESS or planned is None or form is None:
            return
        self.draft.planned = planned
        if planned.facts != form.facts:
            form.set_facts(planned.facts)
        self.dashboard.draw()
        if planned.report is not None and not planned.report.fits and not planned.is_searched:
            self._make(form.config, self.draft.output(), True)

    def update(self, draft: Draft) -> None:
        """List them."""
        planned, is_ascii = draft.planned, self.glyphs is ASCII
        width = max(self.size.width, self.screen.size.width)
        rows: list[Row] = []
        for violation in draft.form.violations if draft.form is not None else ():
            text = f"{self.glyphs.check} {clean(str(violation), is_ascii)}"
            rows += wrapped(text, width, "bad")
        if planned is None:
            # the previous plan stays visible until there is the next
            if not isinstance(self.source, Lines):
                self.show(Nothing("planning"))
            return
        if planned.report is None:
            rows += wrapped(clean(planned.problem, is_ascii), width, "warn")
        else:
            rows += plan_rows(planned.report, planned.is_searched, width, self.glyphs)
        self.show(Lines(rows))


def part_of(item: Item) -> str:
    """The part of the bar that an item of a plan belongs to."""
    if item.model == "process":
        return "process"
    if "holes" in item.what:
        return "heap"
    if "cache" in item.what:
        return "cache"
    if "activations" in item.what or "logits" in item.what:
        return "activations"
    if any(word in item.what for word in _OPTIMIZER):
        return "optimizer"
    return item.model if any(word in item.what for word in _WEIGHTS) else "optimizer"


def fullest_phase(step: StepPlan, ranks: int | None) -> str:
    """The phase that needs most: on a host with `ranks` ranks, or, for None, on a device."""
    if ranks is None:
        devices = {name: on_device for name, (on_device, _) in step.phases().items()}
        return max(devices, key=devices.__getitem__)
    hosts = step.node_phases(ranks)
    return max(hosts, key=hosts.__getitem__)


def parts_of(step: StepPlan, ranks: int | None) -> dict[str, int]:
    """Bytes by part in the phase that needs most.

    Args:
        step: the plan of a step.
        ranks: of a node, for its host memory; None for the device of the first rank.
    """
    sizes: dict[str, int] = {}
    phase = fullest_phase(step, ranks)
    for item in step.items:
        if item.phase in ("always", phase):
            times = 1 if ranks is None or item.first_rank else ranks
            size = item.device_bytes if ranks is None else times * item.host_bytes
            sizes[part_of(item)] = sizes.get(part_of(item), 0) + size
    return {part.name: sizes[part.name] for part in PARTS if sizes.get(part.name)}


def bar(sizes: Mapping[str, int], capacity: int, width: int, glyphs: Glyphs) -> Row:
    """The parts in a row, each beginning with its letter, against the capacity.

    If they need more, the bar is as long as the need, with a mark where the capacity ends.
    """
    total = max(capacity, sum(sizes.values()))
    exact = {name: size / total * width for name, size in sizes.items()}
    cells = {name: int(share) for name, share in exact.items()}
    used = max(round(sum(exact.values())), 1) if sizes else 0
    # the cells that rounding down has left go to the parts with the largest remainders
    for name in sorted(sizes, key=lambda name: cells[name] - exact[name]):
        cells[name] += sum(cells.values()) < used
    row: Row = []
    for index, part in enumerate(PARTS):
        if cells.get(part.name):
            text = part.letter + glyphs.parts[index % 3] * (cells[part.name] - 1)
            row.append((text, part.style))
    row.append((glyphs.dot * (width - used), "muted"))
    if total > capacity:
        row = _marked(row, min(round(capacity / total * width), width - 1), glyphs.cursor)
    return row


def _marked(row: Row, cell: int, glyph: str) -> Row:
    """A row with a glyph in place of one of its cells; all its characters are one cell wide."""
    marked: Row = []
    start = 0
    for text, style in row:
        if start <= cell < start + len(text):
            at = cell - start
            marked += [(text[:at], style), (glyph, "bad"), (text[at + 1 :], style)]
        else:
            marked.append((text, style))
        start += len(text)
    return [(text, style) for text, style in marked if text]


def plan_rows(report: Report, is_searched: bool, width: int, glyphs: Glyphs) -> list[Row]:
    """The verdict, a bar for each step, the legend, then the numbers of each step.

    `is_searched`: whether it is known what would make it fit.
    """
    style, glyph = ("good", glyphs.done) if report.fits else ("bad", glyphs.failed)
    lines = report.verdict()
    if not report.fits and not is_searched:
        lines[1:] = ["looking for a change that fits"]
    elif report.change is not None:
        lines[-1] += " (w sets that)"
    text = [row for line in lines for row in wrapped(line, width - 2, "text")]
    rows: list[Row] = [[(f"{glyph} ", style), *text[0]]]
    rows += [[("  ", "text"), *row] for row in text[1:]]
    seen: set[str] = set()
    numbers: list[Row] = []
    plan = report.plan
    for step in plan.steps:
        label = f"{BY_NAME[step.step].number} {BY_NAME[step.step].short_title}"
        # on a CPU all is host memory, that of all ranks of a node together
        places = [(True, report.memory_bytes)] if plan.device == "cpu" else []
        if plan.device == "cuda":
            places.append((False, report.memory_bytes))
            if step.host_bytes and report.host_memory_bytes is not None:
                places.append((True, report.host_memory_bytes))
        for on_host, capacity in places:
            ranks = plan.ranks_per_node if on_host else None
            sizes = parts_of(step, ranks)
            seen |= sizes.keys()
            where = f"{label} host" if on_host and plan.device == "cuda" else label
            rows.append(_bar_row(where, sizes, capacity, width, glyphs))
            numbers += _numbers(where, fullest_phase(step, ranks), sizes, width)
    legend = "  ".join(f"{part.letter} {part.name}" for part in PARTS if part.name in seen)
    rows += wrapped(f"{legend}  (GiB, at the peak of each step)", width, "muted")
    return rows + numbers


def _bar_row(
    label: str, sizes: Mapping[str, int], capacity: int, width: int, glyphs: Glyphs
) -> Row:
    from dschat_tui.text import gib

    needed = sum(sizes.values())
    enough = needed <= capacity
    text = f" {gib(needed)} of {gib(capacity)} {glyphs.done if enough else glyphs.failed}"
    room = width - _LABEL_WIDTH - cell_len(text)
    row: Row = [(f"{label:<{_LABEL_WIDTH}}", "strong")]
    if room >= _SHORTEST_BAR:
        row += bar(sizes, capacity, room, glyphs)
    return fit([*row, (text, "good" if enough else "bad")], width, glyphs.cut)


def _numbers(label: str, phase: str, sizes: Mapping[str, int], width: int) -> list[Row]:
    from dschat_tui.text import gib

    text = ", ".join(f"{name} {gib(size)}" for name, size in sizes.items())
    return wrapped(f"{label}, while: {phase}: {text}", width, "muted")
