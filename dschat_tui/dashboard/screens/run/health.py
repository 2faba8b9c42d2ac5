"""The health tab: what the numbers of the log suggest to look at."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from dschat_tui.dashboard.screens.run.model import Every, RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.widgets.lines import LineList, Lines
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.health import CHECK, NOTE, OK, Verdict, Vitals, verdicts
from dschat_tui.text import Glyphs

REFRESH_SECONDS = 1.0


class HealthTab(LineList, RunTab):
    """Verdicts, those to check first; the tab's name has their number."""

    tab_name = "health"
    letter = "h"

    def __init__(self) -> None:
        super().__init__(id=self.tab_name)
        self.verdicts: list[Verdict] = []
        self._refresh = Every(REFRESH_SECONDS)

    def badge(self, run: RunModel) -> str:
        """How many verdicts a person should check."""
        if self._refresh.is_due():
            vitals = Vitals(run.log.series, run.log.status, run.silent_seconds())
            self.verdicts = [*_missed_gates(run), *verdicts(vitals)]
        count = sum(verdict.level == CHECK for verdict in self.verdicts)
        return f"{self.glyphs.check}{count}" if count else ""

    def update(self, run: RunModel) -> None:
        """List the verdicts."""
        self.show(Lines(verdict_rows(self.verdicts, self.size.width, self.glyphs)))

    def reset(self) -> None:
        """Judge the step that is shown now."""
        self._refresh.reset()


def _missed_gates(run: RunModel) -> list[Verdict]:
    if run.speed is not None or not run.run_state["gates"]:
        return []
    # here, not above: loads the configuration, and the first picture comes first
    from dschat_tui.runs.gates import known, told

    return [
        Verdict(
            "gate",
            CHECK if record["accepted"] is None else NOTE,
            "gate",
            told(record),
            f"{record['gate']} = {record['threshold']:g}",
            "reached before the next step begins"
            if record["accepted"] is None
            else f"reached; resumed regardless: {record['accepted']['reason']}",
        )
        for record in known(run.run_state)
        if record["step"] == run.key
    ]


def verdict_rows(found: Sequence[Verdict], width: int, glyphs: Glyphs) -> list[Row]:
    """Each verdict: its reading, then the rule and the normal range, wrapped at a width."""
    marks = {
        OK: (glyphs.done, "good"),
        NOTE: (glyphs.dot, "strong"),
        CHECK: (f"{glyphs.check} check this:", "warn"),
    }
    rows: list[Row] = []
    for verdict in found:
        mark, style = marks[verdict.level]
        reading = f": {verdict.reading}"
        rows.append([(f"{mark} ", style), (verdict.title, "strong"), (reading, "text")])
        behind, indent = f"rule: {verdict.rule}; normally {verdict.normal}", " " * 4
        lines = textwrap.wrap(
            behind, max(width, 20), initial_indent=indent, subsequent_indent=indent
        )
        rows += [[(line, "muted")] for line in lines]
    return rows or [[("no numbers to judge by yet", "muted")]]
