"""What the tabs of the run screen have in common."""

from __future__ import annotations

from typing import ClassVar

from textual.message import Message

from dschat_tui.dashboard.screens.run.model import RunModel
from dschat_tui.dashboard.screens.tab import Tab


class RunTab(Tab[RunModel]):
    """A tab of the run screen, which `letter` opens."""

    letter: ClassVar[str]
    is_searchable: ClassVar[bool] = False

    class LineWanted(Message):
        """The line of the log at a byte is to be shown."""

        def __init__(self, offset: int) -> None:
            super().__init__()
            self.offset = offset

    def badge(self, run: RunModel) -> str:
        """A short text after the tab's name; called for every drawing."""
        return ""

    def reset(self) -> None:
        """Forget what was drawn, as the tab is opened or another step is shown."""

    def search(self, text: str) -> None:
        """Go to what contains a text."""
        raise NotImplementedError
