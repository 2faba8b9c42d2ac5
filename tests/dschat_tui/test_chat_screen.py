"""The chat screen by its keys, over children that speak the events of `dschat chat --json`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from rich.cells import cell_len
from textual import events
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input

from dschat_tui.chat.child import Child, chat_command
from dschat_tui.dashboard.app import Dashboard, screen_text
from dschat_tui.dashboard.screens.chat import ChatScreen
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.screens.runs import RunsScreen
from dschat_tui.dashboard.screens.transcript import Transcript
from dschat_tui.logs.source import find_source
from dschat_tui.runs.folder import RunFolder
from engine.config.loading import to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS

pytestmark = pytest.mark.usefixtures("patient")

FAKE = """
import json, os, signal, sys, time
from pathlib import Path

model = sys.argv[1]
with Path(sys.argv[2]).open("a") as file:
    file.write(f"{os.getpid()}\\n")

def tell(event, **values):
    print(json.dumps({"event": event, **values}), flush=True)

def answer(*pieces, finish="stop"):
    for piece in pieces:
        tell("token", text=piece)
    statistics = {"first_token_seconds": 0.04, "tokens_per_second": 21.5}
    tell("answer", text="".join(pieces), finish=finish, statistics=statistics)

class Interrupted(Exception):
    pass

def interrupt(number, frame):
    raise Interrupted

print(f"Loading {model} from somewhere ...", file=sys.stderr, flush=True)
if "broken" in model:
    print("dschat chat: the weights are damaged [bold]\\x1b[31m", file=sys.stderr)
    sys.exit(2)
if "hanging" in model:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
print("native code talks too", flush=True)
tell("ready", model=model, path="p", context=512, commands=["/help"])
signal.signal(signal.SIGINT, interrupt)
for line in sys.stdin:
    text = json.loads(line)["prompt"]
    if text == "/quit":
        tell("quit")
        break
    elif text == "/compare":
        tell("table", name="compare", rows=[{"model": "base", "answer": "a [b]", "tokens": 2}])
    elif text == "/undo":
        tell("note", text="Taken back: it")
    elif text.startswith("/"):
        tell("error", text=f"There is no command {text}")
    elif text == "nasty":
        answer("\\x1b[2J[red]x[/red]\\u202e", "\\nsecond line")
    elif text == "crash":
        print("out of memory", file=sys.stderr)
        os._exit(3)
    elif text == "forever":
        tell("token", text="for ")
        try:
            while True:
                time.sleep(0.01)
                tell("token", text="ever ")
        except Interrupted:
            tell("answer", text="for ever", finish="interrupted", statistics={})
            tell("note", text="Stopped; what was said so far is kept.")
    else:
        answer(f"{model} says ", f"{text}.")
"""

Script = Callable[[Pilot[None], ChatScreen], Awaitable[None]]


class Fakes:
    """Fake models by folder, and the processes that they became."""

    def __init__(self, folder: Path) -> None:
        self.program = folder / "fake.py"
        self.program.write_text(FAKE)
        self.noted = folder / "pids"

    def command(self, folder: str) -> list[str]:
        """What starts one."""
        return [sys.executable, str(self.program), folder, str(self.noted)]

    @property
    def alive(self) -> list[int]:
        """Those that still run."""
        noted = self.noted.read_text().split() if self.noted.exists() else []
        return [pid for pid in map(int, noted) if _runs(pid)]

    @property
    def started(self) -> int:
        """How many there were."""
        return len(self.noted.read_text().split()) if self.noted.exists() else 0


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def fakes(tmp_path: Path) -> Fakes:
    """None that outlives the test."""
    fakes = Fakes(tmp_path)
    yield fakes
    assert fakes.alive == []


def drive(
    fakes: Fakes,
    script: Script,
    models: tuple[str, ...] = ("actor", "sft", "actor_ema"),
    size: tuple[int, int] = (100, 30),
    ascii_only: bool = False,
) -> None:
    """Open the screen on fake models and follow a script."""

    async def follow() -> None:
        app = App()
        app.set_class(ascii_only, "-ascii")
        async with app.run_test(size=size) as pilot:
            folders = {name: name for name in models}
            screen = ChatScreen(folders, fakes.command)
            app.push_screen(screen)
            await until(pilot, lambda: screen.is_mounted and bool(screen.conversations))
            await script(pilot, screen)

    asyncio.run(follow())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, screen_text(pilot.app.screen)
        await pilot.pause(0.02)


async def shows(pilot: Pilot[None], *texts: str) -> str:
    """Wait until all texts stand on the screen; the frame."""
    await until(pilot, lambda: all(text in screen_text(pilot.app.screen) for text in texts))
    return screen_text(pilot.app.screen)


async def say(pilot: Pilot[None], text: str) -> None:
    """Type a line."""
    pilot.app.screen.query_one(Input).value = text
    await pilot.press("enter")


def test_loading_is_told_and_answers_stream(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "actor", "ready", "512 tokens of context", "to actor:")
        await say(pilot, "hello")
        frame = await shows(pilot, "> hello", "actor says hello.", "21.5 tokens/s", "40 ms")
        assert fakes.started == 1
        assert "native code" not in frame

    drive(fakes, script)


@pytest.mark.parametrize("size", [(60, 16), (100, 30)])
def test_two_models_hear_the_same_or_one_of_them(fakes: Fakes, size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        await pilot.press("ctrl+n")
        await shows(pilot, "sft", "to both:")
        await say(pilot, "hello")
        frame = await shows(pilot, "actor says hello.", "sft says hello.")
        beside = any("actor says" in row and "sft says" in row for row in frame.split("\n"))
        assert beside == (size[0] >= 80)
        await pilot.press("tab", "tab")
        await shows(pilot, "to sft:")
        await say(pilot, "you alone")
        await shows(pilot, "sft says you alone.")
        first, second = (conversation.transcript for conversation in screen.conversations)
        assert first.count < second.count
        await pilot.press("ctrl+n")
        await shows(pilot, "actor_ema")
        assert [each.model for each in screen.conversations] == ["actor", "actor_ema"]
        await pilot.press("ctrl+n")
        await until(pilot, lambda: len(screen.conversations) == 1)
        assert len(fakes.alive) == 1

    drive(fakes, script, size=size)


def test_commands_work_and_answers_are_text(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        for line, told in (
            ("/undo", "Taken back: it"),
            ("/compare", "base  answer a [b]  tokens 2"),
            ("/nothing", "There is no command /nothing"),
            ("nasty", "␛[2J[red]x[/red]"),
        ):
            await say(pilot, line)
            frame = await shows(pilot, told)
        assert "second line" in await shows(pilot, "second line")
        assert "\u202e" not in frame
        await say(pilot, "/quit")
        await until(pilot, lambda: not isinstance(pilot.app.screen, ChatScreen))

    drive(fakes, script)


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
def test_a_key_ends_the_answer_and_never_the_chat(fakes: Fakes, key: str) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        await say(pilot, "forever")
        await shows(pilot, "for ever ever", "answering")
        await pilot.press(key)
        await shows(pilot, "what was said so far is kept", "ready")
        await say(pilot, "again")
        await shows(pilot, "actor says again.")
        await pilot.press(key, *"do", "space", "y", key)
        await shows(pilot, "^d leaves", "to actor: do y")
        assert pilot.app.screen is screen
        assert len(fakes.alive) == 1

    drive(fakes, script)


def test_ctrl_d_leaves_unless_it_deletes_as_in_any_line(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        await pilot.press(*"ab", "home", "ctrl+d")
        assert screen.query_one(Input).value == "b"
        await pilot.press("ctrl+d", "ctrl+d")
        await until(pilot, lambda: not isinstance(pilot.app.screen, ChatScreen))
        await until(pilot, lambda: fakes.alive == [])

    drive(fakes, script)


def test_keys_that_come_in_a_burst_act_in_their_order(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        # the widgets are gone once the screen is left
        transcript = screen.conversations[0].transcript
        for key, sign in (("h", "h"), ("i", "i"), ("enter", None), ("ctrl+d", None)):
            pilot.app.post_message(events.Key(key, sign))
        await until(pilot, lambda: pilot.app.screen is not screen)
        assert "> hi" in [text for row in transcript.rows(0, 9, 0) for text, _ in row]

    drive(fakes, script)


def make_models(run: RunFolder, *folders: str) -> None:
    """Folders that look like models which its steps handed on."""
    for folder in folders:
        model = run.path / folder
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").touch()


@pytest.fixture
def talking_run(tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with an SFT model, for which a fake speaks."""
    run = RunFolder(tmp_path / "run")
    state = run.create(to_yaml(RunConfig()), "fake", list(STEPS[:3]))
    run.write_state({**state, "state": "stopped"})
    make_models(run, "step1-sft/model")
    monkeypatch.setattr(
        "dschat_tui.dashboard.screens.chat.ChatScreen", partial(ChatScreen, command=fakes.command)
    )
    return run


def drive_run(run: RunFolder, script: Callable[[Pilot[None]], Awaitable[None]]) -> None:
    """Open the dashboard on a run, then its chat, say hello there, and follow a script."""

    async def follow() -> None:
        app = Dashboard(find_source(run.path), runs=run.path.parent)
        async with app.run_test(size=(160, 30)) as pilot:
            await until(pilot, lambda: isinstance(app.screen, RunScreen))
            await pilot.press("t")
            await shows(pilot, "to sft:", "ready")
            await say(pilot, "hello")
            await shows(pilot, "says hello.")
            await script(pilot)

    asyncio.run(follow())


def test_a_chat_that_is_left_is_kept_and_hears_of_new_models(
    talking_run: RunFolder, fakes: Fakes
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+d")
        await shows(pilot, "the chat is kept")
        assert isinstance(pilot.app.screen, RunScreen)
        assert len(fakes.alive) == 1
        make_models(talking_run, "step3-rlhf/actor")
        await pilot.press("t")
        await shows(pilot, "> hello", "says hello.")
        await say(pilot, "more")
        await shows(pilot, "says more.")
        assert fakes.started == 1
        await pilot.press("ctrl+n")
        await shows(pilot, "chat with sft and actor")

    drive_run(talking_run, script)
    assert fakes.alive == []


def test_leaving_the_dashboard_ends_a_chat_that_was_kept(
    talking_run: RunFolder, fakes: Fakes
) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+d")
        await shows(pilot, "the chat is kept")
        await pilot.press("q")
        await shows(pilot, "This ends the chat with run.", "[y] quit")
        await pilot.press("n", "q", "y")
        await until(pilot, lambda: pilot.app._exit)

    drive_run(talking_run, script)
    assert fakes.alive == []


def test_a_chat_that_was_ended_begins_anew(talking_run: RunFolder, fakes: Fakes) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await say(pilot, "/quit")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        await until(pilot, lambda: fakes.alive == [])
        await pilot.press("t")
        await until(pilot, lambda: fakes.started == 2)
        assert "hello" not in await shows(pilot, "to sft:", "ready")
        await say(pilot, "crash")
        await shows(pilot, "exit code 3")
        await pilot.press("ctrl+d")
        await pilot.press("t")
        await until(pilot, lambda: fakes.started == 3)
        await shows(pilot, "to sft:", "ready")

    drive_run(talking_run, script)
    assert fakes.alive == []


def test_deleting_a_run_ends_its_chat(talking_run: RunFolder, fakes: Fakes) -> None:
    async def script(pilot: Pilot[None]) -> None:
        await pilot.press("ctrl+d")
        pilot.app.action_show_runs()
        await shows(pilot, "runs in", "d delete")
        await until(pilot, lambda: bool(getattr(pilot.app.screen, "runs", None)))
        await pilot.press("d", *"run", "enter")
        await until(pilot, lambda: not talking_run.path.exists())
        await until(pilot, lambda: fakes.alive == [])

    drive_run(talking_run, script)


def test_a_model_that_fails_says_why_and_the_other_goes_on(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        await pilot.press("ctrl+n")
        await shows(pilot, "sft", "failed", "exit code 2", "the weights are damaged [bold]")
        await say(pilot, "hello")
        await shows(pilot, "actor says hello.")
        await say(pilot, "crash")
        await shows(pilot, "exit code 3", "out of memory")

    models = {"actor": "actor", "sft": "broken"}

    async def follow() -> None:
        app = App()
        async with app.run_test(size=(160, 30)) as pilot:
            screen = ChatScreen(models, fakes.command)
            app.push_screen(screen)
            await until(pilot, lambda: screen.is_mounted)
            await script(pilot, screen)

    asyncio.run(follow())


def test_a_program_that_cannot_start_is_told(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "failed", "cannot start /nowhere/python")

    fakes.command = lambda folder: ["/nowhere/python"]
    drive(fakes, script, ("sft",))


@pytest.mark.slow
def test_leaving_the_dashboard_ends_also_what_does_not_listen(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "loading", "Loading hanging from somewhere")
        assert len(fakes.alive) == 1

    async def follow() -> None:
        app = App()
        async with app.run_test(size=(100, 30)) as pilot:
            app.push_screen(ChatScreen({"sft": "hanging"}, fakes.command))
            await until(pilot, lambda: isinstance(app.screen, ChatScreen))
            await script(pilot, app.screen)

    asyncio.run(follow())
    assert fakes.alive == []


def test_long_conversations_scroll_and_come_back_to_the_end(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        for number in range(12):
            await say(pilot, f"question {number}")
        await shows(pilot, "actor says question 11.")
        await pilot.press(*["pageup"] * 4)
        frame = await shows(pilot, "> question 0")
        assert "question 11." not in frame
        await pilot.press(*["pagedown"] * 4)
        await shows(pilot, "question 11.")

    drive(fakes, script, size=(80, 16))


def test_ascii_alone(fakes: Fakes) -> None:
    async def script(pilot: Pilot[None], screen: ChatScreen) -> None:
        await shows(pilot, "ready")
        await say(pilot, "Grüße")
        assert (await shows(pilot, "actor says Gr??e.")).isascii()

    drive(fakes, script, ascii_only=True)


def test_rows_break_between_words_and_by_cells() -> None:
    transcript = Transcript("actor")
    transcript.lay_out(20)
    transcript.apply({"event": "ready", "context": 8})
    for piece in ("one two three ", "four five six seven ", "世界" * 15):
        transcript.apply({"event": "token", "text": piece})
    texts = [text for row in transcript.rows(0, 99, 0) for text, _ in row]
    assert texts[:2] == ["one two three four", "five six seven"]
    assert "".join(texts[2:]) == "世界" * 15
    assert all(cell_len(text) <= 20 for text in texts)
    transcript.lay_out(40)
    assert transcript.count < len(texts)


def test_a_run_opens_it_from_both_screens_once_there_is_a_model(tmp_path, monkeypatch) -> None:
    opened: list[Child] = []
    monkeypatch.setattr(Child, "run", lambda self: _note(opened, self))
    run = RunFolder(tmp_path / "run")
    run.create(to_yaml(RunConfig()), "fake", list(STEPS[:3]))

    async def follow() -> None:
        app = Dashboard(find_source(run.path), runs=tmp_path)
        async with app.run_test(size=(160, 30)) as pilot:
            await until(pilot, lambda: isinstance(app.screen, RunScreen))
            await pilot.press("t")
            await shows(pilot, "no model to chat with yet")
            model = run.path / "step1-sft" / "model"
            make_models(run, "step1-sft/model")
            await pilot.press("t")
            await until(pilot, lambda: isinstance(app.screen, ChatScreen) and bool(opened))
            await pilot.press("ctrl+d")
            await until(pilot, lambda: isinstance(app.screen, RunScreen))
            runs = RunsScreen(tmp_path)
            app.push_screen(runs)
            await until(pilot, lambda: bool(runs.runs))
            await pilot.press("t")
            await until(pilot, lambda: isinstance(app.screen, ChatScreen))
            # the same chat
            assert [child.command for child in opened] == [chat_command(str(model))]

    asyncio.run(follow())


async def _note(opened: list[Child], child: Child) -> int:
    opened.append(child)
    await asyncio.sleep(30)
    return 0


@pytest.mark.slow
def test_a_real_model_answers_on_the_screen() -> None:
    async def follow() -> None:
        app = App()
        async with app.run_test(size=(100, 30)) as pilot:
            app.push_screen(ChatScreen({"sft": "embedded:tiny-llama"}))
            await until(pilot, lambda: isinstance(app.screen, ChatScreen))
            await shows(pilot, "loading")
            await say(pilot, "/set max_new_tokens 8")
            await say(pilot, "What is the capital of France?")
            await say(pilot, "/stats")
            await shows(pilot, "max_new_tokens is 8 now", "tokens/s", "kept in cache")

    asyncio.run(follow())
