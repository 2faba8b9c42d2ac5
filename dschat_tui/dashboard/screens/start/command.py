"""The command panel: the command that runs the form, and those of its steps."""

from __future__ import annotations

import shlex

from dschat_tui.dashboard.screens.start.draft import Draft
from dschat_tui.dashboard.screens.start.panel import StartPanel
from dschat_tui.dashboard.widgets.lines import LineList, Lines
from dschat_tui.dashboard.widgets.rows import wrapped
from dschat_tui.text import ASCII, clean


class CommandPanel(LineList, StartPanel):
    """The exact commands."""

    tab_name = "command"

    def __init__(self, draft: Draft) -> None:
        super().__init__(id=self.tab_name)
        self.draft = draft

    def update(self, draft: Draft) -> None:
        """List the commands."""
        width = max(self.size.width, self.screen.size.width)
        rows = wrapped(draft.command_text(), width, "strong")
        for command in draft.step_commands:
            rows += wrapped(clean(shlex.join(command), self.glyphs is ASCII), width, "muted")
        self.show(Lines(rows))
