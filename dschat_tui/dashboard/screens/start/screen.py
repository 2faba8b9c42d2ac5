"""The Start screen: a profile, its options, whether it fits, what will run; then the run itself."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.worker import Worker, WorkerState, get_current_worker

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.screens.dialogs import Choice, Question
from dschat_tui.dashboard.screens.help import PAGES_WIDTH, Pages
from dschat_tui.dashboard.screens.prompt import Prompt
from dschat_tui.dashboard.screens.start import work as start_work
from dschat_tui.dashboard.screens.start.command import CommandPanel
from dschat_tui.dashboard.screens.start.draft import FIRST_PROFILE, Draft
from dschat_tui.dashboard.screens.start.options import GROUP_KEYS, OptionsPanel
from dschat_tui.dashboard.screens.start.panel import StartPanel
from dschat_tui.dashboard.screens.start.panels import PANELS
from dschat_tui.dashboard.screens.start.plan import PlanPanel
from dschat_tui.dashboard.screens.start.profiles import ProfilesPanel
from dschat_tui.dashboard.screens.start.work import Started
from dschat_tui.dashboard.widgets.bars import Line, TabBar
from dschat_tui.dashboard.widgets.lines import LineList, Lines, Nothing
from dschat_tui.dashboard.widgets.rows import Row, wrapped
from dschat_tui.logs.source import find_source
from dschat_tui.text import clean

if TYPE_CHECKING:
    from dschat_tui.profiles import Profile
    from engine.config.schema import RunConfig


class StartScreen(DashboardScreen):
    """The guided run: each change is checked, planned and shown as the command it results in."""

    CSS_PATH = ["../prompt.tcss", "start.tcss"]  # noqa: RUF012
    BINDINGS = [*keys.bindings("start"), *keys.bind(GROUP_KEYS)]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall"), (44, "-high")]  # noqa: RUF012

    def __init__(self, runs: Path) -> None:
        super().__init__()
        self.draft = Draft(runs)
        self.panels: dict[str, StartPanel] = {panel.tab_name: panel(self.draft) for panel in PANELS}
        self.panel: StartPanel = self.panels[ProfilesPanel.tab_name]
        self.is_starting = False
        self.prompt = Prompt()

    def compose(self) -> ComposeResult:
        """The panels; where it is small, one of them at a time."""
        yield Line(id="start-header")
        yield TabBar(list(self.panels), hint="tab: the next", id="start-panels")
        sides = ("profiles", "options")
        with Container(id="start-body"):
            for name in sides:
                yield self.panels[name].add_class("start-side", "start-panel")
        for name, panel in self.panels.items():
            if name not in sides:
                yield panel.add_class("start-panel")
        yield self.prompt
        yield Line(id="keys")

    def on_mount(self) -> None:
        """Read the profiles once the first picture is on the screen."""
        for panel in self.panels.values():
            panel.lines.show(Nothing("reading the profiles"))
        self._mark_panel()
        self.call_after_refresh(self._read_first)

    def on_resize(self) -> None:
        """One panel at a time where it is small."""
        self.set_class(self.is_small, "-single")
        super().on_resize()

    def on_screen_resume(self) -> None:
        """Look again which folder is free."""
        self.call_after_refresh(self.query_one(PlanPanel).make)

    # in worker threads: profiles, plans, the start

    @work(thread=True, exclusive=True, exit_on_error=False, group="first")
    def _read_first(self) -> list[Profile]:
        from dschat_tui import profiles

        return [profiles.examine(FIRST_PROFILE)]

    @work(thread=True, exclusive=True, exit_on_error=False, group="profiles")
    def _read_profiles(self) -> list[Profile]:
        from dschat_tui import profiles

        return profiles.every()

    @work(thread=True, exclusive=True, exit_on_error=False, group="start")
    def _start(self, config: RunConfig, profile: str, output: Path) -> Started:
        return start_work.start(config, profile, output)

    @work(thread=True, exclusive=True, exit_on_error=False, group="data")
    def _read_data(self, commands: list[list[str]]) -> list[str]:
        worker = get_current_worker()
        lines: list[str] = []
        for command in commands:
            lines += [*start_work.output_of(command, lambda: worker.is_cancelled), ""]
        return lines

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Take what a worker found, or say what went wrong in it."""
        take: dict[str, Callable[[Any], None]] = {
            "first": self._take_first,
            "profiles": self._take_profiles,
            "start": self._take_start,
            "data": self._take_data,
        }
        if event.state == WorkerState.ERROR:
            self.is_starting = False
            self.show_message(f"{event.worker.name}: {event.worker.error!r}")
        elif event.state == WorkerState.SUCCESS and event.worker.group in take:
            take[event.worker.group](event.worker.result)

    def _take_first(self, entries: list[Profile]) -> None:
        self.prompt.load()
        self.draft.profiles = entries
        self.focus_again()
        self.choose(FIRST_PROFILE)
        self._read_profiles()

    def _take_profiles(self, entries: list[Profile]) -> None:
        self.draft.profiles = entries
        if self.draft.form is None:
            self.choose(self.draft.chosen)
        profiles = self.query_one(ProfilesPanel)
        if profiles.filtered_by:  # it was typed before the profiles were read
            profiles.narrow(profiles.filtered_by)
        profiles.update(self.draft)
        profiles.find_needs()

    def _take_start(self, started: Started) -> None:
        self.is_starting = False
        if started.reasons:
            lines = [line for reason in started.reasons for line in (reason, "")]
            self._show_pages("The run cannot start", lines)
            return
        self.app.open_run(find_source(started.path))  # type: ignore[attr-defined]

    def _take_data(self, lines: list[str]) -> None:
        self.hide_message()
        self._draw_header()
        self._show_pages("The data, as this form would use it", lines)

    def _show_pages(self, title: str, lines: list[str]) -> None:
        width = min(self.size.width, PAGES_WIDTH) - 4
        is_ascii = self.ascii_only
        rows = [row for line in lines for row in wrapped(clean(line, is_ascii), width, "text")]
        self.app.push_screen(Pages(title, Lines(rows)))

    # the draft

    def choose(self, name: str) -> None:
        """Take another profile; what was changed stays changed on top of it."""
        if problem := self.draft.choose(name):
            self.show_message(problem)
        self.form_changed()

    def form_changed(self) -> None:
        """Draw the form, plan it, and explain the option under the cursor."""
        self.draw()
        self.query_one(PlanPanel).make()
        self.query_one(OptionsPanel).explain()

    # drawing

    def draw(self) -> None:
        """Draw all panels."""
        if not self.can_draw:
            return
        self._draw_header()
        self.query_one("#start-panels", TabBar).show(self.panel.tab_name, {})
        for panel in self.panels.values():
            panel.update(self.draft)
        self.query_one("#keys", Line).show(self.key_hints(type(self.app)))

    def _draw_header(self) -> None:
        if not self.is_mounted:
            return
        header = self.query_one("#start-header", Line)
        rows = [self._header_row()]
        if self.message:
            rows = wrapped(f" {self.message}", self.size.width, "warn")
        header.styles.height = len(rows)
        header.show(*rows)
        if len(rows) > 1:  # once it has the height
            self.call_after_refresh(header.show, *rows)

    def _header_row(self) -> Row:
        dot, form = f" {self.glyphs.dot} ", self.draft.form
        row: Row = [(" dschat", "strong"), (f"{dot}new run", "text")]
        if self.is_starting:
            row.append((f"{dot}checking, then starting", "warn"))
        elif form is not None:
            row.append((f" of {clean(form.profile, self.ascii_only)}", "text"))
            row.append((f" {self.glyphs.arrow} {clean(str(self.draft.output()))}", "text"))
            if form.violations:
                row.append((f"{dot}{self.glyphs.check} breaks a rule", "bad"))
            if form.assignments:
                row.append((f"{dot}* {len(form.assignments)} changed", "warn"))
        if text := self.panel.filtered_by:
            row.append((f"{dot}{self.panel.tab_name} with '{clean(text)}'", "warn"))
        return row

    def _mark_panel(self) -> None:
        for panel in self.panels.values():
            panel.set_class(panel is self.panel, "-current")
        body = self.query_one("#start-body")
        body.set_class(self.panel in body.children, "-current")

    # keys

    def _go_to_panel(self, panel: StartPanel) -> None:
        self.prompt.close()
        if panel is not self.panel:
            self.panel.filtered_by = ""
        self.panel = panel
        self._mark_panel()
        self.focus_again()
        self.call_after_refresh(self.draw)

    def action_panel(self, by: int) -> None:
        """Go to another panel."""
        panels = list(self.panels.values())
        self._go_to_panel(panels[(panels.index(self.panel) + by) % len(panels)])

    def on_descendant_focus(self) -> None:
        """A click on a list makes its panel the current one."""
        for panel in self.panels.values():
            if panel is not self.panel and self.focused is panel.focus_target():
                self._go_to_panel(panel)

    def on_tab_bar_chosen(self, message: TabBar.Chosen) -> None:
        """Go to the panel that was clicked."""
        self._go_to_panel(self.panels[message.name])

    def action_group(self, index: int) -> None:
        """Show a group of options."""
        options = self.query_one(OptionsPanel)
        options.show_group(index)
        self._go_to_panel(options)
        self.call_after_refresh(options.explain)

    def on_line_list_picked(self, message: LineList.Picked) -> None:
        """From a profile to its options."""
        if message.list_id == ProfilesPanel.tab_name:
            self._go_to_panel(self.query_one(OptionsPanel))

    def action_apply_fix(self) -> None:
        """Set what the greyed option needs, what a broken rule asks for, or what makes it fit."""
        if self.draft.form is None:
            return
        changes = self.panel.suggested_changes() or self.draft.suggested_changes()
        if not changes:
            self.show_message("nothing to fix: no rule is broken, and the plan suggests no change")
        elif problem := self.draft.assign(changes):
            self.show_message(problem)
        else:
            self.form_changed()
            self.show_message("set " + ", ".join(f"{key}={text}" for key, text in changes.items()))

    def action_filter(self) -> None:
        """Filter profiles or options while a text is typed."""
        if not self.draft.profiles:
            return
        if not self.panel.is_filterable:
            self._go_to_panel(self.panels[ProfilesPanel.tab_name])
        self._narrow("")
        self.prompt.ask(
            f"filter {self.panel.tab_name}, then enter", "", self._end_filter, self._narrow
        )

    def _narrow(self, text: str) -> None:
        self.panel.narrow(text)
        self.draw()
        if isinstance(self.panel, OptionsPanel):
            self.panel.explain()

    def _end_filter(self, text: str) -> str:
        self._narrow(text)
        return ""

    def action_copy(self) -> None:
        """Copy the command; on its panel, with the commands of the steps."""
        commands = [self.draft.command_text()]
        if self.panel.tab_name == CommandPanel.tab_name:
            commands += [shlex.join(command) for command in self.draft.step_commands]
        self.app.copy_to_clipboard("\n".join(commands))
        self.show_message(f"copied {len(commands)} command{'s' if len(commands) > 1 else ''}")

    def action_data(self) -> None:
        """Show what the data holds, with its first rows decoded and which tokens are learnt."""
        if self.draft.form is not None:
            self._read_data(self.draft.form.data_commands())
            self.show_message("reading the data, with `dschat data inspect`")

    def action_save(self) -> None:
        """Ask for a name and save the form as a profile."""
        if self.draft.form is not None:
            self.prompt.ask("name of the new profile, then enter", "", self._save_as)

    def _save_as(self, name: str) -> str:
        from engine.config.loading import ConfigError

        try:
            path = self.draft.save(name.strip())
        except (ConfigError, OSError) as error:
            return str(error)
        self.panel.filtered_by = ""
        self._read_profiles()
        self.show_message(f"saved {path}")
        return ""

    def action_start(self) -> None:
        """Check everything, then start the run and show it."""
        planned = self.draft.planned
        if self.draft.form is None or self.is_starting:
            return
        report = planned.report if planned is not None else None
        if report is None or report.fits:
            self._start_now("start")
            return
        question = Question(
            ["By the plan it does not fit into memory. Start it anyway?"],
            [Choice("s", "start it", "start")],
            ("n", "no"),
        )
        self.app.push_screen(question, self._start_now)

    def _start_now(self, answer: str | None) -> None:
        form = self.draft.form
        if answer == "start" and form is not None:
            self.is_starting = True
            self._draw_header()
            self._start(form.config, form.profile, self.draft.output())

    def action_back(self) -> None:
        """Close the prompt, the filter, or this screen."""
        if self.prompt.is_open:
            self.prompt.close()
            self.focus_again()
        elif self.panel.filtered_by:
            self._narrow("")
        else:
            self.leave()

    def take_typed(self, character: str) -> bool:
        """See DashboardScreen."""
        return self.prompt.take_typed(character)

    def focus_again(self) -> None:
        """Give the focus back to the panel."""
        # at once: focus() waits, and keys typed ahead do not
        self.set_focus(self.panel.focus_target())
