"""`dschat-tui`: the Textual app, its terminal, its signals."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from textual import events
from textual.app import App
from textual.screen import Screen

from dschat_tui import hangup
from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.screens.dialogs import Choice, Question
from dschat_tui.dashboard.screens.help import PAGES_WIDTH, Pages, help_rows
from dschat_tui.dashboard.screens.run.header import LOST_SECONDS
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.widgets.lines import Lines
from dschat_tui.dashboard.widgets.rows import row_text
from dschat_tui.logs.source import Source, SourceError, find_source
from dschat_tui.runs.state import RUNNING, read_run_state, unknown_run_state
from dschat_tui.text import clean

if TYPE_CHECKING:
    from dschat_tui.dashboard.screens.chat import ChatScreen

EXIT_REFUSED = 2
LEAVING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# a chat's process gets two of these to end
LEAVE_SECONDS = 5.0
ONCE_SECONDS = 120.0
ONCE_POLL_SECONDS = 0.02


class Dashboard(App[None]):
    """Opens on a source; else on the list of runs if one is running, else on a new run."""

    TITLE = "dschat"
    BINDINGS = keys.bindings("app")
    ENABLE_COMMAND_PALETTE = False
    # what is not known here stays as the terminal has it
    CSS = """
    Screen { scrollbar-size: 0 0; }
    """

    def __init__(
        self,
        source: Source | None = None,
        runs: Path | None = None,
        ascii_only: bool = False,
        speed: float | None = None,
        leads_to: str = "",
        sweep: Path | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self.sweep_folder = sweep
        self.runs_folder = runs or Path("output")
        self.speed = speed
        # what comes once the app is left
        self.leads_to = leads_to
        self.set_class(ascii_only, "-ascii")
        self._chats: dict[Path, ChatScreen] = {}
        self._running_loop: asyncio.AbstractEventLoop | None = None

    def on_mount(self) -> None:
        """Open the first screen."""
        self._running_loop = asyncio.get_running_loop()
        if self.sweep_folder is not None:
            self.open_sweep(self.sweep_folder)
        elif self.source is not None:
            self.open_run(self.source)
        elif has_running_run(self.runs_folder):
            self.action_show_runs()
        else:
            self.action_show_start()

    def leave_by_signal(self, number: int, frame: FrameType | None) -> None:
        """Exit with the code that shells give for a signal, also where the app is stuck."""
        code = 128 + number
        if self._running_loop is None:
            hangup.end(code)
            return
        hangup.end_after(LEAVE_SECONDS, code)
        self._running_loop.call_soon_threadsafe(self.exit, None, code)

    def open_run(self, source: Source) -> None:
        """Show a run or a log."""
        self.push_screen(RunScreen(source, self.speed))

    def open_sweep(self, folder: Path) -> None:
        """Show a sweep, whose cells open as runs."""
        from dschat_tui.dashboard.screens.sweep import SweepScreen

        self.push_screen(SweepScreen(folder))

    def open_chat(self, run: Path) -> bool:
        """Chat with the models of a run, or return to that chat; False if it has none yet."""
        from dschat_tui.chat.paths import relatives
        from dschat_tui.dashboard.screens.chat import ChatScreen

        models = relatives(run)
        models.pop("reward", None)
        if not models:
            return False
        chat = self._chats.get(run)
        if chat is None or not chat.is_alive:
            self.end_chat(run)
            chat = self._chats[run] = ChatScreen(models)
            # an installed screen lives on when it is left
            self.install_screen(chat, f"chat {run}")
        chat.offer(models)
        self.push_screen(chat)
        return True

    def end_chat(self, run: Path) -> None:
        """End a chat that was kept, and its processes."""
        chat = self._chats.pop(run, None)
        if chat is not None and self.is_screen_installed(chat):
            self.uninstall_screen(chat)
            chat.remove()

    def on_key(self, event: events.Key) -> None:
        """Put a letter that was typed before its prompt had the focus into the prompt."""
        screen = self.screen
        if (
            isinstance(screen, DashboardScreen)
            and event.is_printable
            and screen.take_typed(event.character or "")
        ):
            event.prevent_default()

    def action_show_start(self) -> None:
        """Go to the form of a new run."""
        # here and below, not above: the first picture of another screen does not wait for it
        from dschat_tui.dashboard.screens.start.screen import StartScreen

        if not self._go_back_to(StartScreen):
            self.push_screen(StartScreen(self.runs_folder))

    def action_show_runs(self) -> None:
        """Go to the list of runs."""
        from dschat_tui.dashboard.screens.runs import RunsScreen

        if not self._go_back_to(RunsScreen):
            self.push_screen(RunsScreen(self.runs_folder))

    def _go_back_to(self, kind: type[Screen[Any]]) -> bool:
        """Close the screens above one of a kind; False if there is none."""
        if not any(isinstance(screen, kind) for screen in self.screen_stack):
            return False
        while not isinstance(self.screen, kind):
            self.pop_screen()
        return True

    def action_help(self) -> None:
        """Show the keys of this screen and the meaning of metrics."""
        screen = self.screen
        kinds = [type(node) for node in (screen, *screen.query("*"), self)]
        metrics = screen.run.log.series if isinstance(screen, RunScreen) else ()
        width = min(screen.size.width, PAGES_WIDTH) - 4
        rows = help_rows(keys.keys_of(kinds), metrics, width)
        self.push_screen(Pages("Help", Lines(rows)))

    def action_leave(self) -> None:
        """Quit; with a running run or a kept chat, ask what to do with it."""
        screen = self.screen
        ends = [
            f"This ends the chat with {clean(run.name, self.has_class('-ascii'))}."
            for run, chat in self._chats.items()
            if chat.is_alive and chat.has_begun
        ]
        if not isinstance(screen, RunScreen) or not screen.run.is_running:
            if ends:
                quitting = Question(ends, [Choice("y", "quit", "quit")], ("n", "stay"))
                self.push_screen(quitting, self._leave_answered)
            else:
                self.exit()
            return
        question = Question(
            ["The run is still running. Leave it?", *ends],
            [
                Choice("d", "detach: it keeps running without this screen", "detach", acts=False),
                Choice("s", "stop it, then leave", "stop"),
            ],
            ("c", "cancel"),
            enter="detach",
        )
        self.push_screen(question, self._leave_answered)

    def _leave_answered(self, answer: str | None) -> None:
        if answer == "stop" and isinstance(self.screen, RunScreen):
            self.screen.ask_to_stop()
        if answer:
            self.exit()


def has_running_run(folder: Path) -> bool:
    """Whether a run in a folder is running, by what its supervisor wrote last."""
    for file in folder.glob("*/run.json"):
        state = read_run_state(file) or unknown_run_state()
        if state["state"] == RUNNING and time.time() - state["updated"] < LOST_SECONDS:
            return True
    return False


def has_terminal() -> bool:
    """Whether there is a terminal to draw on (Textual draws on stderr) and to read keys from."""
    dumb = os.environ.get("TERM", "") in ("", "dumb")
    return sys.stdin.isatty() and sys.stderr.isatty() and not dumb


def show(app: Dashboard) -> int:
    """Run the app until it is left, or its terminal is lost; the exit code."""
    hangup.watch_terminal()
    before = {number: signal.signal(number, app.leave_by_signal) for number in LEAVING_SIGNALS}
    try:
        app.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return app.return_code or 0


def screen_text(screen: Screen[Any]) -> str:
    """A screen as lines of text."""
    strips = screen._compositor.render_strips()
    rows = [row_text([(segment.text, "") for segment in strip]) for strip in strips]
    return "\n".join(row.rstrip() for row in rows)


async def one_frame(app: Dashboard, width: int, height: int) -> str:
    """The run screen as text, once all logs have been read; needs no terminal."""
    app.no_color = True
    async with app.run_test(size=(width, height)) as pilot:
        screen = app.screen
        assert isinstance(screen, RunScreen)
        for _ in range(round(ONCE_SECONDS / ONCE_POLL_SECONDS)):
            screen.run.drain()
            if screen.run.has_all or screen.run.problem:
                break
            await asyncio.sleep(ONCE_POLL_SECONDS)
        screen.tick()
        await pilot.pause()
        screen.draw()
        await pilot.pause()
        return screen_text(screen)


def once(app: Dashboard) -> str:
    """One frame, of the size of COLUMNS and LINES or the terminal, else 100 by 30."""
    return asyncio.run(one_frame(app, *shutil.get_terminal_size((100, 30))))


def main() -> None:
    """Entry point of the console script."""
    parser = argparse.ArgumentParser(
        prog="dschat-tui", description="The dashboard: start, watch and compare runs."
    )
    parser.add_argument("path", nargs="?", type=Path, help="a run, a sweep, or a training.log")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII alone")
    arguments = parser.parse_args()
    if not has_terminal():
        print(
            "dschat-tui: there is no terminal here. Use `dschat run` to train, and "
            "`dschat monitor PATH --once` for one frame as text",
            file=sys.stderr,
        )
        sys.exit(EXIT_REFUSED)
    source = None
    is_sweep = arguments.path is not None and (arguments.path / "sweep.json").is_file()
    if arguments.path is not None and not is_sweep:
        try:
            source = find_source(arguments.path)
        except SourceError as error:
            print(f"dschat-tui: {error}", file=sys.stderr)
            sys.exit(EXIT_REFUSED)
    sweep = arguments.path if is_sweep else None
    sys.exit(show(Dashboard(source, ascii_only=arguments.ascii, sweep=sweep)))


if __name__ == "__main__":
    main()
