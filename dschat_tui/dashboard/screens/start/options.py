"""The options panel: the form, by groups, with what each option does and what rules forbid."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.worker import Worker, WorkerState, get_current_worker

from dschat_tui.dashboard.keys import Key, bind
from dschat_tui.dashboard.screens.start import work as start_work
from dschat_tui.dashboard.screens.start.draft import Draft
from dschat_tui.dashboard.screens.start.panel import StartPanel
from dschat_tui.dashboard.widgets.bars import Line, TabBar
from dschat_tui.dashboard.widgets.lines import Items, LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row, wrapped
from dschat_tui.text import ASCII, Glyphs, clean

if TYPE_CHECKING:
    from dschat_tui.dashboard.form import Form
    from engine.config.loading import Option
    from engine.config.schema import RunConfig

# the groups of the schema, whose import would delay the first picture
GROUPS = ("memory", "speed", "LoRA", "stability", "data", "logging", "all")
# these keys work on every panel, so the screen binds them
GROUP_KEYS = tuple(
    Key("start", f"start.group{n}", str(n), f"group({n - 1})", f"group {n} of the options", str(n))
    for n in range(1, len(GROUPS) + 1)
)
KEYS = (
    Key("form", "form.change", "space,enter,right", "change(1)", "change, or type", "space"),
    Key("form", "form.change_back", "left", "change(-1)", "previous value", "left"),
    Key("form", "form.reset", "backspace,delete", "reset", "as in the profile", "backspace"),
)
VALUE_WIDTH = 14


class OptionRows(Items["Option"]):
    """A row for each option: its value, its title, its key; `*` where it was changed."""

    def __init__(self, form: Form, options: Sequence[Option], glyphs: Glyphs) -> None:
        super().__init__(options, glyphs)
        self._form = form

    def row(self, item: Option, shift: int) -> Row:
        """One item."""
        mark = "*" if item.key in self._form.assignments else " "
        is_greyed = self._form.is_greyed(item.key)
        value = clean(shown_value(self._form, item, is_greyed), self.glyphs is ASCII)
        if cell_len(value) > VALUE_WIDTH:
            value = value[: VALUE_WIDTH - 1] + self.glyphs.cut
        style = "muted" if is_greyed else "text"
        owner = item.key.rpartition(".")[0]
        row: Row = [
            (mark, "warn"),
            (f"{value:<{VALUE_WIDTH}} ", style),
            (item.title[shift:], "muted" if is_greyed else "strong"),
        ]
        return [*row, (f" {self.glyphs.dot} {owner}" if owner else "", "muted")]


class OptionList(LineList):
    """The options; its keys override those of other lists."""

    BINDINGS = bind(KEYS)

    def __init__(self, panel: OptionsPanel) -> None:
        super().__init__(id="options")
        self._panel = panel

    def action_change(self, by: int) -> None:
        """Take the next or previous value, or ask for one."""
        self._panel.change(by)

    def action_reset(self) -> None:
        """Take the value of the profile."""
        self._panel.reset()


class OptionsPanel(Container, StartPanel):
    """The options of a group, or those that a filter finds, to be changed."""

    tab_name = "options"
    is_filterable = True

    def __init__(self, draft: Draft) -> None:
        super().__init__(id="options-side")
        self.draft = draft
        self.group = GROUPS[0]
        self.effect = ""

    def compose(self) -> ComposeResult:
        """The groups, the options, and the option under the cursor."""
        yield TabBar(GROUPS, hint=f"1 to {len(GROUPS)}", id="groups")
        yield OptionList(self)
        yield Line(id="option-detail")

    def shown(self) -> list[Option]:
        """The options that the filter finds in all groups; without one, those of the group."""
        from dschat_tui.dashboard.form import find_options, options_of

        return find_options(self.filtered_by) if self.filtered_by else options_of(self.group)

    def option(self) -> Option | None:
        """The option under the cursor."""
        listed = self.lines
        if isinstance(listed.source, OptionRows) and listed.cursor < listed.source.count:
            return listed.source.items[listed.cursor]
        return None

    def update(self, draft: Draft) -> None:
        """List the options."""
        self.query_one("#groups", TabBar).show(self.group, {})
        if draft.form is None:
            if draft.profiles:
                self.lines.show(Nothing("this profile cannot be used: see its description"))
            return
        found = self.shown()
        if found:
            self.lines.show(OptionRows(draft.form, found, self.glyphs))
        else:
            self.lines.show(Nothing(f"none with '{clean(self.filtered_by)}'"))
        self._draw_detail()

    def _draw_detail(self) -> None:
        detail, option, form = (
            self.query_one("#option-detail", Line),
            self.option(),
            self.draft.form,
        )
        if form is None or option is None:
            detail.show()
        else:
            detail.show(*option_detail(form, option, self.effect, *detail.size, self.glyphs))

    def show_group(self, index: int) -> None:
        """Show a group."""
        self.group, self.filtered_by = GROUPS[index], ""
        self.lines.cursor = 0

    def explain(self) -> None:
        """Find out what the next value of the option under the cursor does to memory."""
        from dschat_tui.dashboard.form import choices
        from engine.config.loading import get_value

        option, self.effect, form = self.option(), "", self.draft.form
        self._draw_detail()
        if option is None or form is None or not choices(option.key):
            return
        value = form.next_value(option.key, 1)
        if value != get_value(form.config, option.key):
            self._find_effect(form.config, option.key, value)

    @work(thread=True, exclusive=True, exit_on_error=False, group="effect")
    def _find_effect(self, config: RunConfig, key: str, value: Any) -> str:
        worker = get_current_worker()
        time.sleep(start_work.SETTLE_SECONDS)
        return "" if worker.is_cancelled else start_work.effect(config, key, value)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show the effect, or what went wrong."""
        super().on_worker_state_changed(event)
        if event.state == WorkerState.SUCCESS:
            self.effect = event.worker.result or ""
            self._draw_detail()

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """Explain the option under the cursor."""
        self.explain()

    def on_tab_bar_chosen(self, message: TabBar.Chosen) -> None:
        """Show the group that was clicked."""
        message.stop()
        self.host.action_group(GROUPS.index(message.name))

    def change(self, by: int) -> None:
        """Take the next or previous value of an option, or ask for one."""
        from dschat_tui.dashboard.form import choices, value_text
        from engine.config.loading import get_value

        option, form = self.option(), self.draft.form
        if option is None or form is None:
            return
        key, now = option.key, get_value(form.config, option.key)
        if not choices(key):
            unit = f" ({option.unit})" if option.unit else ""
            heading = f"{option.title}{unit}, then enter"
            self.host.prompt.ask(heading, value_text(now), lambda text: self._assign({key: text}))
            return
        value = form.next_value(key, by)
        if value == now:
            violation = form.obstacles(key)[0][1]
            self.show_message(f"not possible [{violation.id}]; the reason is below the options")
        else:
            self._assign({key: value_text(value)})

    def _assign(self, changes: dict[str, str]) -> str:
        problem = self.draft.assign(changes)
        if not problem:
            self.host.form_changed()
        return problem

    def reset(self) -> None:
        """Give an option the value that the profile has."""
        option, form = self.option(), self.draft.form
        if option is not None and form is not None:
            form.reset(option.key)
            self.draft.planned = None
            self.host.form_changed()

    def suggested_changes(self) -> dict[str, str]:
        """What a greyed option needs."""
        option, form = self.option(), self.draft.form
        return {} if option is None or form is None else form.suggested_fix(option.key)


def shown_value(form: Form, option: Option, is_greyed: bool) -> str:
    """`[x]` or `[ ]`, `< word >`, or the text of a value; dashes where rules forbid the others."""
    from dschat_tui.dashboard.form import choices, value_text
    from engine.config.loading import get_value

    value = get_value(form.config, option.key)
    if isinstance(value, bool):
        text = "x" if value else " "
        return f"-{text}- (no)" if is_greyed else f"[{text}]"
    text = value_text(value) or "empty"
    if choices(option.key):
        return f"- {text} -" if is_greyed else f"< {text} >"
    return text


def option_detail(
    form: Form, option: Option, effect: str, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """Key, default and what the option does; then what a rule says, and what it costs."""
    from dschat_tui.dashboard.form import value_text
    from dschat_tui.text import option_text
    from engine.config.loading import describe_type, get_value

    facts = [describe_type(option.annotation), f"default {option_text(option.default)}"]
    if option.unit:
        facts.insert(1, option.unit)
    if option.key in form.assignments:
        of_profile = value_text(get_value(form.base, option.key)) or "empty"
        facts.append(f"{form.profile} has {of_profile}")
    rows: list[Row] = [[(option.key, "strong"), (f" ({', '.join(facts)})", "muted")]]
    rows += wrapped(f"{option.help}.", width, "text")
    if effect:
        rows += wrapped(effect, width, "muted")
    for value, violation in form.obstacles(option.key)[:2]:
        reason = f"{glyphs.check} not {value_text(value)}: {violation.wrong}: {violation.why}"
        rows += wrapped(clean(reason, glyphs is ASCII), width, "warn")
    if fix := form.suggested_fix(option.key):
        changes = ", ".join(f"{key}={text}" for key, text in fix.items())
        # stays visible: the rule above it can be long
        rows = [*rows[: max(height - 1, 1)], [(f"w sets {changes}", "strong")]]
    return rows
