"""The profiles panel: what can be trained, what each profile needs, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Container

from dschat_tui.dashboard.screens.start.draft import Draft
from dschat_tui.dashboard.screens.start.panel import StartPanel
from dschat_tui.dashboard.screens.start.work import Need
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.lines import LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row, wrapped
from dschat_tui.text import ASCII, Glyphs, clean

if TYPE_CHECKING:
    from dschat_tui.profiles import Profile


class ProfileRows:
    """A row for each profile: the chosen one marked, the GiB it needs, whether they are here."""

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
        glyph, style = {
            True: (self._glyphs.done, "good"),
            False: (self._glyphs.failed, "bad"),
            None: (" ", "muted"),
        }[need.fits]
        size = need.size if entry.config is not None else "bad"
        name = clean(entry.name, self._glyphs is ASCII)
        return [(f"{mark}{size:>6} {glyph} ", style), (name[shift:], "strong")]


class ProfilesPanel(Container, StartPanel):
    """The profiles; the one under the cursor is chosen."""

    tab_name = "profiles"
    is_filterable = True

    def __init__(self, draft: Draft) -> None:
        super().__init__(id="profiles-side")
        self.draft = draft

    def compose(self) -> ComposeResult:
        """The list, and the profile under the cursor."""
        yield LineList(id="profiles")
        yield Line(id="profile-detail")

    def shown(self) -> list[Profile]:
        """The profiles that the filter lets through."""
        text = self.filtered_by.lower()
        return [
            entry
            for entry in self.draft.profiles
            if text in f"{entry.name} {entry.models} {entry.comment}".lower()
        ]

    def update(self, draft: Draft) -> None:
        """List the profiles."""
        if not draft.profiles:
            return
        shown, listed = self.shown(), self.lines
        names = [entry.name for entry in shown]
        if draft.chosen in names:
            listed.cursor = names.index(draft.chosen)
        if shown:
            listed.show(ProfileRows(shown, draft.chosen, draft.needs, self.glyphs))
        else:
            listed.show(Nothing(f"none with '{clean(self.filtered_by)}'"))
        detail = self.query_one("#profile-detail", Line)
        rows: list[Row] = []
        if draft.chosen in names:
            need = draft.needs.get(draft.chosen)
            rows = profile_detail(shown[listed.cursor], need, *detail.size, self.glyphs)
        detail.show(*rows)

    def narrow(self, text: str) -> None:
        """Show only the profiles that contain a text, and choose among them."""
        super().narrow(text)
        names = [entry.name for entry in self.shown()]
        if names and self.draft.chosen not in names:
            self.host.choose(names[0])

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """Choose the profile under the cursor."""
        source = self.lines.source
        if isinstance(source, ProfileRows) and source.entries:
            name = source.entries[message.index].name
            if name != self.draft.chosen:
                self.host.choose(name)


def profile_detail(
    entry: Profile, need: Need | None, width: int, height: int, glyphs: Glyphs
) -> list[Row]:
    """What a profile is, what it was made for and needs, what it needs here; what is wrong."""
    is_ascii = glyphs is ASCII
    rows = wrapped(clean(entry.first_sentence or "no description", is_ascii), width, "text")
    facts: list[Row] = []
    for problem in entry.problems:
        facts += wrapped(clean(problem, is_ascii), width, "bad")
    if entry.report is not None:
        made_for = f"{entry.models} ({entry.size}): {entry.memory} GiB on {entry.devices}."
        facts += wrapped(clean(made_for, is_ascii), width, "muted")
    if need is not None:
        fit = "which this machine has" if need.fits else "more than this machine has"
        here = need.problem or f"Here: {need.size} GiB, {fit}."
        facts += wrapped(clean(here, is_ascii), width, "muted")
    # the facts stay visible, and the beginning of a long description
    return [*rows[: max(height - len(facts), 1)], *facts]
