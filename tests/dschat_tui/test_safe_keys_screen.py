"""Keys that start, stop or delete: no dialog acts on escape, no screen on what is typed into it."""

from __future__ import annotations

import ast
import asyncio
import importlib
import pkgutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from textual import events
from textual.app import App
from textual.pilot import Pilot
from textual.screen import ModalScreen, Screen

import dschat_tui
from dschat_tui import profiles
from dschat_tui.chat.child import Child
from dschat_tui.dashboard import keys, screens
from dschat_tui.dashboard.app import Dashboard, screen_text
from dschat_tui.dashboard.screens.chat import ChatScreen
from dschat_tui.dashboard.screens.help import Pages
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.screens.runs import RunsScreen
from dschat_tui.dashboard.screens.settling import SETTLE_SECONDS, TOO_SOON, Settling
from dschat_tui.dashboard.screens.start.screen import StartScreen
from dschat_tui.logs.source import find_source
from dschat_tui.runs import gates, memory_plan
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.identity import process_identity
from engine.config.loading import load_config, load_profile, to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS

SENTENCE = "do you stop? fix us up, sixty days."

NAMES = {" ": "space", "?": "question_mark", ",": "comma", ".": "full_stop"}


class Clock:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all screens, which stands still."""
    clock = Clock()
    monkeypatch.setattr(Settling, "clock", staticmethod(clock))
    return clock


class World:
    """A folder with one run that has a model, and what was done to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = RunFolder(folder / "output" / "talker")
        state = self.run.create(to_yaml(RunConfig()), "fake", list(STEPS[:3]))
        model = self.run.step_folder(STEPS[0]) / "model"
        model.mkdir(parents=True)
        for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
            (model / file).write_text("{}")
        (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        state["steps"]["sft"] |= {"state": "done", "metrics": {"ppl_after": 3.5}}
        self.run.write_state({**state, "state": "stopped"})
        self.supervisor = subprocess.Popen(["sleep", "600"])
        self.started: list[Path] = []
        self.before: dict[Path, bytes] = {}

    def set(self, **values: object) -> None:
        """Change run.json."""
        self.run.write_state({**(self.run.read_state() or {}), **values})

    def files(self) -> dict[Path, bytes]:
        """All files and what is in them."""
        return {path: path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def assert_untouched(self, app: App[None]) -> None:
        """Nothing was started, stopped, deleted or left."""
        assert self.files() == self.before
        assert self.started == []
        assert self.supervisor.poll() is None
        assert not app._exit


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A stopped run, two profiles, no supervisor that would really start, and mute models."""
    world = World(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(profiles, "profile_names", lambda: ["tiny"])
    monkeypatch.setattr(
        "dschat_tui.runs.supervisor.start", lambda run: world.started.append(run.path)
    )

    async def mute(child: Child) -> int:
        await asyncio.sleep(60)
        return 0

    monkeypatch.setattr(Child, "run", mute)
    yield world
    world.supervisor.kill()
    world.supervisor.wait()


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, screen_text(pilot.app.screen)
        await pilot.pause(0.02)


def goes_on(world: World) -> None:
    supervisor = process_identity(world.supervisor.pid)
    world.set(state="running", supervisor=supervisor, updated=time.time())


def is_paused(world: World) -> None:
    config = load_config(world.run.config_file)
    config.gates.sft_perplexity = 2.0
    world.run.write_config(to_yaml(config))
    world.set(state="paused", gates=gates.missed(config, "sft", {"ppl_after": 3.5}))


def is_as_it_was(world: World) -> None:
    """A run that was stopped."""


async def on_run(pilot: Pilot[None], world: World) -> None:
    pilot.app.push_screen(screen := RunScreen(find_source(world.run.path)))
    await until(pilot, lambda: screen.run.state is not None)


async def on_runs(pilot: Pilot[None], world: World) -> None:
    pilot.app.push_screen(screen := RunsScreen(world.folder / "output"))
    await until(pilot, lambda: bool(screen.runs))


async def on_start(pilot: Pilot[None], world: World) -> None:
    pilot.app.push_screen(screen := StartScreen(world.folder / "output"))

    def is_planned() -> bool:
        planned = screen.draft.planned
        return planned is not None and (planned.is_searched or planned.report.fits)

    await until(pilot, is_planned)


async def after_a_chat(pilot: Pilot[None], world: World) -> None:
    await on_runs(pilot, world)
    await pilot.press("t")
    await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
    await until(pilot, lambda: bool(pilot.app.screen.conversations))
    await pilot.press(*"hello", "enter", "ctrl+d")
    await until(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))


class Asked(NamedTuple):
    """How to come to a dialog: the run's state, the screen, the key; what enter does there."""

    state: Callable[[World], None]
    opened: Callable[[Pilot[None], World], Awaitable[None]]
    key: str
    enter_cancels: bool = True


# by the place in the code where a dialog is made
DIALOGS = {
    "app.action_leave 1": Asked(goes_on, on_run, "q", False),
    "app.action_leave 2": Asked(is_as_it_was, after_a_chat, "q"),
    "resuming._ask 1": Asked(is_paused, on_runs, "u", False),
    "resuming.question_of 1": Asked(is_as_it_was, on_runs, "u"),
    "run.screen.action_stop 1": Asked(goes_on, on_run, "x"),
    "runs.action_stop 1": Asked(goes_on, on_runs, "x"),
    "runs.action_delete 1": Asked(is_as_it_was, on_runs, "d", False),
    "start.screen.action_start 1": Asked(is_as_it_was, on_start, "s"),
}


def dialog_kinds() -> set[str]:
    """The names of all modal screens that give an answer."""
    for module in pkgutil.walk_packages(screens.__path__, f"{screens.__name__}."):
        importlib.import_module(module.name)
    found: list[type] = [ModalScreen]
    for kind in found:
        found += kind.__subclasses__()
    return {
        kind.__name__
        for kind in found
        if kind.__module__.startswith("dschat_tui") and kind is not Pages
    }


def test_every_place_that_makes_a_dialog_is_tried_here() -> None:
    kinds, places = dialog_kinds(), []
    for file in sorted(Path(dschat_tui.__path__[0]).rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
            made = [call for call in calls if getattr(call.func, "id", "") in kinds]
            stem = f"{file.parent.name}.screen" if file.stem == "screen" else file.stem
            names = [f"{stem}.{function.name} {number + 1}" for number in range(len(made))]
            places += names
    assert sorted(places) == sorted(DIALOGS)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("place", DIALOGS)
def test_escape_ctrl_c_and_enter_do_nothing_in_any_dialog(
    place: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = DIALOGS[place]
    asked.state(world)
    if asked.opened is on_start:
        needed = memory_plan.make(load_profile("tiny"), 80.0).plan.device_bytes
        monkeypatch.setattr(memory_plan, "gpu_memory", lambda: int(0.97 * needed))

    async def follow() -> None:
        app = Dashboard(runs=world.folder / "nowhere")
        async with app.run_test(size=(80, 24)) as pilot:
            await asked.opened(pilot, world)
            screen: Screen[None] = app.screen
            world.before = world.files()
            for cancel in ("escape", "ctrl+c", *(["enter"] if asked.enter_cancels else [])):
                await pilot.press(asked.key)
                await until(pilot, lambda: isinstance(app.screen, ModalScreen))
                await pilot.pause(0.05)
                await pilot.press(cancel)
                await until(pilot, lambda: app.screen is screen or app._exit)
                await pilot.pause(0.05)
                world.assert_untouched(app)

    asyncio.run(follow())


SCREENS = {"start": on_start, "run": on_run, "runs": on_runs}


@pytest.mark.parametrize("key", [key for key in keys.KEYS if key.acts], ids=lambda key: key.id)
def test_a_key_that_acts_waits_until_nobody_has_typed_for_a_second(
    key: keys.Key, world: World, clock: Clock
) -> None:
    if key.action == "stop":
        goes_on(world)
    pressed = key.keys.split(",")[0]

    async def follow() -> None:
        app = Dashboard(runs=world.folder / "nowhere")
        async with app.run_test(size=(160, 50)) as pilot:
            await SCREENS[key.scope](pilot, world)
            screen: Screen[None] = app.screen
            world.before = world.files()
            for wait in (0.0, 0.9 * SETTLE_SECONDS, 0.9 * SETTLE_SECONDS):
                clock.now += wait
                await pilot.press("z", pressed)
                await pilot.pause(0.05)
                assert TOO_SOON in screen_text(screen)
                assert app.screen is screen
                world.assert_untouched(app)
            clock.now += SETTLE_SECONDS
            await pilot.press(pressed)
            await until(pilot, lambda: app.screen is not screen or bool(world.started))
            await pilot.pause(0.1)

    asyncio.run(follow())


def test_letters_in_a_question_wait_too(world: World, clock: Clock) -> None:
    goes_on(world)

    async def follow() -> None:
        app = Dashboard(runs=world.folder / "nowhere")
        async with app.run_test(size=(80, 24)) as pilot:
            await on_runs(pilot, world)
            world.before = world.files()
            clock.now += SETTLE_SECONDS
            await pilot.press("x")
            await until(pilot, lambda: isinstance(app.screen, ModalScreen))
            await pilot.press("y")
            clock.now += 0.9 * SETTLE_SECONDS
            await pilot.press("y")
            await pilot.pause(0.05)
            assert TOO_SOON in screen_text(app.screen)
            world.assert_untouched(app)
            clock.now += SETTLE_SECONDS
            await pilot.press("y")
            await until(pilot, lambda: isinstance(app.screen, RunsScreen))

    asyncio.run(follow())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state", "opened"),
    [
        *((state, opened) for state in (goes_on, is_as_it_was) for opened in (on_run, on_runs)),
        (is_as_it_was, on_start),
        (is_as_it_was, after_a_chat),
    ],
)
def test_a_sentence_typed_into_a_screen_that_changed_does_nothing(
    state: Callable[[World], None],
    opened: Callable[[Pilot[None], World], Awaitable[None]],
    world: World,
    clock: Clock,
) -> None:
    state(world)

    async def follow() -> None:
        app = Dashboard(runs=world.folder / "nowhere")
        async with app.run_test(size=(80, 24)) as pilot:
            await opened(pilot, world)
            world.before = world.files()
            for sign in SENTENCE:
                clock.now += 0.3 * SETTLE_SECONDS
                app.post_message(events.Key(NAMES.get(sign, sign), sign))
                await pilot.pause()
            await pilot.press("enter")
            await pilot.pause(0.1)
            world.assert_untouched(app)

    asyncio.run(follow())
