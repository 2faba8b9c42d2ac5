"""What the panels of the Start screen have in common."""

from __future__ import annotations

from typing import ClassVar, Protocol, cast

from textual.widget import Widget

from dschat_tui.dashboard.screens.prompt import Prompt
from dschat_tui.dashboard.screens.start.draft import Draft
from dschat_tui.dashboard.screens.tab import Tab
from dschat_tui.dashboard.widgets.lines import LineList


class StartHost(Protocol):
    """What a panel asks of its screen. Calls, not messages: keys typed ahead do not wait."""

    prompt: Prompt

    def choose(self, name: str) -> None:
        """Take another profile."""

    def form_changed(self) -> None:
        """Plan and draw the form again."""

    def action_group(self, index: int) -> None:
        """Show a group of options."""


class StartPanel(Tab[Draft]):
    """A panel of the Start screen: a list, and what belongs to it."""

    is_filterable: ClassVar[bool] = False
    draft: Draft
    # what is typed to filter it
    filtered_by = ""

    @property
    def host(self) -> StartHost:
        """The screen."""
        return cast(StartHost, self.screen)

    @property
    def lines(self) -> LineList:
        """The list."""
        return self if isinstance(self, LineList) else self.query_one(LineList)

    def focus_target(self) -> Widget:
        """The list."""
        return self.lines

    def narrow(self, text: str) -> None:
        """Show only what contains a text."""
        self.filtered_by = text
        self.lines.cursor = 0

    def suggested_changes(self) -> dict[str, str]:
        """Changes that the entry under the cursor needs; none where it needs none."""
        return {}
