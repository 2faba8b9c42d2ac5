"""The profiles panel: what can be trained, what each profile needs, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.worker import Worker, WorkerState, get_current_worker

from dschat_tui.dashboard.screens.start.draft import Draft
from dschat_tui.dashboard.screens.start.panel import StartPanel
from dschat_tui.dashboard.screens.start.work import Need, need
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.lines import Items, LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row, wrapped
from dschat_tui.text import ASCII, Glyphs, clean

if TYPE_CHECKING:
    from dschat_tui.profiles import Profile


class ProfileRows(Items["Profile"]):
    """A row for each profile: the chosen one marked, the GiB it needs, whether they are here."""

    def __init__(
        self, profiles: Sequence[Profile], chosen: str, needs: Mapping[str, Need], glyphs: Glyphs
    ) -> None:
        super().__init__(profiles, glyphs)
        self._chosen = chosen
        self._needs = needs

    def row(self, item: Profile, shift: int) -> Row:
        """One profile."""
        mark = ">" if item.name == self._chosen else " "
        needed = self._needs.get(item.name, Need("?", None))
        glyph, style = {
            True: (self.glyphs.done, "good"),
            False: (self.glyphs.failed, "bad"),
            None: (" ", "muted"),
        }[needed.fits]
        size = needed.size if item.config is not None else "bad"
        name = clean(item.name, self.glyphs is ASCII)
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
            needed = draft.needs.get(draft.chosen)
            rows = profile_detail(shown[listed.cursor], needed, *detail.size, self.glyphs)
        detail.show(*rows)

    def narrow(self, text: str) -> None:
        """Show only the profiles that contain a text, and choose among them."""
        super().narrow(text)
        names = [entry.name for entry in self.shown()]
        if names and self.draft.chosen not in names:
            self.host.choose(names[0])

    @work(thread=True, exclusive=True, exit_on_error=False, group="needs")
    def find_needs(self) -> dict[str, Need]:
        """Find out what each profile needs."""
        worker, needs = get_current_worker(), {}
        for entry in self.draft.profiles:
            if worker.is_cancelled:
                break
            if entry.config is not None:
                needs[entry.name] = need(entry.config)
        return needs

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show the needs, or what went wrong."""
        super().on_worker_state_changed(event)
        if event.state == WorkerState.SUCCESS:
            self.draft.needs = event.worker.result or {}
            self.update(self.draft)

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """Choose the profile under the cursor."""
        source = self.lines.source
        if isinstance(source, ProfileRows) and source.items:
            name = source.items[message.index].name
            if name != self.draft.chosen:
                self.host.choose(name)


def profile_detail(
    entry: Profile, needed: Need | None, width: int, height: int, glyphs: Glyphs
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
    if needed is not None:
        fit = "fits" if needed.fits else "too much"
        here = needed.problem or f"Here: {needed.size} GiB, {fit}."
        facts += wrapped(clean(here, is_ascii), width, "muted")
    # the facts stay visible, and the beginning of a long description
    return [*rows[: max(height - len(facts), 1)], *facts]
