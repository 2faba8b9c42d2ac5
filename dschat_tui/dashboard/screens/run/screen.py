"""The run screen: composes the header, the charts and the tabs, and passes keys and news on."""

from __future__ import annotations

from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Container

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.keys import Key
from dschat_tui.dashboard.screens import charts
from dschat_tui.dashboard.screens.dialogs import Choice, Question
from dschat_tui.dashboard.screens.prompt import Prompt
from dschat_tui.dashboard.screens.resuming import ResumingScreen
from dschat_tui.dashboard.screens.run.charts import KEYS as CHART_KEYS
from dschat_tui.dashboard.screens.run.charts import ChartsTab
from dschat_tui.dashboard.screens.run.header import header_row, notice_rows, step_view
from dschat_tui.dashboard.screens.run.log import LogTab
from dschat_tui.dashboard.screens.run.model import Every, RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.screens.run.tabs import TABS
from dschat_tui.dashboard.widgets.bars import Line, TabBar
from dschat_tui.dashboard.widgets.stepper import stepper_row
from dschat_tui.logs.source import Source
from dschat_tui.text import clean, shown_path

TICK_SECONDS = 0.25
STATE_SECONDS = 1.0
# screens of at least so many rows show the charts above a tab
TALL = 30


class RunScreen(ResumingScreen):
    """One run, or one log: drains its feed four times a second and draws what is visible."""

    CSS_PATH = ["../charts.tcss", "../prompt.tcss", "run.tcss"]  # noqa: RUF012
    BINDINGS = [  # noqa: RUF012
        *keys.bindings("run", "steps"),
        *keys.bind(
            Key("run", f"run.{name}", letter, f"tab('{name}')", name, letter)
            for name, letter in ((tab.tab_name, tab.letter) for tab in (ChartsTab, *TABS))
        ),
        *keys.bind((*charts.KEYS, *CHART_KEYS), through="charts"),
    ]
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (140, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (TALL, "-tall")]  # noqa: RUF012

    def __init__(self, source: Source, speed: float | None = None) -> None:
        super().__init__()
        self.run = RunModel(source, speed)
        self.charts = ChartsTab(self.run)
        self.tabs: dict[str, RunTab] = {
            ChartsTab.tab_name: self.charts,
            **{tab.tab_name: tab() for tab in TABS},
        }
        self.tab = ChartsTab.tab_name
        self.is_paused = False
        self.prompt = Prompt()
        self._state_reading = Every(STATE_SECONDS)

    def compose(self) -> ComposeResult:
        """All widgets; those that are not visible are hidden by classes."""
        yield Line(id="header")
        yield Line(id="stepper")
        yield Line(id="cause")
        yield self.charts
        yield TabBar(list(self.tabs), id="tabs")
        with Container(id="body"):
            for tab in self.tabs.values():
                if tab is not self.charts:
                    yield tab.add_class("tab")
        yield self.prompt
        yield Line(id="keys")

    def on_mount(self) -> None:
        """Start to read once the first picture is on the screen."""
        self.set_interval(TICK_SECONDS, self.tick)
        self.call_after_refresh(self.run.feed.start)

    def on_unmount(self) -> None:
        """Let the reading thread end."""
        self.run.feed.stop()

    def tick(self) -> None:
        """Take what has been read, and draw it unless the picture is paused."""
        self.run.drain()
        if self._state_reading.is_due():
            self.run.read_state()
        if not self.is_paused:
            self.draw()

    def draw(self) -> None:
        """Draw what is visible, where it has changed."""
        if not self.can_draw:
            return
        run, glyphs, width = self.run, self.glyphs, self.size.width
        leads_to = getattr(self.app, "leads_to", "")
        notes = ("paused" if self.is_paused else "", self.message)
        self.query_one("#header", Line).show(header_row(run, notes, leads_to, width, glyphs))
        steps = [step_view(run, key, self.ascii_only) for key in run.source.logs]
        self.query_one("#stepper", Line).show(stepper_row(steps, width, glyphs))
        notice = notice_rows(run, glyphs)
        self.set_class(bool(notice), "-failed")
        if notice:
            self.query_one("#cause", Line).show(*notice)
        self.query_one("#keys", Line).show(self.key_hints(type(self.app)))
        badges = {name: badge for name, tab in self.tabs.items() if (badge := tab.badge(run))}
        self.query_one("#tabs", TabBar).show(self.tab, badges)
        if self.tab == self.charts.tab_name or self.size.height >= TALL:
            self.charts.update(run)
        if self.tab != self.charts.tab_name:
            self.tabs[self.tab].update(run)

    # what is shown

    async def action_charts(self, action: str) -> None:
        """Pass a key to the charts, which keys reach from every tab."""
        await self.charts.run_action(action)

    def action_show_step(self, index: int) -> None:
        """Show one of the steps."""
        steps = list(self.run.source.logs)
        if index < len(steps):
            self._select(steps[index])

    def action_latest_step(self) -> None:
        """Show the running step, also when the next one begins."""
        self._select(None)

    def _select(self, step: str | None) -> None:
        self.run.chosen = step
        self.charts.show_another_step()
        self._reset_tabs()
        self.draw()

    def action_tab(self, name: str) -> None:
        """Open a tab."""
        self.tab = name
        self.set_class(name != self.charts.tab_name, "-with-tab")
        for tab in self.tabs.values():
            tab.set_class(tab.tab_name == name, "-open")
        self._reset_tabs()
        self.call_after_refresh(self.draw)
        self.focus_again()

    def _reset_tabs(self) -> None:
        for tab in self.tabs.values():
            tab.reset()

    def on_tab_bar_chosen(self, message: TabBar.Chosen) -> None:
        """Open the tab that was clicked."""
        self.action_tab(message.name)

    def on_run_tab_line_wanted(self, message: RunTab.LineWanted) -> None:
        """Show a line of the log."""
        self.action_tab(LogTab.tab_name)
        self.query_one(LogTab).show_line(self.run, message.offset)

    def action_pause(self) -> None:
        """Hold the picture still, while reading continues; or draw again."""
        self.is_paused = not self.is_paused
        self.draw()

    def action_back(self) -> None:
        """From a search to the list, from a tab to the charts, from the charts to the runs."""
        if self.prompt.is_open:
            self.prompt.close()
            self.focus_again()
        elif self.charts.view.cursor is not None:
            self.charts.look(cursor=None)
        elif self.charts.is_maximised:
            self.charts.action_maximise()
        elif self.tab != self.charts.tab_name:
            self.action_tab(self.charts.tab_name)
        else:
            self.leave()

    # searching

    def action_search(self) -> None:
        """Ask for a text to search the tab for, or the log where the tab cannot be searched."""
        if not self.tabs[self.tab].is_searchable:
            self.action_tab(LogTab.tab_name)
        self.prompt.ask("search, then enter", "", self._search)

    def _search(self, text: str) -> str:
        self.tabs[self.tab].search(text)
        return ""

    def take_typed(self, character: str) -> bool:
        """See DashboardScreen."""
        return self.prompt.take_typed(character)

    def focus_again(self) -> None:
        """Give the focus back to the tab."""
        self.set_focus(self.tabs[self.tab].focus_target())

    # stopping, resuming, chatting

    def action_stop(self) -> None:
        """Ask whether to stop the run; while it is stopping, stop it sooner."""
        if not self.run.is_running:
            self.show_message("nothing to stop: this run is not running")
        elif self.run.is_stopping:
            self.ask_to_stop()
        else:
            question = Question(
                [
                    f"Stop {clean(shown_path(self.run.source.path), self.ascii_only)}?",
                    "It saves a checkpoint first; x again stops it without one.",
                ],
                [Choice("y", "stop the run", "stop")],
                ("n", "keep it running"),
            )
            self.app.push_screen(question, self._stop_answered)

    def _stop_answered(self, answer: str | None) -> None:
        if answer == "stop":
            self.ask_to_stop()

    def ask_to_stop(self) -> None:
        """Ask the run to save and stop; asked again, to stop without saving."""
        from dschat_tui.runs.control import NotRunning, ask_to_stop
        from dschat_tui.runs.folder import RunFolder

        try:
            ask_to_stop(RunFolder(self.run.source.path))
        except (NotRunning, OSError) as error:
            self.show_message(str(error))
            return
        before = max(self.run.stop_requests, 1 if self.run.run_state["stop"] else 0)
        self.run.stop_requests = before + 1
        self.draw()

    def action_resume(self) -> None:
        """Show how the run would be resumed, and resume it after a key."""
        if self.run.is_running:
            self.show_message("this run is running already")
        elif self.run.state is None:
            self.show_message("nothing to resume: this is no run of dschat")
        else:
            self.resume(self.run.source.path)

    def has_resumed(self, path: Path) -> None:
        """Show the running step."""
        self.run.stop_requests = 0
        self._state_reading.reset()
        self.action_latest_step()
        self.show_message("resumed")

    def action_chat(self) -> None:
        """Chat with the models of the run."""
        if not self.app.open_chat(self.run.source.path):  # type: ignore[attr-defined]
            self.show_message("no model to chat with yet: step 1 makes the first")
