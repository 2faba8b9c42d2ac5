"""The run screen: steps, charts of the step that is looked at, and what lies behind them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.worker import Worker, WorkerState

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.charts import ChartKeys
from dschat_tui.dashboard.screens.contents import (
    ANSWER_COLUMNS,
    AnswerRows,
    EventRows,
    LogRows,
    VerdictRows,
    answer_detail,
)
from dschat_tui.dashboard.screens.dialogs import Choice, Question
from dschat_tui.dashboard.screens.panels import PANEL_COUNT, PANELS, PanelSpec
from dschat_tui.dashboard.screens.resuming import ResumingScreen
from dschat_tui.dashboard.widgets.bars import Line, TabBar
from dschat_tui.dashboard.widgets.chart import BRAILLE, MARKERS, Chart, View, moved
from dschat_tui.dashboard.widgets.lines import LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.dashboard.widgets.split import split_rows
from dschat_tui.dashboard.widgets.stepper import StepView, stepper_row
from dschat_tui.logs.feed import Feed, History, NewRows, News, Problem
from dschat_tui.logs.health import CHECK, NOTE, Verdict, Vitals, verdicts
from dschat_tui.logs.lines import LogLines
from dschat_tui.logs.model import LogModel
from dschat_tui.logs.replay import Replay
from dschat_tui.logs.rollouts import SORTS, Rollouts
from dschat_tui.logs.source import ONE_LOG, Source
from dschat_tui.runs.progress import progress_of
from dschat_tui.runs.state import (
    PAUSED,
    RUNNING,
    RunState,
    StepState,
    has_state,
    read_run_state,
    unknown_run_state,
)
from dschat_tui.text import clean, shown_path
from engine.config.steps import BY_NAME

if TYPE_CHECKING:
    from textual.widgets import Input

TICK_SECONDS = 0.25
STATE_SECONDS = 1.0
HEALTH_SECONDS = 1.0
SYSTEM_SECONDS = 2.0
ORDER_SECONDS = 2.0
# a run whose run.json has not been touched for so long may have lost its supervisor
LOST_SECONDS = 60.0
# a log without an end that has not grown for so long is not called running
QUIET_SECONDS = 120.0
FEWEST_STEPS_SHOWN = 8
# after so many, a log that has not told a quantity will not tell it
STEPS_TO_JUDGE = 20
TABS = ("charts", "health", "answers", "log", "events", "system")


class Panel(Chart):
    """One of the charts, or the split of a step's time."""

    def __init__(self, index: int) -> None:
        super().__init__("", id=f"panel-{index}")
        self.add_class("panel")
        self.split_of: LogModel | None = None
        self._drawn: tuple[object, ...] = ()

    def show_spec(self, spec: PanelSpec, model: LogModel, view: View) -> None:
        """Show a panel of a log."""
        self.title = spec.heading(model.series)
        self.empty = "not in this log" if model.status.done >= STEPS_TO_JUDGE else "no values yet"
        if spec.is_split:
            self.split_of, self.view = model, view
            drawn = (model.version, id(model), self.size, view.glyphs)
            if drawn != self._drawn:
                self._drawn = drawn
                self.redraw()
            return
        if self.split_of is not None:
            self.split_of, self._drawn, self._seen = None, (), ()
        self.show(spec.named(model.series), view)

    def build(self, width: int, height: int) -> list[Row]:
        """The chart, or the bar; the title of the panel that keys act on is reversed."""
        if self.split_of is not None:
            glyphs = self.view.glyphs
            rows = split_rows(self.title, self.split_of.series, width, height, glyphs)
        else:
            rows = super().build(width, height)
        if self.has_class("-current") and rows and rows[0]:
            rows[0] = [(rows[0][0][0], "chosen"), *rows[0][1:]]
        return rows


class RunScreen(ChartKeys, ResumingScreen):
    """One run, or one log: drains its feed four times a second and draws what is in sight."""

    CSS_PATH = "run.tcss"
    BINDINGS = keys.bindings("run", "charts")
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (140, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall")]  # noqa: RUF012

    def __init__(self, source: Source, speed: float | None = None) -> None:
        super().__init__()
        self.source = source
        self.speed = speed
        self.feed: Feed | Replay = (
            Feed(source.logs, source.rollouts) if speed is None else Replay(source.logs, speed)
        )
        self.models: dict[str, LogModel] = {}
        self.changed: dict[str, float] = {}
        self.rollouts = Rollouts(source.rollouts)
        self.state: RunState | None = None
        self.problem = ""
        self.chosen: str | None = None
        self.tab = "charts"
        self.view = View()
        self.panel_index = 0
        self.is_maximised = False
        self.is_paused = False
        self.window: float | None = None
        self.stops_asked = 0
        self.verdicts: list[Verdict] = []
        self.searched = ""
        self._search: Input | None = None
        self.answers_found: set[int] | None = None
        self.sort = 0
        self._order_of: tuple[object, ...] = ()
        self._due: dict[str, float] = {}
        self._drawn_log: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """All widgets; what is not in sight is hidden by classes."""
        yield Line(id="header")
        yield Line(id="stepper")
        yield Line(id="cause")
        with Container(id="panels"):
            for index in range(PANEL_COUNT):
                yield Panel(index)
        yield TabBar(TABS, id="tabs")
        with Container(id="body"):
            yield LineList(id="health").add_class("tab")
            with Container(id="answers", classes="tab"):
                yield Line(id="answers-head")
                yield LineList(id="answers-list")
                yield Line(id="answer")
            yield LineList(id="log", follow=True).add_class("tab")
            yield LineList(id="events", follow=True).add_class("tab")
            yield Line(id="system", classes="tab")
        yield Line(id="keys")

    def on_mount(self) -> None:
        """Start to read once the first picture is on the screen."""
        self.view = moved(
            self.view,
            markers=MARKERS["ascii"] if self.ascii_only else BRAILLE,
            patterned=self.app.no_color or self.ascii_only,
        )
        self._mark_panel()
        self.set_interval(TICK_SECONDS, self.tick)
        self.call_after_refresh(self.feed.start)

    def on_unmount(self) -> None:
        """Let the reading thread end."""
        self.feed.stop()

    def on_resize(self) -> None:
        """One panel at a time where it is small."""
        self.set_class(self.is_small or self.is_maximised, "-single")
        super().on_resize()

    # what comes in

    def tick(self) -> None:
        """Take what the feed has read, and draw it unless the picture is paused."""
        self.drain()
        # of a replay, run.json tells what came later
        if self.speed is None and self._is_due("state", STATE_SECONDS):
            self.state = read_run_state(self.source.state_file)
            if not self.run_goes_on:
                self.stops_asked = 0
        if not self.is_paused:
            self.draw()

    def drain(self) -> None:
        """Take what the feed has read."""
        for message in self.feed.take():
            if isinstance(message, History):
                self.models[message.key] = message.model
                self.changed[message.key] = message.changed
            elif isinstance(message, News):
                self.models[message.key].apply(message.update)
                self.changed[message.key] = message.changed
            elif isinstance(message, NewRows):
                self.rollouts.extend(message.rows, message.restarted)
            elif isinstance(message, Problem):
                self.problem = message.text

    @property
    def has_all(self) -> bool:
        """Whether the history of every log is here."""
        return len(self.models) == len(self.source.logs)

    def _is_due(self, what: str, seconds: float) -> bool:
        now = time.monotonic()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + seconds
        return True

    # which log is looked at

    @property
    def key(self) -> str:
        """The log that is looked at: the chosen one, else that of the running or latest step."""
        logs = list(self.source.logs)
        if self.chosen in self.source.logs:
            return str(self.chosen)
        for key in logs:
            if has_state(self._run_state, key, RUNNING):
                return key
        told = [key for key in logs if key in self.models and self.models[key].status.lines]
        latest = max((self.changed.get(key, 0.0) for key in told), default=0.0)
        return next((key for key in reversed(told) if self.changed.get(key) == latest), logs[0])

    @property
    def model(self) -> LogModel:
        """What is known of the log that is looked at."""
        return self.models.get(self.key) or LogModel()

    @property
    def step(self) -> str:
        """The step of the log that is looked at."""
        return self._step_of(self.key)

    def _step_of(self, key: str) -> str:
        model = self.models.get(key)
        told = None if model is None else model.status.step
        return told or ("sft" if key == ONE_LOG else key)

    @property
    def _run_state(self) -> RunState:
        return self.state or unknown_run_state()

    def _record(self, key: str) -> StepState | None:
        return self._run_state["steps"].get(key)

    def _state_of(self, key: str) -> str:
        record = self._record(key)
        if record is not None:
            return record["state"]
        model = self.models.get(key)
        if model is None or not model.status.lines:
            return "pending"
        if model.status.state != "unknown":
            return {"ok": "done"}.get(model.status.state, model.status.state)
        if model.status.model is not None:
            return "done"
        quiet = time.time() - self.changed.get(key, 0.0) > QUIET_SECONDS
        return "unknown" if quiet else "running"

    @property
    def run_goes_on(self) -> bool:
        """Whether run.json says that the run goes on."""
        return self._run_state["state"] == RUNNING

    @property
    def is_stopping(self) -> bool:
        """Whether the run goes on, and this or another process asked it to stop."""
        return self.run_goes_on and bool(self.stops_asked or self._run_state["stop"])

    # drawing

    def draw(self) -> None:
        """Draw what is in sight, where it has changed."""
        if not self.is_mounted or not self.size.width:
            return
        model = self.model
        self._draw_header(model)
        if self.tab == "charts" or self.size.height >= 30:
            self._draw_panels(model)
        if self._is_due("health", HEALTH_SECONDS):
            self.verdicts = [*self._missed_gates(), *verdicts(self._vitals(model))]
        warned = sum(verdict.level == CHECK for verdict in self.verdicts)
        badges = {"health": f"{self.glyphs.check}{warned}"} if warned else {}
        self.query_one("#tabs", TabBar).show(self.tab, badges)
        draw: dict[str, Callable[[LogModel], None]] = {
            "health": self._draw_health,
            "answers": self._draw_answers,
            "log": self._draw_log,
            "events": self._draw_events,
            "system": self._draw_system,
        }
        if self.tab in draw:
            draw[self.tab](model)

    def _missed_gates(self) -> list[Verdict]:
        if self.speed is not None or not self._run_state["gates"]:
            return []
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
                else f"reached; gone on: {record['accepted']['reason']}",
            )
            for record in known(self._run_state)
            if record["step"] == self.key
        ]

    def _vitals(self, model: LogModel) -> Vitals:
        key = self.key
        changed = self.changed.get(key)
        running = self._state_of(key) == "running"
        silent = time.time() - changed if running and changed else None
        return Vitals(model.series, model.status, silent)

    def _draw_header(self, model: LogModel) -> None:
        self.query_one("#header", Line).show(self._header_row(model))
        steps = [self._step_view(key) for key in self.source.logs]
        self.query_one("#stepper", Line).show(stepper_row(steps, self.size.width, self.glyphs))
        notice = self._notice()
        self.set_class(bool(notice), "-failed")
        if notice:
            self.query_one("#cause", Line).show(*notice)
        self.query_one("#keys", Line).show(self.key_hints("app", "run", "charts"))

    def _header_row(self, model: LogModel) -> Row:
        dot = f" {self.glyphs.dot} "
        path = clean(shown_path(self.source.path), self.ascii_only)
        room = self.size.width // (4 if self.is_stopping else 3)
        if len(path) > room:
            path = self.glyphs.cut + path[-room:]
        row: Row = [(f" {path}", "strong")]
        state = self.state["state"] if self.state else self._state_of(self.key)
        if self.speed is not None:
            state = f"replay {self.speed:g}x"
        if self.is_stopping:
            from dschat_tui.runs.stopping import stopping_text

            told = stopping_text(self._run_state, self.stops_asked, "x")
            row.append((f"{dot}{told}", "warn"))
        else:
            row.append((f"{dot}{state}", "text"))
        if self.run_goes_on and time.time() - self._run_state["updated"] > LOST_SECONDS:
            row.append((f"{dot}no sign of its supervisor", "warn"))
        leads_to = getattr(self.app, "leads_to", "")
        if leads_to and state == "done":
            row.append((f"{dot}q: {leads_to}", "warn"))
        if self.is_paused:
            row.append((f"{dot}paused", "warn"))
        if self.problem:
            row.append((dot + clean(self.problem, self.ascii_only), "bad"))
        if self.told:
            row.append((dot + self.told, "warn"))
        if not self.models:
            row.append((f"{dot}reading", "muted"))
        elif not model.status.lines:
            row.append((f"{dot}no log yet", "muted"))
        else:
            row.append((f"{dot}{model.status.lines} lines", "muted"))
        return row

    def _step_view(self, key: str) -> StepView:
        model = self.models.get(key) or LogModel()
        step, record, state = self._step_of(key), self._record(key), self._state_of(key)
        seconds = None
        if record is not None and record["started"]:
            seconds = (record["ended"] or time.time()) - record["started"]
        progress = progress_of(model)
        return StepView(
            number=BY_NAME[step].number,
            title=BY_NAME[step].short_title,
            state=state,
            seconds=seconds,
            done=progress.done,
            total=progress.total,
            remaining=progress.remaining_seconds,
            phase=progress.phase_text(self.ascii_only),
            model=_model_of(model.status.model, self.ascii_only),
            is_shown=key == self.key,
        )

    def _notice(self) -> list[Row]:
        """Why the run waits or the step failed, and what to do: two rows, or none."""
        cause = self._cause()
        if cause is not None:
            line, advice = (clean(str(cause[name]), self.ascii_only) for name in ("line", "advice"))
            return [
                [(f"{self.glyphs.failed} {cause['id']}: ", "bad"), (line, "text")],
                [(f"  {advice}", "warn")],
            ]
        if self.speed is not None or self._run_state["state"] != PAUSED:
            return []
        # here, not above: loads the configuration, and the first picture comes first
        from dschat_tui.runs.gates import told, waiting

        missed = ", ".join(told(record) for record in waiting(self._run_state))
        return [
            [(f"{self.glyphs.check} paused: ", "warn"), (clean(missed, self.ascii_only), "text")],
            [("  u: say why, and go on. Else start another run, with this step longer", "warn")],
        ]

    def _cause(self) -> Mapping[str, Any] | None:
        key = self.key
        if self._state_of(key) != "failed":
            return None
        record = self._record(key)
        cause = (record["cause"] if record else None) or self.model.status.cause
        return cause if cause and {"id", "line", "advice"} <= set(cause) else None

    def _draw_panels(self, model: LogModel) -> None:
        view = self._windowed(model)
        alone = self.has_class("-single")
        for index, spec in enumerate(PANELS[self.step]):
            panel = self._panel(index)
            if index == self.panel_index:
                panel.show_spec(spec, model, view)
            elif not alone:  # once the panel that keys act on is on the screen
                self.call_after_refresh(panel.show_spec, spec, model, view)

    def _panel(self, index: int) -> Panel:
        return self.query_one(f"#panel-{index}", Panel)

    def _windowed(self, model: LogModel) -> View:
        """The view with the newest `window` steps, or those around the cursor."""
        if self.window is None:
            return self.view
        first, last = _steps_range(model)
        end = last
        if self.view.cursor is not None:
            end = min(self.view.cursor + self.window / 2, last)
        start = max(end - self.window, first)
        return moved(self.view, first_step=start, last_step=max(end, start + self.window))

    def _draw_health(self, model: LogModel) -> None:
        health = self.query_one("#health", LineList)
        health.show(VerdictRows(self.verdicts, health.size.width, self.glyphs))

    def _draw_events(self, model: LogModel) -> None:
        if not model.events:
            self.query_one("#events", LineList).show(Nothing("nothing happened yet"))
            return
        self.query_one("#events", LineList).show(EventRows(list(model.events), self.glyphs))

    def _draw_log(self, model: LogModel) -> None:
        drawn = (self.key, model.version, self.searched)
        if drawn == self._drawn_log:
            return
        self._drawn_log = drawn
        log = self.query_one("#log", LineList)
        if not model.status.lines:
            log.show(Nothing("no line yet"))
        else:
            log.show(LogRows(self._log_lines(), self.searched, self.glyphs))

    def _log_lines(self) -> LogLines:
        model = self.model
        return LogLines(self.source.logs[self.key], model.marks, model.status.lines)

    def _draw_answers(self, model: LogModel) -> None:
        listed = self.query_one("#answers-list", LineList)
        if not len(self.rollouts):
            listed.show(Nothing("no answers: PPO writes them into rollouts.jsonl"))
            return
        found = None if self.answers_found is None else frozenset(self.answers_found)
        order_of = (self.rollouts.version, self.sort, found)
        same_question = order_of[1:] == self._order_of[1:]
        if order_of == self._order_of or (
            same_question and not self._is_due("order", ORDER_SECONDS)
        ):
            return
        self._order_of = order_of
        order = self.rollouts.order(SORTS[self.sort], self.answers_found)
        told = f", {len(order)} with '{clean(self.searched)}'" if found is not None else ""
        head = f"{ANSWER_COLUMNS}   [{SORTS[self.sort]} first{told}]"
        self.query_one("#answers-head", Line).show([(head, "muted")])
        if not order:
            listed.show(Nothing("no answer holds this text"))
            self.query_one("#answer", Line).show()
            return
        listed.show(AnswerRows(self.rollouts, order, self.glyphs))
        self._draw_answer(listed)

    def _draw_answer(self, listed: LineList) -> None:
        source, line = listed.source, self.query_one("#answer", Line)
        if isinstance(source, AnswerRows) and listed.cursor < source.count:
            index = source.order[listed.cursor]
            line.show(*answer_detail(source.rollouts, index, line.size.width, self.glyphs))

    def _draw_system(self, model: LogModel) -> None:
        if self._is_due("system", SYSTEM_SECONDS):
            self._sample_system()

    @work(thread=True, exclusive=True, exit_on_error=False, group="system")
    def _sample_system(self) -> None:
        from dschat_tui.dashboard.screens.system import system_rows

        rows = system_rows(self.source.path, self._leaders(), self.glyphs)
        self.app.call_from_thread(self.query_one("#system", Line).show, *rows)

    def _leaders(self) -> list[int]:
        state = self._run_state
        found = [state["supervisor"], *(record["process"] for record in state["steps"].values())]
        return [process["pid"] for process in found if process and self.run_goes_on]

    # keys

    def action_back(self) -> None:
        """From a search to the list, from a tab to the charts, from the charts to the runs."""
        if self.has_class("-searching"):
            self._end_search()
        elif self.view.cursor is not None:
            self.look(cursor=None)
        elif self.is_maximised:
            self.action_maximise()
        elif self.tab != "charts":
            self.action_tab("charts")
        else:
            self.leave()

    def action_show_step(self, index: int) -> None:
        """Look at one of the steps."""
        logs = list(self.source.logs)
        if index < len(logs):
            self.chosen = logs[index]
            self._look_anew()

    def action_latest_step(self) -> None:
        """Look at the step that runs, also when the next one begins."""
        self.chosen = None
        self._look_anew()

    def _look_anew(self) -> None:
        self.window = None
        self.view = moved(self.view, cursor=None)
        self._due.pop("health", None)
        self.draw()

    def action_tab(self, name: str) -> None:
        """Show a tab."""
        self.tab = name
        self.set_class(name != "charts", "-with-tab")
        for child in self.query_one("#body").children:
            child.set_class(child.id == name, "-current")
        self._due.clear()
        self._drawn_log, self._order_of = (), ()
        self.call_after_refresh(self.draw)
        focused = {"answers": "answers-list"}.get(name, name)
        if name in ("charts", "system"):
            self.set_focus(None)
        else:
            self.set_focus(self.query_one(f"#{focused}", LineList))

    def on_tab_bar_chosen(self, message: TabBar.Chosen) -> None:
        """A click on a tab."""
        self.action_tab(message.name)

    def action_panel(self, by: int) -> None:
        """Go to another panel."""
        self.panel_index = (self.panel_index + by) % len(PANELS[self.step])
        self._mark_panel()
        self.call_after_refresh(self.draw)

    def _mark_panel(self) -> None:
        for index in range(PANEL_COUNT):
            self._panel(index).set_class(index == self.panel_index, "-current")
            self._panel(index).redraw()

    def action_maximise(self) -> None:
        """Give the panel the whole place, or give it back."""
        self.is_maximised = not self.is_maximised
        self.on_resize()

    def current_chart(self) -> Panel:
        """The panel that keys act on."""
        return self._panel(self.panel_index)

    def draw_charts(self) -> None:
        """Draw the panels in sight."""
        self._draw_panels(self.model)

    def action_zoom(self, factor: float) -> None:
        """Show fewer or more steps: those around the cursor, else the newest."""
        first, last = _steps_range(self.model)
        whole = last - first
        window = (self.window or whole) * factor
        self.window = None if window >= whole else max(window, FEWEST_STEPS_SHOWN)
        self._draw_panels(self.model)

    def action_pause(self) -> None:
        """Hold the picture still; reading goes on."""
        self.is_paused = not self.is_paused
        self.draw()

    def action_jump(self) -> None:
        """Show the line of the log that told the value under the cursor."""
        panel = self._panel(self.panel_index)
        steps = panel.steps()
        if not steps:
            return
        step = self.view.cursor if self.view.cursor is not None else steps[-1]
        offset = panel.offset_at(step)
        if offset is not None:
            self._show_line(offset)

    def _show_line(self, offset: int) -> None:
        number = self._log_lines().number_at(offset)
        log = self.query_one("#log", LineList)
        log.follow = False
        self.action_tab("log")
        self._draw_log(self.model)
        log.go_to(number)

    def action_follow(self) -> None:
        """Keep the end of the log in sight, or stand still."""
        for name in ("#log", "#events"):
            lines = self.query_one(name, LineList)
            lines.follow = not lines.follow
            if lines.follow:
                lines.go_to(lines.source.count - 1)

    def action_sort(self) -> None:
        """Sort the answers another way."""
        self.sort = (self.sort + 1) % len(SORTS)
        self.query_one("#answers-list", LineList).cursor = 0
        self.draw()

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """Show the answer under the cursor whole."""
        if message.list_id == "answers-list":
            self._draw_answer(self.query_one("#answers-list", LineList))

    def on_line_list_picked(self, message: LineList.Picked) -> None:
        """From an event to its line in the log."""
        source = self.query_one("#events", LineList).source
        if message.list_id == "events" and isinstance(source, EventRows):
            self._show_line(source.events[message.index].offset)

    def action_chat(self) -> None:
        """Talk with the models of the run."""
        if not self.app.open_chat(self.source.path):  # type: ignore[attr-defined]
            self.tell("no model to talk with yet: step 1 makes the first")

    # searching

    async def action_search(self) -> None:
        """Ask for what to look for: in the answers on their tab, else in the log."""
        if self.tab != "answers":
            self.action_tab("log")
        # not composed with the rest: it takes long to load, and the first picture comes first
        from textual.widgets import Input

        self.add_class("-searching")
        self._search = Input(placeholder="search, then enter", id="search", compact=True)
        await self.mount(self._search, before="#keys")
        self.set_focus(self._search)

    def take_typed(self, sign: str) -> bool:
        """See DashboardScreen."""
        if self._search is not None:
            self._search.insert_text_at_cursor(sign)
        return self._search is not None

    def _end_search(self) -> None:
        self.remove_class("-searching")
        if self._search is not None:
            self._search.remove()
            self._search = None
            self.unsettle()
        self.action_tab(self.tab)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Look for it; nothing typed ends the search."""
        self.searched = message.value
        self._end_search()
        if self.tab == "answers":
            self._find_answers(self.searched)
        elif self.searched:
            log = self.query_one("#log", LineList)
            self._find_line(self.searched, log.cursor + 1, False)

    def action_found(self, direction: int) -> None:
        """The next or previous line that holds what was searched for."""
        if self.searched and self.tab == "log":
            log = self.query_one("#log", LineList)
            start = log.cursor + 1 if direction > 0 else log.cursor
            self._find_line(self.searched, start, direction < 0)

    @work(thread=True, exclusive=True, exit_on_error=False, group="search")
    def _find_line(self, text: str, start: int, backwards: bool) -> None:
        lines = self._log_lines()
        number = lines.find(text, start, backwards)
        if number is None:  # once around
            number = lines.find(text, lines.count if backwards else 0, backwards)
        self.app.call_from_thread(self._go_to_found, number)

    def _go_to_found(self, number: int | None) -> None:
        if number is None:
            self.tell(f"no line holds '{self.searched}'")
            return
        log = self.query_one("#log", LineList)
        log.follow = False
        self._draw_log(self.model)
        log.go_to(number)

    @work(thread=True, exclusive=True, exit_on_error=False, group="search")
    def _find_answers(self, text: str) -> None:
        found = self.rollouts.find(text) if text else None
        self.app.call_from_thread(self._show_answers, found)

    def _show_answers(self, found: set[int] | None) -> None:
        self.answers_found = found
        self.query_one("#answers-list", LineList).cursor = 0
        self.draw()

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Say what went wrong beside the screen."""
        if event.state == WorkerState.ERROR:
            self.tell(f"{event.worker.name}: {event.worker.error!r}")

    # stopping, and going on

    def action_stop(self) -> None:
        """Ask whether to stop the run; once it was asked to, again: without waiting."""
        if not self.run_goes_on:
            self.tell("nothing to stop: this run does not go on")
        elif self.is_stopping:
            self.ask_to_stop()
        else:
            question = Question(
                [
                    f"Stop {clean(shown_path(self.source.path), self.ascii_only)}?",
                    "It saves a checkpoint first; x again ends it without.",
                ],
                [Choice("y", "stop the run", "stop")],
                ("n", "let it go on"),
            )
            self.app.push_screen(question, self._stop_answered)

    def _stop_answered(self, answer: str | None) -> None:
        if answer == "stop":
            self.ask_to_stop()

    def ask_to_stop(self) -> None:
        """Ask the run to save and stop; asked again, to end."""
        from dschat_tui.runs.control import NotRunning, ask_to_stop
        from dschat_tui.runs.folder import RunFolder

        try:
            ask_to_stop(RunFolder(self.source.path))
        except (NotRunning, OSError) as error:
            self.tell(str(error))
            return
        before = max(self.stops_asked, 1 if self._run_state["stop"] else 0)
        self.stops_asked = before + 1
        self.draw()

    def action_resume(self) -> None:
        """Show how the run would go on, and start it after a key."""
        if self.run_goes_on:
            self.tell("this run goes on already")
        elif self.state is None:
            self.tell("nothing to go on with: this is no run of dschat")
        else:
            self.resume(self.source.path)

    def has_resumed(self, path: Path) -> None:
        """Look at the step that runs."""
        self.stops_asked = 0
        self._due.pop("state", None)
        self.action_latest_step()
        self.tell("it goes on")


def _steps_range(model: LogModel) -> tuple[float, float]:
    columns = [s.columns(1) for s in model.series.values()]
    firsts = [part[0].step for part in columns if part]
    lasts = [s.last_step for s in model.series.values() if len(s)]
    return min(firsts, default=0.0), max(lasts, default=0.0)


def _model_of(model: str | None, ascii_only: bool) -> str:
    """The last two parts of the folder that a step hands on."""
    return "" if model is None else clean("/".join(Path(model).parts[-2:]), ascii_only)
