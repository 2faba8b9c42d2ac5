"""What the lists of the Start screen show, as rows: profiles, options, and what is behind each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len

from dschat_tui.dashboard.screens.plan import wrapped
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.text import ASCII, Glyphs, clean

if TYPE_CHECKING:
    from dschat_tui.dashboard.form import Form
    from dschat_tui.profiles import Profile
    from engine.config.loading import Option

VALUE_WIDTH = 14


class Need(NamedTuple):
    """What a profile needs of this machine, and whether there is as much; else why none knows."""

    told: str
    fits: bool | None
    problem: str = ""


class Lines:
    """Rows made before, as the source of a list."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self.count = len(rows)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return self._rows[first : first + count]


class ProfileRows:
    """A row a profile: the chosen one marked, the GiB that it needs, whether they are here."""

    def __init__(
        self, entries: Sequence[Profile], chosen: str, needs: Mapping[str, Need], glyphs: Glyphs
    ) -> None:
        self.entries = entries
        self._chosen = chosen
        self._needs = needs
        self._glyphs = glyphs

    @property
    def count(self) -> int:
        """How many profiles there are."""
        return len(self.entries)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [self._row(entry, shift) for entry in self.entries[first : first + count]]

    def _row(self, entry: Profile, shift: int) -> Row:
        mark = ">" if entry.name == self._chosen else " "
        need = self._needs.get(entry.name, Need("?", None))
        sign, style = {
            True: (self._glyphs.done, "good"),
            False: (self._glyphs.failed, "bad"),
            None: (" ", "muted"),
        }[need.fits]
        told = need.told if entry.config is not None else "bad"
        name = clean(entry.name, self._glyphs is ASCII)
        return [(f"{mark}{told:>6} {sign} ", style), (name[shift:], "strong")]


class OptionRows:
    """A row an option: its value, its title, its key; `*` where it was changed."""

    def __init__(self, form: Form, options: Sequence[Option], glyphs: Glyphs) -> None:
        self.options = options
        self._form = form
        self._glyphs = glyphs

    @property
    def count(self) -> int:
        """How many options there are."""
        return len(self.options)

    def rows(self, first: int, count: int, shift: int) -> list[Row]:
        """Rows from `first` on."""
        return [self._row(option, shift) for option in self.options[first : first + count]]

    def _row(self, option: Option, shift: int) -> Row:
        mark = "*" if option.key in self._form.assignments else " "
        is_greyed = self._form.is_greyed(option.key)
        value = clean(shown_value(self._form, option, is_greyed), self._glyphs is ASCII)
        if cell_len(value) > VALUE_WIDTH:
            value = value[: VALUE_WIDTH - 1] + self._glyphs.cut
        style = "muted" if is_greyed else "text"
        owner = option.key.rpartition(".")[0]
        row: Row = [
            (mark, "warn"),
            (f"{value:<{VALUE_WIDTH}} ", style),
            (option.title[shift:], "muted" if is_greyed else "strong"),
        ]
        return [*row, (f" {self._glyphs.dot} {owner}" if owner else "", "muted")]


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
        told = f"{glyphs.check} not {value_text(value)}: {violation.wrong}: {violation.why}"
        rows += wrapped(clean(told, glyphs is ASCII), width, "warn")
    if way := form.suggested_fix(option.key):
        changes = ", ".join(f"{key}={text}" for key, text in way.items())
        # kept in sight: the rule above it can be long
        rows = [*rows[: max(height - 1, 1)], [(f"w sets {changes}", "strong")]]
    return rows


def profile_detail(
    entry: Profile, need: Need | None, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """What a profile is, what it was made for and needs, what it needs here; what is wrong."""
    told = clean(entry.first_sentence or "no description", glyphs is ASCII)
    rows = wrapped(told, width, "text")
    facts: list[Row] = []
    for problem in entry.problems:
        facts += wrapped(clean(problem, glyphs is ASCII), width, "bad")
    if entry.report is not None:
        made_for = f"{entry.models} ({entry.size}): {entry.memory} GiB on {entry.devices}."
        facts += wrapped(clean(made_for, glyphs is ASCII), width, "muted")
    if need is not None:
        fit = "as much as there is or less" if need.fits else "more than there is"
        here = need.problem or f"Here: {need.told} GiB, {fit}."
        facts += wrapped(clean(here, glyphs is ASCII), width, "muted")
    # the facts stay in sight; of a long description its beginning
    return [*rows[: max(height - len(facts), 1)], *facts]
