"""The charts of the step that is shown: above the other tabs where there is room, else alone."""

from __future__ import annotations

from dschat_tui.dashboard.keys import Key
from dschat_tui.dashboard.screens.charts import ChartGrid
from dschat_tui.dashboard.screens.panels import PANELS
from dschat_tui.dashboard.screens.run.model import RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.widgets.chart import View, moved
from dschat_tui.logs.model import LogModel

FEWEST_STEPS_SHOWN = 8

KEYS = (
    Key("run", "run.jump", "j", "jump", "line in log", "j", 41),
    Key("run", "run.zoom_in", "plus,equals_sign", "zoom(0.5)", "zoom", "+", 42),
    Key("run", "run.zoom_out", "minus", "zoom(2.0)", "zoom out", "-"),
)


class ChartsTab(ChartGrid, RunTab):
    """The charts of one step. Their keys work on every tab, so the screen binds them."""

    tab_name = "charts"
    letter = "c"

    def __init__(self, run: RunModel) -> None:
        super().__init__(len(PANELS[run.step]), View(), id="panels")
        self._run = run
        self._window: float | None = None

    def update(self, run: RunModel) -> None:
        """Draw the visible panels."""
        self._run = run
        log, specs = run.log, PANELS[run.step]
        self.lay_out(len(specs))
        view = self._windowed(log)
        self.draw_each(lambda index, panel: panel.show_spec(specs[index], log, view))

    def show_another_step(self) -> None:
        """Show all steps of a log that was just selected, without a cursor."""
        self._window = None
        self.view = moved(self.view, cursor=None)

    def _windowed(self, log: LogModel) -> View:
        """The view of the newest steps in the window, or of those around the cursor."""
        if self._window is None:
            return self.view
        first, last = _steps_range(log)
        end = last
        if self.view.cursor is not None:
            end = min(self.view.cursor + self._window / 2, last)
        start = max(end - self._window, first)
        return moved(self.view, first_step=start, last_step=max(end, start + self._window))

    def action_zoom(self, factor: float) -> None:
        """Show fewer or more steps: those around the cursor, else the newest."""
        first, last = _steps_range(self._run.log)
        window = (self._window or last - first) * factor
        self._window = None if window >= last - first else max(window, FEWEST_STEPS_SHOWN)
        self.update(self._run)

    def action_jump(self) -> None:
        """Show the line of the log that has the value under the cursor."""
        steps = self.current.steps()
        if not steps:
            return
        step = self.view.cursor if self.view.cursor is not None else steps[-1]
        offset = self.current.offset_at(step)
        if offset is not None:
            self.post_message(self.LineWanted(offset))


def _steps_range(log: LogModel) -> tuple[float, float]:
    columns = [series.columns(1) for series in log.series.values()]
    firsts = [part[0].step for part in columns if part]
    lasts = [series.last_step for series in log.series.values() if len(series)]
    return min(firsts, default=0.0), max(lasts, default=0.0)
