"""A question over the screen, answered by one key, or by a line of text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from dschat_tui.dashboard.screens.settling import TOO_SOON, Settling
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.rows import Row

if TYPE_CHECKING:
    from textual.widgets import Input

# cells of the box left and right of its text, and rows above and below it
FRAME_CELLS, FRAME_ROWS = 6, 4
# the answer of a person who cancels
CANCELLED = ""


class Choice(NamedTuple):
    """What a question offers: its key, what it does, and the answer that it gives.

    `acts`: it starts, stops or deletes something, as most do.
    """

    key: str
    text: str
    answer: str
    acts: bool = True


class Dialog(Settling, ModalScreen[str]):
    """A box over the screen. Escape and Ctrl-C mean `CANCELLED` in every one."""

    CSS_PATH = "dialogs.tcss"

    def on_key(self, event: events.Key) -> None:
        """Cancel."""
        if event.key in ("escape", "ctrl+c"):
            event.stop()
            self.dismiss(CANCELLED)


class Question(Dialog):
    """Asks for one key.

    Args:
        lines: what is asked.
        choices: the answers besides cancelling.
        cancel: the key to cancel with, and what that means here.
        enter: the answer of the enter key; it cancels unless the question says otherwise.
    """

    def __init__(
        self,
        lines: Sequence[str],
        choices: Sequence[Choice],
        cancel: tuple[str, str],
        enter: str = CANCELLED,
    ) -> None:
        super().__init__()
        self._lines = lines
        self._choices = [*choices, Choice(*cancel, CANCELLED, acts=False)]
        self._enter = enter

    def compose(self) -> ComposeResult:
        """The question in a box."""
        with Vertical(id="question"):
            yield Line(id="question-text")

    def on_mount(self) -> None:
        """Fill and size the box."""
        self._draw("")

    def _draw(self, hint: str) -> None:
        rows: list[Row] = [[]]
        for choice in self._choices:
            others = ["enter"] if choice.answer == self._enter else []
            others += ["esc"] if choice.answer == CANCELLED else []
            row: Row = [(f"[{choice.key}] ", "strong"), (choice.text, "text")]
            rows.append([*row, (f"  {', '.join(others)}", "muted")] if others else row)
        if hint:
            rows.append([(hint, "warn")])
        asked = _broken(self._lines, self.app.size.width - FRAME_CELLS)
        room = self.app.size.height - FRAME_ROWS - len(rows)
        shown: list[Row] = [[(line, "text")] for line in asked[: max(room, 1)]]
        _fill(self, shown + rows, 0)

    def on_key(self, event: events.Key) -> None:
        """Answer."""
        event.stop()
        if event.key == "enter":
            self.dismiss(self._enter)
        for choice in self._choices:
            if event.key == choice.key:
                if choice.acts and not self.is_settled:
                    self._draw(TOO_SOON)
                else:
                    self.dismiss(choice.answer)


class Entry(Dialog):
    """Asks for a line of text.

    Args:
        lines: what is asked.
        placeholder: shown in the empty line.
        enter: what the enter key does.
        cancel: what cancelling means here.
        problem: what is wrong with a text, empty where nothing is; the dialog stays open then.
    """

    def __init__(
        self,
        lines: Sequence[str],
        placeholder: str,
        enter: str,
        cancel: str,
        problem: Callable[[str], str] = lambda text: "",
    ) -> None:
        super().__init__()
        self._lines = lines
        self._placeholder = placeholder
        self._keys = f"enter: {enter}    esc: {cancel}"
        self._problem = problem

    def compose(self) -> ComposeResult:
        """What is asked, and the field, in a box."""
        # here, not above: it takes long to load, and the first picture comes first
        from textual.widgets import Input

        with Vertical(id="question"):
            yield Line(id="question-text")
            yield Input(placeholder=self._placeholder, id="entry", compact=True)

    def on_mount(self) -> None:
        """Fill and size the box."""
        self._draw("")
        self.query_one("#entry").focus()

    def _draw(self, problem: str) -> None:
        width = self.app.size.width - FRAME_CELLS
        rows: list[Row] = [[(line, "text")] for line in _broken(self._lines, width)]
        rows += [[(line, "warn")] for line in _broken([problem], width)]
        rows.append([(self._keys, "muted")])
        _fill(self, rows[-(self.app.size.height - FRAME_ROWS - 1) :], 1)

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Answer, or say what is wrong, once something was typed."""
        text = message.value.strip()
        problem = self._problem(text) if text else ""
        if problem:
            self._draw(problem)
        elif text:
            self.dismiss(text)


def _broken(lines: Sequence[str], width: int) -> list[str]:
    """Lines wrapped at a width; empty ones stay."""
    return [part for line in lines for part in textwrap.wrap(line, max(width, 20)) or [""]]


def _fill(screen: ModalScreen[str], rows: list[Row], more_rows: int) -> None:
    """Show rows in the box of a question, sized for them and for `more_rows`."""
    width = max(sum(len(text) for text, _ in row) for row in rows)
    box, text = screen.query_one("#question"), screen.query_one("#question-text", Line)
    box.styles.width = width + FRAME_CELLS
    box.styles.height = len(rows) + more_rows + FRAME_ROWS
    text.styles.height = len(rows)
    text.show(*rows)
    screen.call_after_refresh(text.show, *rows)
