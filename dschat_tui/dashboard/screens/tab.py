"""What tabs and panels have in common: a name, their keys, and how they show a model."""

from __future__ import annotations

from typing import ClassVar, Generic, TypeVar, cast

from textual.widget import Widget
from textual.worker import Worker, WorkerState

from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.widgets.rows import glyphs_of
from dschat_tui.text import Glyphs

Model = TypeVar("Model")


class Tab(Widget, Generic[Model]):
    """A part of a screen that is shown under a name.

    Its keys are its BINDINGS: they work while the focus is in it. Textual takes the styles of the
    first base alone, so a subclass names the widget that it extends before this class.
    """

    tab_name: ClassVar[str]

    @property
    def dashboard(self) -> DashboardScreen:
        """The screen that it lies on."""
        return cast(DashboardScreen, self.screen)

    @property
    def glyphs(self) -> Glyphs:
        """The characters to draw with."""
        return glyphs_of(self.app)

    def update(self, model: Model) -> None:
        """Show a model; called for every drawing while the tab is visible."""
        raise NotImplementedError

    def focus_target(self) -> Widget | None:
        """What gets the focus when the tab is opened."""
        return self if self.can_focus else None

    def show_message(self, text: str) -> None:
        """Show a text on the screen for some seconds."""
        self.dashboard.show_message(text)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """As a screen does."""
        return self.dashboard.may_act(type(self), action)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show what went wrong in a worker."""
        if event.state == WorkerState.ERROR:
            self.show_message(f"{event.worker.name}: {event.worker.error!r}")
