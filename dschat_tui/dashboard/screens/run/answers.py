"""The answers tab: what the actor answered during step 3, sorted, searched, and read in full."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.widget import Widget

from dschat_tui.dashboard.keys import Key, bind
from dschat_tui.dashboard.screens.run.model import Every, RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.lines import Items, LineList, Nothing
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.logs.rollouts import SORTS, Rollouts
from dschat_tui.text import ASCII, Glyphs, clean, short_number

ORDER_SECONDS = 2.0
LONGEST_SNIPPET = 300
COLUMNS = f"{'step':>6} {'reward':>7} {'KL':>7} {'len':>5} end  prompt and answer"


class AnswerRows(Items[int]):
    """Answers by their index in an order, a row for each: numbers, then prompt and answer."""

    def __init__(self, rollouts: Rollouts, order: Sequence[int], glyphs: Glyphs) -> None:
        super().__init__(order, glyphs)
        self.rollouts = rollouts

    def row(self, item: int, shift: int) -> Row:
        """One answer."""
        row = self.rollouts.row(item)
        prompt, answer = (self._line(text) for text in self.rollouts.text(row.offset))
        numbers = (
            f"{row.step:>6} {short_number(row.reward):>7} {short_number(row.kl):>7} {row.length:>5}"
            f" {'end' if row.ended else 'cut'}  "
        )
        text = f"{prompt} {self.glyphs.arrow} {answer}"[shift:]
        return [(numbers, "strong" if row.ended else "warn"), (text, "text")]

    def _line(self, text: str) -> str:
        short = " ".join(text[:LONGEST_SNIPPET].split())
        return clean(short, self.glyphs is ASCII)


class AnswersTab(Container, RunTab):
    """The answers in an order, and the one under the cursor in full."""

    tab_name = "answers"
    letter = "a"
    is_searchable = True
    BINDINGS = bind(
        (Key("answers", "answers.sort", "r", "sort", "sort the answers another way", "r"),)
    )

    def __init__(self) -> None:
        super().__init__(id=self.tab_name)
        self.found: frozenset[int] | None = None
        self._run: RunModel | None = None
        self._searched = ""
        self._sort = 0
        self._drawn: tuple[object, ...] = ()
        self._reorder = Every(ORDER_SECONDS)

    def compose(self) -> ComposeResult:
        """The columns, the list, the answer under the cursor."""
        yield Line(id="answers-head")
        yield LineList(id="answers-list")
        yield Line(id="answer")

    @property
    def _list(self) -> LineList:
        return self.query_one("#answers-list", LineList)

    def focus_target(self) -> Widget:
        """The list."""
        return self._list

    def update(self, run: RunModel) -> None:
        """List the answers; those that came since the last time are sorted in after a while."""
        self._run = run
        rollouts, listed = run.rollouts, self._list
        if not len(rollouts):
            listed.show(Nothing("no answers: PPO writes them into rollouts.jsonl"))
            return
        drawn = (rollouts.version, self._sort, self.found)
        is_same_order = drawn[1:] == self._drawn[1:]
        if drawn == self._drawn or (is_same_order and not self._reorder.is_due()):
            return
        self._drawn = drawn
        order = rollouts.order(SORTS[self._sort], None if self.found is None else set(self.found))
        matches = f", {len(order)} with '{clean(self._searched)}'" if self.found is not None else ""
        head = f"{COLUMNS}   [{SORTS[self._sort]} first{matches}]"
        self.query_one("#answers-head", Line).show([(head, "muted")])
        if not order:
            listed.show(Nothing("no answer holds this text"))
            self.query_one("#answer", Line).show()
            return
        listed.show(AnswerRows(rollouts, order, self.glyphs))
        self._draw_answer()

    def reset(self) -> None:
        """Draw for the size that the tab has now."""
        self._drawn = ()
        self._reorder.reset()

    def _draw_answer(self) -> None:
        listed, line = self._list, self.query_one("#answer", Line)
        if isinstance(listed.source, AnswerRows) and listed.cursor < listed.source.count:
            index = listed.source.items[listed.cursor]
            rollouts = listed.source.rollouts
            line.show(*answer_detail(rollouts, index, line.size.width, self.glyphs))

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """Show the answer under the cursor in full."""
        self._draw_answer()

    def action_sort(self) -> None:
        """Sort the answers another way."""
        self._sort = (self._sort + 1) % len(SORTS)
        self._list.cursor = 0
        self.dashboard.draw()

    def search(self, text: str) -> None:
        """List the answers that contain a text; all for none."""
        self._searched = text
        self._find(text)

    @work(thread=True, exclusive=True, exit_on_error=False, group="search")
    def _find(self, text: str) -> None:
        assert self._run is not None
        found = frozenset(self._run.rollouts.find(text)) if text else None
        self.app.call_from_thread(self._show_found, found)

    def _show_found(self, found: frozenset[int] | None) -> None:
        self.found = found
        self._list.cursor = 0
        self.dashboard.draw()


def answer_detail(rollouts: Rollouts, index: int, width: int, glyphs: Glyphs) -> list[Row]:
    """One answer in full, its text wrapped at a width."""
    row = rollouts.row(index)
    prompt, answer = rollouts.text(row.offset)
    numbers = (
        f"step {row.step}  reward {short_number(row.reward)}  score {short_number(row.score)}  "
        f"KL {short_number(row.kl)}  {row.length} tokens  "
        f"{'ended by itself' if row.ended else 'cut off'}"
    )
    rows: list[Row] = [[(numbers, "strong")]]
    for text, style in ((prompt, "muted"), (answer, "text")):
        for line in text.strip().split("\n"):
            wrapped = textwrap.wrap(clean(line, glyphs is ASCII), max(width, 10))
            rows += [[(part, style)] for part in wrapped]
    return rows
