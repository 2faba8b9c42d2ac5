"""The runs of a folder, newest first: open, compare, stop, resume, delete."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from textual import work
from textual.app import ComposeResult
from textual.worker import Worker, WorkerState

from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.dialogs import Choice, Entry, Question
from dschat_tui.dashboard.screens.resuming import ResumingScreen
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.lines import Items, LineList, Nothing
from dschat_tui.dashboard.widgets.rows import SERIES_STYLES, Row
from dschat_tui.dashboard.widgets.stepper import STATE_STYLES, state_glyph
from dschat_tui.logs.source import find_source
from dschat_tui.text import ASCII, Glyphs, clean

if TYPE_CHECKING:
    from dschat_tui.runs.history import PastRun

REFRESH_SECONDS = 2.0
NAME_CELLS, STANDING_CELLS, STEPS_CELLS, WHEN_CELLS = 20, 10, 4, 12
WIDTH_FOR_WHEN = 80
# of a run's name, to delete it
FEWEST_LETTERS = 3
FEWEST_COMPARED, MOST_COMPARED = 2, SERIES_STYLES


class RunRows(Items["PastRun"]):
    """A row per run: a mark, its name, state and steps, when it changed, its result."""

    def __init__(
        self, runs: Sequence[PastRun], marked: Collection[Path], width: int, glyphs: Glyphs
    ) -> None:
        super().__init__(runs, glyphs)
        self._marked = marked
        self._with_time = width >= WIDTH_FOR_WHEN

    @property
    def head(self) -> Row:
        """The titles of the columns."""
        when = f"{'changed':<{WHEN_CELLS}}" if self._with_time else ""
        text = (
            f"  {'run':<{NAME_CELLS}} {'state':<{STANDING_CELLS}}{'123':<{STEPS_CELLS}}{when}result"
        )
        return [(text, "muted")]

    def row(self, item: PastRun, shift: int) -> Row:
        """One run."""
        glyphs, is_ascii = self.glyphs, self.glyphs is ASCII
        mark = "* " if item.path in self._marked else "  "
        name = clean(item.path.name, is_ascii)
        if len(name) > NAME_CELLS:
            name = name[: NAME_CELLS - 1] + glyphs.cut
        standing = clean(item.standing, is_ascii)
        steps = "".join(state_glyph(state, glyphs) for state in item.steps)
        when = ""
        if self._with_time and item.updated is not None:
            when = time.strftime("%m-%d %H:%M", time.localtime(item.updated))
        return [
            (mark, "warn"),
            (set_cell_size(name, NAME_CELLS) + " ", "strong"),
            (f"{standing:<{STANDING_CELLS}}", STATE_STYLES.get(item.standing, "warn")),
            (f"{steps:<{STEPS_CELLS}}", "text"),
            (f"{when:<{WHEN_CELLS}}" if self._with_time else "", "muted"),
            (clean(item.result, is_ascii)[shift:], "text"),
        ]


class RunsScreen(ResumingScreen):
    """The list of runs, and the one under the cursor in detail."""

    CSS_PATH = "runs.tcss"
    BINDINGS = keys.bindings("runs")
    VERTICAL_BREAKPOINTS = [(0, "-short"), (22, "-tall")]  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.runs: list[PastRun] = []
        self.marked: set[Path] = set()
        self._is_reading = False

    @property
    def chosen(self) -> PastRun | None:
        """The run under the cursor."""
        cursor = self.query_one("#runs", LineList).cursor
        return self.runs[cursor] if cursor < len(self.runs) else None

    def compose(self) -> ComposeResult:
        """A title, the list, the run under the cursor, the keys."""
        yield Line(id="runs-title")
        yield Line(id="runs-head")
        yield LineList(id="runs")
        yield Line(id="runs-details")
        yield Line(id="runs-keys")

    def on_mount(self) -> None:
        """Read the folder now and every two seconds."""
        self.query_one("#runs", LineList).show(Nothing("reading"))
        self.query_one("#runs", LineList).focus()
        self.set_interval(REFRESH_SECONDS, self.read)
        self.call_after_refresh(self.read)

    def on_screen_resume(self) -> None:
        """Read the folder when this screen comes back."""
        self.call_after_refresh(self.read)

    def read(self) -> None:
        """Read the folder, unless it is being read."""
        if not self._is_reading and self.is_current:
            self._is_reading = True
            self._read_folder()

    @work(thread=True, exit_on_error=False, group="runs")
    def _read_folder(self) -> None:
        from dschat_tui.runs.history import history

        try:
            runs = history(self.folder)
        finally:
            self._is_reading = False
        self.app.call_from_thread(self.show_runs, runs)

    def on_worker_state_changed(self, event: Worker.StateChanged) -> None:
        """Show what went wrong in a worker."""
        if event.state == WorkerState.ERROR:
            self.show_message(f"{event.worker.name}: {event.worker.error!r}")

    def show_runs(self, runs: list[PastRun]) -> None:
        """Show these runs, the cursor on the run that it was on."""
        listed, before = self.query_one("#runs", LineList), self.chosen
        self.runs = runs
        self.marked &= {run.path for run in runs}
        paths = [run.path for run in runs]
        if before is not None and before.path in paths:
            listed.cursor = paths.index(before.path)
        self.draw()

    def draw(self) -> None:
        """Draw what has changed."""
        if not self.can_draw:
            return
        is_ascii = self.ascii_only
        folder, room = clean(str(self.folder), is_ascii), self.size.width // 3
        if len(folder) > room:
            folder = self.glyphs.cut + folder[-room:]
        title: Row = [(f" runs in {folder}", "strong")]
        if self.message:
            title.append((f"  {self.message}", "warn"))
        if self.marked:
            title.append((f"  {len(self.marked)} marked", "text"))
        self.query_one("#runs-title", Line).show(title)
        rows = RunRows(self.runs, self.marked, self.size.width, self.glyphs)
        self.query_one("#runs-head", Line).show(rows.head)
        listed = self.query_one("#runs", LineList)
        none = f"no runs in {self.folder.absolute()}; `dschat run` makes one"
        listed.show(rows if self.runs else Nothing(clean(none, is_ascii)))
        self._draw_details()
        self.query_one("#runs-keys", Line).show(self.key_hints(type(self.app)))

    def _draw_details(self) -> None:
        is_ascii, run = self.ascii_only, self.chosen
        lines = [] if run is None else _description(run).split("\n")
        shown: list[Row] = [[(clean(line, is_ascii), "text")] for line in lines]
        self.query_one("#runs-details", Line).show(*shown)

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        """Show the run under the cursor in detail."""
        self._draw_details()

    def on_line_list_picked(self, message: LineList.Picked) -> None:
        """Open the run under the cursor."""
        self.action_open()

    def action_open(self) -> None:
        """Open a run; leaving it again does not end one that is running."""
        run = self.chosen
        if run is not None:
            self.app.open_run(find_source(run.path))  # type: ignore[attr-defined]

    def action_back(self) -> None:
        """Back to the screen before."""
        self.leave()

    def action_mark(self) -> None:
        """Mark the run to be compared, or take the mark away; then the next row."""
        run = self.chosen
        if run is not None:
            self.marked ^= {run.path}
            self.hide_message()
            self.query_one("#runs", LineList).action_line(1)
            self.draw()

    def action_compare(self) -> None:
        """Compare the marked runs; a single one with that under the cursor."""
        run = self.chosen
        wanted = set(self.marked)
        if len(wanted) == 1 and run is not None:
            wanted.add(run.path)
        if not FEWEST_COMPARED <= len(wanted) <= MOST_COMPARED:
            self.show_message(f"mark {FEWEST_COMPARED} to {MOST_COMPARED} runs with m, then c")
            return
        from dschat_tui.dashboard.screens.compare import CompareScreen

        # oldest first: the others are compared with that one
        paths = [run.path for run in reversed(self.runs) if run.path in wanted]
        self.app.push_screen(CompareScreen(paths))

    def action_chat(self) -> None:
        """Chat with the models of the run."""
        run = self.chosen
        if run is not None and not self.app.open_chat(run.path):  # type: ignore[attr-defined]
            self.show_message(f"{run.path.name} has no model to chat with yet")

    def action_stop(self) -> None:
        """Ask whether to stop the run, or, if it is stopping already, whether to end it now."""
        run = self.chosen
        if run is None:
            return
        if not run.goes_on:
            self.show_message(f"nothing to stop: {run.path.name} is not running")
            return
        lines = [f"Stop {clean(run.path.name, self.ascii_only)}?"]
        lines.append("It saves a checkpoint first; x again stops it without one.")
        if run.is_stopping:
            lines[1] = "It is stopping already. This ends it without a checkpoint."
        question = Question(lines, [Choice("y", "stop it", "stop")], ("n", "leave it"))

        def answered(answer: str | None) -> None:
            if answer:
                self._stop(run)

        self.app.push_screen(question, answered)

    @work(thread=True, exit_on_error=False, group="stop")
    def _stop(self, past: PastRun) -> None:
        from dschat_tui.runs import control, stopping
        from dschat_tui.runs.folder import RunFolder
        from dschat_tui.runs.state import unknown_run_state

        run = RunFolder(past.path)
        try:
            control.ask_to_stop(run)
        except (control.NotRunning, OSError) as error:
            self.app.call_from_thread(self.show_message, str(error))
            return
        state = run.read_state() or unknown_run_state()
        text = stopping.stopping_text(state, 2 if past.is_stopping else 1, "x")
        self.app.call_from_thread(self.show_message, f"{past.path.name}: {text}")
        self.app.call_from_thread(self.read)

    def action_resume(self) -> None:
        """Show how the run would be resumed, and resume it after a key."""
        if self.chosen is not None:
            self.resume(self.chosen.path)

    def has_resumed(self, path: Path) -> None:
        """Say so, and read the folder."""
        self.show_message(f"{path.name} was resumed")
        self.read()

    def action_delete(self) -> None:
        """Ask for the run's name, then remove it."""
        run = self.chosen
        if run is None:
            return
        if run.goes_on:
            self.show_message(f"{run.path.name} is running; stop it first")
            return
        name = run.path.name
        fewest = min(FEWEST_LETTERS, len(name))

        def problem(typed: str) -> str:
            if len(typed) >= fewest and name.startswith(typed):
                return ""
            return f"That is not the run's name, nor its first {fewest} letters or more."

        entry = Entry(
            [
                f"Delete {clean(str(run.path), self.ascii_only)}",
                "with its models and checkpoints?",
                f"Then type its name, {clean(name, self.ascii_only)}, or its beginning.",
            ],
            "the name of the run",
            "delete it",
            "keep it",
            problem,
        )

        def answered(typed: str | None) -> None:
            if typed:
                self._delete(run.path)

        self.app.push_screen(entry, answered)

    @work(thread=True, exit_on_error=False, group="delete")
    def _delete(self, path: Path) -> None:
        from dschat_tui.runs import control
        from dschat_tui.runs.folder import RunFolder, RunIsHeld

        try:
            kept = control.delete(RunFolder(path))
        except (control.NotDeletable, OSError, RunIsHeld) as error:
            self.app.call_from_thread(self.show_message, f"not deleted: {error}")
            return
        self.app.call_from_thread(self.app.end_chat, path)  # type: ignore[attr-defined]
        text = f"deleted {path.name}" + (f"; kept {', '.join(kept)}" if kept else "")
        self.app.call_from_thread(self.show_message, text)
        self.app.call_from_thread(self.read)


def _description(run: PastRun) -> str:
    # here, not above: loads the configuration, and the first picture comes first
    from dschat_tui.run_text import describe_run

    return describe_run(run.described)
