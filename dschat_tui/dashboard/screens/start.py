"""The Start screen: a profile, its options, whether it fits, what will run; then the run itself."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.worker import Worker, WorkerState, get_current_worker

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens import start_work
from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.screens.dialogs import Choice, Question
from dschat_tui.dashboard.screens.help import PAGES_WIDTH, Pages
from dschat_tui.dashboard.screens.plan import plan_rows, wrapped
from dschat_tui.dashboard.screens.start_rows import (
    Lines,
    Need,
    OptionRows,
    ProfileRows,
    option_detail,
    profile_detail,
)
from dschat_tui.dashboard.screens.start_work import Planned, Started
from dschat_tui.dashboard.widgets.bars import Line, TabBar
from dschat_tui.dashboard.widgets.lines import LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.source import find_source
from dschat_tui.text import clean

if TYPE_CHECKING:
    from textual.widgets import Input

    from dschat_tui.dashboard.form import Form
    from dschat_tui.profiles import Profile
    from engine.config.loading import Option
    from engine.config.schema import RunConfig

# a key held down changes options faster than anybody reads plans
SETTLE_SECONDS = 0.05
PANELS = ("profiles", "options", "plan", "command")
# the names of the groups, as dschat_tui.dashboard.form has them: it takes a moment to load
# the groups of the schema, whose import would delay the first picture
GROUP_TABS = ("memory", "speed", "LoRA", "stability", "data", "logging", "all")
FIRST_PROFILE = "tiny"


class OptionList(LineList):
    """The options; its keys change the one under the cursor."""

    BINDINGS = keys.bindings("form")


class StartScreen(DashboardScreen):
    """The guided run: each change is checked, planned and shown as the command it comes to."""

    CSS_PATH = "start.tcss"
    BINDINGS = keys.bindings("start")
    VERTICAL_BREAKPOINTS = [(0, "-short"), (30, "-tall"), (44, "-high")]  # noqa: RUF012

    def __init__(self, runs: Path) -> None:
        super().__init__()
        self.runs_folder = runs
        self.entries: list[Profile] = []
        self.needs: dict[str, Need] = {}
        self.form: Form | None = None
        self.filter = ""
        self.group = GROUP_TABS[0]
        self.panel = PANELS[0]
        self.planned: Planned | None = None
        self.commands: list[list[str]] = []
        self.effect = ""
        self.is_starting = False
        self._chosen = FIRST_PROFILE
        # outlive a profile that cannot be used
        self._changes: dict[str, str] = {}
        self._asked: Callable[[str], str | None] | None = None
        self._follow: Callable[[str], None] | None = None

    def compose(self) -> ComposeResult:
        """The four panels; where it is small, one of them at a time."""
        yield Line(id="start-header")
        yield TabBar(PANELS, hint="tab: the next", id="start-panels")
        with Container(id="start-body"):
            with Container(id="profiles-side", classes="start-side start-panel"):
                yield LineList(id="profiles")
                yield Line(id="profile-detail")
            with Container(id="options-side", classes="start-side start-panel"):
                yield TabBar(GROUP_TABS, hint="1 to 7", id="groups")
                yield OptionList(id="options")
                yield Line(id="option-detail")
        yield LineList(id="plan").add_class("start-panel")
        yield LineList(id="command").add_class("start-panel")
        yield Line(id="start-keys")

    def on_mount(self) -> None:
        """Read the profiles once the first picture is on the screen."""
        for name in PANELS:
            self._list(name).show(Nothing("reading the profiles"))
        self._mark_panel()
        self.call_after_refresh(self._read_first)

    def on_resize(self) -> None:
        """One panel at a time where it is small."""
        self.set_class(self.is_small, "-single")
        super().on_resize()

    def on_screen_resume(self) -> None:
        """Look again which folder is free."""
        self.call_after_refresh(self._plan)

    # beside the screen: profiles, plans, the start

    @work(thread=True, exclusive=True, exit_on_error=False, group="first")
    def _read_first(self) -> list[Profile]:
        from dschat_tui import profiles

        return [profiles.examine(FIRST_PROFILE)]

    @work(thread=True, exclusive=True, exit_on_error=False, group="profiles")
    def _read_profiles(self) -> list[Profile]:
        from dschat_tui import profiles

        return profiles.every()

    @work(thread=True, exclusive=True, exit_on_error=False, group="needs")
    def _find_needs(self, entries: list[Profile]) -> dict[str, Need]:
        worker = get_current_worker()
        needs = {}
        for entry in entries:
            if worker.is_cancelled:
                break
            if entry.config is not None:
                needs[entry.name] = start_work.need(entry.config)
        return needs

    @work(thread=True, exclusive=True, exit_on_error=False, group="plan")
    def _make_plan(self, config: RunConfig, output: Path, is_searched: bool) -> Planned | None:
        worker = get_current_worker()
        time.sleep(SETTLE_SECONDS)
        return None if worker.is_cancelled else start_work.planned(config, output, is_searched)

    @work(thread=True, exclusive=True, exit_on_error=False, group="effect")
    def _find_effect(self, config: RunConfig, key: str, value: Any) -> str:
        worker = get_current_worker()
        time.sleep(SETTLE_SECONDS)
        return "" if worker.is_cancelled else start_work.effect(config, key, value)

    @work(thread=True, exclusive=True, exit_on_error=False, group="start")
    def _start(self, config: RunConfig, profile: str, output: Path) -> Started:
        return start_work.start(config, profile, output)

    @work(thread=True, exclusive=True, exit_on_error=False, group="data")
    def _look_at_data(self, commands: list[list[str]]) -> list[str]:
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
            "needs": self._take_needs,
            "plan": self._take_plan,
            "effect": self._take_effect,
            "start": self._take_start,
            "data": self._take_data,
        }
        if event.state == WorkerState.ERROR:
            self.is_starting = False
            self.tell(f"{event.worker.name}: {event.worker.error!r}")
        elif event.state == WorkerState.SUCCESS and event.worker.group in take:
            take[event.worker.group](event.worker.result)

    def _take_first(self, entries: list[Profile]) -> None:
        # not composed with the rest: it takes long to load, and the first picture comes first
        from textual.widgets import Input

        prompt = Input(id="prompt", compact=True, select_on_focus=False)
        prompt.display = False
        self.mount(prompt, before="#start-keys")
        self.entries = entries
        self.set_focus(self._list(self.panel))
        self._choose(FIRST_PROFILE)
        self._read_profiles()

    def _take_profiles(self, entries: list[Profile]) -> None:
        self.entries = entries
        if self.form is None:
            self._choose(self._chosen)
        if self.filter and self.panel == "profiles":  # it was typed before they were there
            self._narrow(self.filter)
        self._draw_profiles()
        self._find_needs(entries)

    def _take_needs(self, needs: dict[str, Need]) -> None:
        self.needs = needs
        self._draw_profiles()

    def _take_plan(self, planned: Planned | None) -> None:
        if planned is None or self.form is None:
            return
        self.planned, self.commands = planned, planned.commands
        if planned.facts != self.form.facts:
            self.form.know(planned.facts)
        self.draw()
        if planned.report is not None and not planned.report.fits and not planned.is_searched:
            self._make_plan(self.form.config, self.output(), True)

    def _take_effect(self, effect: str) -> None:
        self.effect = effect
        self._draw_option_detail()

    def _take_start(self, started: Started) -> None:
        self.is_starting = False
        if started.reasons:
            lines = [line for reason in started.reasons for line in (reason, "")]
            self._show_pages("It does not start", lines)
            return
        self.app.open_run(find_source(started.path))  # type: ignore[attr-defined]

    def _take_data(self, lines: list[str]) -> None:
        self._told_until = 0.0
        self._draw_header()
        self._show_pages("The data, as this form would use it", lines)

    def _show_pages(self, title: str, lines: list[str]) -> None:
        width = min(self.size.width, PAGES_WIDTH) - 4
        is_ascii = self.ascii_only
        rows = [row for line in lines for row in wrapped(clean(line, is_ascii), width, "text")]
        self.app.push_screen(Pages(title, Lines(rows)))

    # the form

    def output(self) -> Path:
        """The folder that the run would get."""
        from dschat_tui.runs.folder import next_free

        return next_free(self.runs_folder, self._chosen)

    def _shown_entries(self) -> list[Profile]:
        text = self.filter.lower() if self.panel == "profiles" else ""
        return [e for e in self.entries if text in f"{e.name} {e.models} {e.comment}".lower()]

    def _choose(self, name: str) -> None:
        """Take another profile; what was changed stays changed on top of it."""
        from dschat_tui.dashboard.form import Form
        from engine.config.loading import ConfigError

        self._chosen = name
        entry = next((entry for entry in self.entries if entry.name == name), None)
        if self.form is not None:
            self._changes = self.form.assignments
        self.form = None
        if entry is not None and entry.config is not None:
            try:
                self.form = Form(name, entry.config, self._changes)
            except ConfigError as error:
                self.tell(f"changes were taken back: {error}")
                self.form = Form(name, entry.config)
        self._changed()

    def _assign(self, changes: dict[str, str]) -> str | None:
        """Change options; what is wrong with a value, in words, or None."""
        from engine.config.loading import ConfigError

        assert self.form is not None
        try:
            self.form.assign(changes)
        except ConfigError as error:
            return str(error).removeprefix("the form: ")
        self._changed()
        return None

    def _changed(self) -> None:
        self.planned, self.effect = None, ""
        self.draw()
        self._plan()
        self._look_at_option()

    def _plan(self) -> None:
        if self.form is not None:
            self._make_plan(self.form.config, self.output(), False)

    def _options(self) -> list[Option]:
        from dschat_tui.dashboard.form import find_options, options_of

        if self.filter and self.panel == "options":
            return find_options(self.filter)
        return options_of(self.group)

    def _option(self) -> Option | None:
        """The option under the cursor."""
        listed = self._list("options")
        if isinstance(listed.source, OptionRows) and listed.cursor < listed.source.count:
            return listed.source.options[listed.cursor]
        return None

    def _look_at_option(self) -> None:
        """Find out what the next value of the option under the cursor comes to."""
        from dschat_tui.dashboard.form import choices
        from engine.config.loading import get_value

        option, self.effect = self._option(), ""
        self._draw_option_detail()
        if option is None or self.form is None or not choices(option.key):
            return
        value = self.form.next_value(option.key, 1)
        if value != get_value(self.form.config, option.key):
            self._find_effect(self.form.config, option.key, value)

    # drawing

    def _list(self, name: str) -> LineList:
        return self.query_one(f"#{name}", LineList)

    def draw(self) -> None:
        """Draw all panels."""
        if not self.can_draw:
            return
        self._draw_header()
        self.query_one("#start-panels", TabBar).show(self.panel, {})
        self._draw_profiles()
        self._draw_options()
        self._draw_plan()
        self._draw_command()
        self.query_one("#start-keys", Line).show(self.key_hints("app", "start"))

    def _draw_header(self) -> None:
        if not self.is_mounted:
            return
        header = self.query_one("#start-header", Line)
        if self.told:
            told = wrapped(f" {self.told}", self.size.width, "warn")
            header.styles.height = len(told)
            header.show(*told)
            self.call_after_refresh(header.show, *told)
            return
        header.styles.height = 1
        dot = f" {self.glyphs.dot} "
        row: Row = [(" dschat", "strong"), (f"{dot}new run", "text")]
        if self.is_starting:
            row.append((f"{dot}checking, then starting", "warn"))
        elif self.form is not None:
            changed = len(self.form.assignments)
            row.append((f" of {clean(self.form.profile, self.ascii_only)}", "text"))
            row.append((f" {self.glyphs.arrow} {clean(str(self.output()))}", "text"))
            if self.form.violations:
                row.append((f"{dot}{self.glyphs.check} breaks a rule", "bad"))
            if changed:
                row.append((f"{dot}* {changed} changed", "warn"))
        if self.filter:
            row.append((f"{dot}{self.panel} with '{clean(self.filter)}'", "warn"))
        header.show(row)

    def _draw_profiles(self) -> None:
        shown = self._shown_entries()
        listed = self._list("profiles")
        if not self.entries:
            return
        names = [entry.name for entry in shown]
        if self._chosen in names:
            listed.cursor = names.index(self._chosen)
        if shown:
            listed.show(ProfileRows(shown, self._chosen, self.needs, self.glyphs))
        else:
            listed.show(Nothing(f"none with '{clean(self.filter)}'"))
        detail = self.query_one("#profile-detail", Line)
        entry = shown[listed.cursor] if self._chosen in names else None
        need = self.needs.get(self._chosen)
        rows: list[Row] = []
        if entry is not None:
            rows = profile_detail(entry, need, *detail.size, self.glyphs)
        detail.show(*rows)

    def _draw_options(self) -> None:
        self.query_one("#groups", TabBar).show(self.group, {})
        listed = self._list("options")
        if self.form is None:
            if self.entries:
                listed.show(Nothing("this profile cannot be used: see beside it"))
            return
        found = self._options()
        if found:
            listed.show(OptionRows(self.form, found, self.glyphs))
        else:
            listed.show(Nothing(f"none with '{clean(self.filter)}'"))
        self._draw_option_detail()

    def _draw_option_detail(self) -> None:
        detail, option = self.query_one("#option-detail", Line), self._option()
        if self.form is None or option is None:
            detail.show()
            return
        size = detail.size
        rows = option_detail(self.form, option, self.effect, size.width, size.height, self.glyphs)
        detail.show(*rows)

    def _draw_plan(self) -> None:
        listed, planned = self._list("plan"), self.planned
        width = max(listed.size.width, self.size.width)
        rows: list[Row] = []
        if self.form is not None:
            for violation in self.form.violations:
                told = f"{self.glyphs.check} {clean(str(violation), self.ascii_only)}"
                rows += wrapped(told, width, "bad")
        if planned is None:
            # the plan before stays in sight until there is the next
            if not isinstance(listed.source, Lines):
                listed.show(Nothing("planning"))
            return
        if planned.report is None:
            rows += wrapped(clean(planned.problem, self.ascii_only), width, "warn")
        else:
            rows += plan_rows(planned.report, planned.is_searched, width, self.glyphs)
        listed.show(Lines(rows))

    def _draw_command(self) -> None:
        listed = self._list("command")
        width = max(listed.size.width, self.size.width)
        rows = wrapped(self.command_text(), width, "strong")
        for command in self.commands:
            rows += wrapped(clean(shlex.join(command), self.ascii_only), width, "muted")
        listed.show(Lines(rows))

    def command_text(self) -> str:
        """The command that does what the form says."""
        return "" if self.form is None else shlex.join(self.form.command(self.output()))

    # keys

    def _mark_panel(self) -> None:
        sides = {"profiles": "profiles-side", "options": "options-side"}
        for name in PANELS:
            widget = self.query_one(f"#{sides.get(name, name)}")
            widget.set_class(name == self.panel, "-current")
        self.query_one("#start-body").set_class(self.panel in sides, "-current")

    def _go_to_panel(self, name: str) -> None:
        # the focus is set at once, here and below: focus() waits, and keys typed ahead do not
        self._end_prompt()
        if self.filter and name != self.panel:
            self.filter = ""
        self.panel = name
        self._mark_panel()
        self.set_focus(self._list(name))
        self.call_after_refresh(self.draw)

    def action_panel(self, by: int) -> None:
        """Go to another panel."""
        self._go_to_panel(PANELS[(PANELS.index(self.panel) + by) % len(PANELS)])

    def on_descendant_focus(self) -> None:
        """A click on a list makes its panel the current one."""
        name = self.focused.id if self.focused is not None else None
        if name in PANELS and name != self.panel:
            self._go_to_panel(str(name))

    def on_tab_bar_chosen(self, message: TabBar.Chosen) -> None:
        """A click on a tab."""
        if message.name in PANELS:
            self._go_to_panel(message.name)
        else:
            self.action_group(GROUP_TABS.index(message.name))

    def action_group(self, index: int) -> None:
        """Show a group of options."""
        self.group, self.filter = GROUP_TABS[index], ""
        self._list("options").cursor = 0
        self._go_to_panel("options")
        self.call_after_refresh(self._look_at_option)

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """The profile under the cursor is the chosen one; an option is explained."""
        if message.list_id == "profiles":
            source = self._list("profiles").source
            if isinstance(source, ProfileRows) and source.entries:
                name = source.entries[message.index].name
                if name != self._chosen:
                    self._choose(name)
        elif message.list_id == "options":
            self._look_at_option()

    def on_line_list_picked(self, message: LineList.Picked) -> None:
        """From a profile to its options."""
        if message.list_id == "profiles":
            self._go_to_panel("options")

    def action_change(self, by: int) -> None:
        """The next or previous value of an option, or a line to type one into."""
        from dschat_tui.dashboard.form import choices, value_text
        from engine.config.loading import get_value

        option = self._option()
        if option is None or self.form is None:
            return
        now = get_value(self.form.config, option.key)
        if not choices(option.key):
            unit = f" ({option.unit})" if option.unit else ""
            self._ask(
                f"{option.title}{unit}, then enter", value_text(now), self._setter(option.key)
            )
            return
        value = self.form.next_value(option.key, by)
        if value == now:
            violation = self.form.obstacles(option.key)[0][1]
            self.tell(f"not possible [{violation.id}]; the reason stands below the options")
            return
        self._assign({option.key: value_text(value)})

    def _setter(self, key: str) -> Callable[[str], str | None]:
        return lambda text: self._assign({key: text})

    def action_reset(self) -> None:
        """Take the change of an option back."""
        option = self._option()
        if option is not None and self.form is not None:
            self.form.reset(option.key)
            self._changed()

    def action_way_out(self) -> None:
        """Set what the greyed option needs, what a broken rule asks for, or what makes it fit."""
        from dschat_tui.dashboard.form import fix_texts

        if self.form is None:
            return
        option = self._option() if self.panel == "options" else None
        changes = self.form.suggested_fix(option.key) if option is not None else {}
        for violation in self.form.violations:
            changes = changes or fix_texts(violation.fix)
        report = self.planned.report if self.planned is not None else None
        if not changes and report is not None and report.change is not None:
            changes = fix_texts(report.change.assignments)
        if not changes:
            self.tell("nothing to set: no rule is in the way here, and the plan proposes nothing")
        elif problem := self._assign(changes):
            self.tell(problem)
        else:
            self.tell("set " + ", ".join(f"{key}={text}" for key, text in changes.items()))

    def action_filter(self) -> None:
        """Filter profiles or options as a text is typed."""
        if not self.entries:
            return
        if self.panel not in ("profiles", "options"):
            self._go_to_panel("profiles")
        self._narrow("")
        self._ask(f"filter {self.panel}, then enter", "", self._end_filter, self._narrow)

    def _narrow(self, text: str) -> None:
        self.filter = text
        listed = self._list(self.panel)
        listed.cursor = 0
        if self.panel == "options":
            self.draw()
            self._look_at_option()
            return
        shown = [entry.name for entry in self._shown_entries()]
        if shown and self._chosen not in shown:
            self._choose(shown[0])
        self.draw()

    def _end_filter(self, text: str) -> str | None:
        self._narrow(text)
        return None

    def action_copy(self) -> None:
        """Copy the command; on its panel, with the commands of the steps."""
        commands = [self.command_text()]
        if self.panel == "command":
            commands += [shlex.join(command) for command in self.commands]
        self.app.copy_to_clipboard("\n".join(commands))
        self.tell(f"copied {len(commands)} command{'s' if len(commands) > 1 else ''}")

    def action_data(self) -> None:
        """Show what the data holds, with its first rows decoded and what is learnt of them."""
        if self.form is not None:
            self._look_at_data(self.form.data_commands())
            self.tell("reading the data, with `dschat data inspect`")

    def action_save(self) -> None:
        """Ask for a name and save the form as a profile."""
        if self.form is not None:
            self._ask("name of the new profile, then enter", "", self._save_as)

    def _save_as(self, name: str) -> str | None:
        from engine.config.loading import ConfigError

        assert self.form is not None
        try:
            path = self.form.save(name.strip())
        except (ConfigError, OSError) as error:
            return str(error)
        self.form, self._chosen, self._changes, self.filter = None, name.strip(), {}, ""
        self._read_profiles()
        self.tell(f"saved {path}")
        return None

    def action_start(self) -> None:
        """Check everything, then start the run and show it."""
        if self.form is None or self.is_starting:
            return
        report = self.planned.report if self.planned is not None else None
        if report is None or report.fits:
            self._start_now("start")
            return
        question = Question(
            ["By the plan it does not fit into memory. Start it all the same?"],
            [Choice("s", "start it", "start")],
            ("n", "no"),
        )
        self.app.push_screen(question, self._start_now)

    def _start_now(self, answer: str | None) -> None:
        if answer == "start" and self.form is not None:
            self.is_starting = True
            self._draw_header()
            self._start(self.form.config, self.form.profile, self.output())

    def action_back(self) -> None:
        """Out of the line that is typed into, the filter, or this screen."""
        if self._asked is not None:
            self._end_prompt()
            self.set_focus(self._list(self.panel))
        elif self.filter:
            self._narrow("")
        else:
            self.leave()

    # the line that is typed into

    def _ask(
        self,
        placeholder: str,
        text: str,
        take: Callable[[str], str | None],
        follow: Callable[[str], None] | None = None,
    ) -> None:
        """Ask for a line; `take` gives what is wrong with it, `follow` sees it while it grows."""
        self._asked, self._follow = take, follow
        self.add_class("-asking")
        prompt = self._prompt()
        prompt.value, prompt.placeholder, prompt.cursor_position = text, placeholder, len(text)
        prompt.display = True
        self.set_focus(prompt)

    def _prompt(self) -> Input:
        from textual.widgets import Input

        return self.query_one("#prompt", Input)

    def _end_prompt(self) -> None:
        if self._asked is not None:
            self._asked = self._follow = None
            self.remove_class("-asking")
            self._prompt().display = False
            self.unsettle()

    def take_typed(self, sign: str) -> bool:
        """See DashboardScreen."""
        if self._asked is not None:
            self._prompt().insert_text_at_cursor(sign)
        return self._asked is not None

    def on_input_changed(self, message: Input.Changed) -> None:
        """Filter while it is typed."""
        if self._follow is not None:
            self._follow(message.value)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Take the line, or say what is wrong with it and leave it there."""
        if self._asked is None:
            return
        self._told_until = 0.0
        problem = self._asked(message.value)
        if problem:
            self.tell(problem)
            return
        self._end_prompt()
        self.set_focus(self._list(self.panel))
