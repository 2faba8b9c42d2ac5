"""Two or more runs side by side: the curves of each quantity in one chart, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.cells import set_cell_size
from textual import work
from textual.app import ComposeResult

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens import charts
from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.screens.charts import ChartGrid, Panel
from dschat_tui.dashboard.screens.panels import PANELS
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.chart import Named, View, moved
from dschat_tui.dashboard.widgets.lines import LineList, Nothing
from dschat_tui.dashboard.widgets.rows import SERIES_STYLES, Row
from dschat_tui.logs.feed import Feed, History, News, Problem
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.quantities import QUANTITIES, title
from dschat_tui.logs.series import Series
from dschat_tui.logs.source import find_source
from dschat_tui.text import clean
from engine.config.steps import BY_NAME, STEPS

TICK_SECONDS = 0.25
CHARTS_PER_PAGE = 6
LETTERS = "ABCDEF"
EMPTY = Series()
LONGEST_KEY, LONGEST_VALUE = 40, 28

Differences = list[tuple[str, list[str]]]


class DifferenceRows:
    """Final metrics of runs and the options that differ, a column per run."""

    def __init__(self, metrics: Differences, options: Differences, count: int) -> None:
        lines = [*metrics, *options]
        self._key_cells = min(max((len(key) for key, _ in lines), default=0), LONGEST_KEY)
        self._cells = [
            min(max((len(values[i]) for _, values in lines), default=1), LONGEST_VALUE)
            for i in range(count)
        ]
        letters = list(LETTERS[:count])
        self._rows = [
            self._row("final metrics", letters, "strong"),
            *(self._row(key, values, "text") for key, values in metrics),
            [],
            self._row("options that differ", letters, "strong"),
            *(self._row(key, values, "text") for key, values in options),
        ]
        if not options:
            self._rows.append([("none: the runs have one configuration", "muted")])

    def _row(self, key: str, values: Sequence[str], style: str) -> Row:
        cells = [set_cell_size(clean(key), self._key_cells)]
        for value, width in zip(values, self._cells, strict=True):
            cells.append(set_cell_size(clean(value), width))
        return [("  ".join(cells).rstrip(), style)]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self._rows)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        shown = self._rows[first : first + count]
        return [[(text[shift:], style) for text, style in row] for row in shown]


class CompareScreen(DashboardScreen):
    """The logs of several runs, followed together; a chart has one quantity of all of them."""

    CSS_PATH = ["charts.tcss", "compare.tcss"]  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        *keys.bindings("compare", "steps"),
        *keys.bind(charts.KEYS, through="charts"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (140, "-wide")]  # noqa: RUF012

    def __init__(self, paths: Sequence[Path]) -> None:
        super().__init__()
        self.paths = list(paths)
        logs = [find_source(path).logs for path in paths]
        self.feeds = [Feed(of_run) for of_run in logs]
        # a run with PPO and one with DPO have the first step in common
        self.steps = [step.name for step in STEPS if any(step.name in of_run for of_run in logs)]
        self._log_counts = [len(of_run) for of_run in logs]
        self.models: list[dict[str, LogModel]] = [{} for _ in paths]
        self.problem = ""
        self.chosen: str | None = None
        self.page = 0
        self.charts = ComparedCharts(self)

    def compose(self) -> ComposeResult:
        """The legend, the steps, the charts, the differences, the keys."""
        yield Line(id="compare-title")
        yield Line(id="compare-steps")
        yield self.charts
        yield LineList(id="differences")
        yield Line(id="compare-keys")

    def on_mount(self) -> None:
        """Start to read once the first picture is on the screen."""
        self.query_one("#differences", LineList).show(Nothing("reading"))
        self.set_interval(TICK_SECONDS, self.tick)
        for feed in self.feeds:
            self.call_after_refresh(feed.start)
        self.call_after_refresh(self._read_differences)

    def on_unmount(self) -> None:
        """Let the reading threads end."""
        for feed in self.feeds:
            feed.stop()

    @work(thread=True, exit_on_error=False, group="differences")
    def _read_differences(self) -> None:
        from dschat_tui.runs.history import compare

        try:
            metrics, options = compare(self.paths)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            shown: DifferenceRows | Nothing = Nothing(clean(f"cannot be compared: {error}"))
        else:
            shown = DifferenceRows(metrics, options, len(self.paths))
        self.app.call_from_thread(self.query_one("#differences", LineList).show, shown)

    # what comes in

    def tick(self) -> None:
        """Take what the feeds have read, and draw it."""
        for models, feed in zip(self.models, self.feeds, strict=True):
            for message in feed.take():
                if isinstance(message, History):
                    models[message.key] = message.model
                elif isinstance(message, News):
                    models[message.key].apply(message.update)
                elif isinstance(message, Problem):
                    self.problem = message.text
        self.draw()

    @property
    def has_all(self) -> bool:
        """Whether the history of every log has been read."""
        return [len(models) for models in self.models] == self._log_counts

    # what is shown

    @property
    def step(self) -> str:
        """The step that is compared: the selected one, else the last that a run has numbers of."""
        if self.chosen is not None:
            return self.chosen
        measured = [
            step
            for step in self.steps
            if any(step in models and models[step].series for models in self.models)
        ]
        return measured[-1] if measured else self.steps[0]

    @property
    def quantities(self) -> list[str]:
        """The quantities of the step that any run has, those of the run screen first."""
        found = {name for m in self.models if self.step in m for name in m[self.step].series}
        first = [n for spec in PANELS[self.step] for n in (*spec.names, *spec.instead)]
        order = dict.fromkeys([*first, *QUANTITIES, *sorted(found)])
        return [name for name in order if name in found]

    def _named(self, name: str) -> Named:
        """A quantity of all runs; empty where a run does not have it, so that styles stay."""
        return [
            (letter, models.get(self.step, LogModel()).series.get(name) or EMPTY)
            for letter, models in zip(LETTERS, self.models, strict=False)
        ]

    def draw(self) -> None:
        """Draw what is visible, where it has changed."""
        if not self.is_mounted or not self.size.width:
            return
        legend: Row = [(" ", "text")]
        for index, path in enumerate(self.paths):
            style = f"line{index % SERIES_STYLES}"
            legend.append((f"{LETTERS[index]} {self.glyphs.lines[index]} ", style))
            legend.append((f"{clean(path.name, self.ascii_only)}  ", "strong"))
        if self.problem:
            legend.append((clean(self.problem, self.ascii_only), "bad"))
        self.query_one("#compare-title", Line).show(legend)
        self.query_one("#compare-keys", Line).show(self.key_hints(type(self.app)))
        names = self.quantities
        pages = -(-len(names) // CHARTS_PER_PAGE)
        self.page = min(self.page, max(pages - 1, 0))
        self.query_one("#compare-steps", Line).show(self._steps_row(pages, len(names)))
        if not self.has_class("-differing"):
            shown = names[self.page * CHARTS_PER_PAGE :][:CHARTS_PER_PAGE]
            self.charts.lay_out(max(len(shown), 1))
            self.charts.draw_each(lambda index, panel: self._draw_panel(shown, index, panel))

    def _steps_row(self, pages: int, count: int) -> Row:
        row: Row = []
        for step in self.steps:
            name = f"{BY_NAME[step].number} {BY_NAME[step].short_title}"
            is_shown = step == self.step
            row.append((f"[{name}]" if is_shown else f" {name} ", "chosen" if is_shown else "text"))
        at = self.page * CHARTS_PER_PAGE + self.charts.index
        place = f"  quantity {at + 1} of {count}" if count else ""
        if pages > 1 and not self.charts.is_alone:
            place += f", page {self.page + 1} of {pages}"
        return [*row, (place, "muted")]

    def _draw_panel(self, names: Sequence[str], index: int, panel: Panel) -> None:
        name = names[index] if index < len(names) else None
        panel.title = "" if name is None else heading(name)
        panel.show(() if name is None else self._named(name), self.charts.view)

    def go_by(self, quantities: int) -> None:
        """Go to another quantity, on another page too."""
        count = max(len(self.quantities), 1)
        at = (self.page * CHARTS_PER_PAGE + self.charts.index + quantities) % count
        self.page, index = divmod(at, CHARTS_PER_PAGE)
        self.charts.go_to(index)
        self.call_after_refresh(self.draw)

    # keys

    async def action_charts(self, action: str) -> None:
        """Pass a key to the charts."""
        await self.charts.run_action(action)

    def action_back(self) -> None:
        """From the differences to the charts, from those to the runs."""
        if self.has_class("-differing"):
            self.action_differences()
        elif self.charts.view.cursor is not None:
            self.charts.look(cursor=None)
        else:
            self.leave()

    def action_differences(self) -> None:
        """Show what differs in place of the charts, or the charts again."""
        self.toggle_class("-differing")
        listed = self.query_one("#differences", LineList)
        self.set_focus(listed if self.has_class("-differing") else None)
        self.call_after_refresh(self.draw)

    def action_show_step(self, index: int) -> None:
        """Compare one of the steps."""
        if index >= len(self.steps):
            return
        self.chosen, self.page = self.steps[index], 0
        self.charts.view = moved(self.charts.view, cursor=None)
        self.charts.go_to(0)
        self.draw()


class ComparedCharts(ChartGrid):
    """A page of charts, each with one quantity of all runs; the keys turn the pages."""

    def __init__(self, compared: CompareScreen) -> None:
        super().__init__(CHARTS_PER_PAGE, View(banded=False), id="compare-panels")
        self._compared = compared

    def action_panel(self, by: int) -> None:
        """Go to another quantity."""
        self._compared.go_by(by)


def heading(name: str) -> str:
    """The title of a quantity that has a chart of its own."""
    text = title(name)
    if name.startswith("eval_"):
        text = f"held-out {name.removeprefix('eval_')}"
    elif name.endswith("_loss"):
        text = text if "loss" in text else f"{text} loss"
    elif name.endswith("_ema"):
        text = f"{title(name.removesuffix('_ema'))} {text}"
    return text[:1].upper() + text[1:]
