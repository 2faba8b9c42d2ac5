"""The Start screen by its keys, at three sizes, as frames of text; nothing is trained."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual import events
from textual.pilot import Pilot

from dschat_tui import profiles
from dschat_tui.dashboard import keys
from dschat_tui.dashboard.app import Dashboard, screen_text
from dschat_tui.dashboard.screens import charts
from dschat_tui.dashboard.screens.help import Pages
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.screens.runs import RunsScreen
from dschat_tui.dashboard.screens.start import work as start_work
from dschat_tui.dashboard.screens.start.options import OptionList, OptionsPanel
from dschat_tui.dashboard.screens.start.screen import StartScreen
from dschat_tui.dashboard.widgets.rows import Rows, row_text
from dschat_tui.runs import memory_plan, supervisor
from dschat_tui.runs.folder import RunFolder
from engine.config.loading import Option, load_config, load_profile, to_yaml, user_profiles
from engine.config.schema import RunConfig

pytestmark = pytest.mark.usefixtures("patient")

SIZES = [(60, 16), (80, 24), (160, 50)]
Script = Callable[[Pilot[None], StartScreen], Awaitable[None]]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of its own, without runs, and few profiles."""
    monkeypatch.chdir(tmp_path)
    names = profiles.profile_names
    few = ("mine", "smollm2-135m", "tiny")
    monkeypatch.setattr(profiles, "profile_names", lambda: [n for n in names() if n in few])
    return tmp_path


def drive(
    script: Script, size: tuple[int, int] = (80, 24), ascii_only: bool = False, runs: str = "output"
) -> None:
    """Open the dashboard, wait for the profiles and the plan, and follow a script."""

    async def follow() -> None:
        app = Dashboard(runs=Path(runs), ascii_only=ascii_only)
        async with app.run_test(size=size) as pilot:
            screen = app.screen
            assert isinstance(screen, StartScreen)
            await until(
                pilot, lambda: screen.draft.planned is not None and bool(screen.draft.needs)
            )
            await script(pilot, screen)

    asyncio.run(follow())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, screen_text(pilot.app.screen)
        await pilot.pause(0.05)


async def press(pilot: Pilot[None], *pressed: str) -> str:
    """Press keys and give the frame that they lead to, with its plan."""
    await pilot.press(*pressed)
    await pilot.pause()
    screen = pilot.app.screen
    if isinstance(screen, StartScreen) and screen.draft.form is not None:
        await until(pilot, lambda: screen.draft.planned is not None)
    await pilot.pause(0.05)
    return screen_text(pilot.app.screen)


async def go_to(pilot: Pilot[None], screen: StartScreen, key: str) -> str:
    """Put the cursor on an option, by searching for it."""
    if screen.panel.tab_name != "options":
        await press(pilot, "1")
    await press(pilot, "slash", "ctrl+u", *key, "enter")
    names = [option.key for option in shown_options(screen)]
    screen.query_one(OptionsPanel).lines.go_to(names.index(key))
    return await press(pilot)


def shown_options(screen: StartScreen) -> list[Option]:
    return screen.query_one(OptionsPanel).shown()


def words(screen: StartScreen, selector: str) -> str:
    """The text of one widget, however it is broken into rows."""
    rows = screen.query_one(selector, Rows)._rows or []
    return " ".join(" ".join(row_text(row) for row in rows).split())


def config_of(screen: StartScreen) -> RunConfig:
    assert screen.draft.form is not None
    return screen.draft.form.config


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_its_picture(size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        frame = await press(pilot)
        rows = frame.split("\n")
        assert len(rows) == size[1]
        assert max(map(cell_len, rows)) <= size[0]
        assert "new run of tiny → output/tiny" in rows[0]
        assert "s start it" in rows[-1]
        assert "q quit" in rows[-1]
        seen = [frame]
        marks = ("✓ tiny", "ZeRO stage", "3 RLHF", "dschat run --profile tiny")
        if size[0] >= 80:
            assert all(mark in frame for mark in marks)
            return
        # one panel at a time, each reached by tab
        for _ in marks[1:]:
            seen.append(await press(pilot, "tab"))
        for index, mark in enumerate(marks):
            assert [mark in one for one in seen] == [i == index for i in range(len(marks))], mark
        assert marks[0] in await press(pilot, "tab")

    drive(script, size)


@pytest.mark.slow
def test_a_toggle_moves_the_plan_and_the_command() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        await go_to(pilot, screen, "actor.gradient_checkpointing")
        before = memory_plan.make(config_of(screen), None).plan
        await until(pilot, lambda: "GiB in all" in screen.query_one(OptionsPanel).effect)
        frame = await press(pilot, "space")
        assert config_of(screen).actor.gradient_checkpointing
        assert "--set actor.gradient_checkpointing=true" in words(screen, "#command")
        assert "* 1 changed" in frame
        assert "*[x]" in frame
        planned = screen.draft.planned
        assert planned is not None
        assert planned.report is not None
        assert planned.report.plan.node_host_bytes < before.node_host_bytes
        assert [command[-1] for command in planned.commands] == [
            str(screen.draft.output().absolute())
        ] * 3
        await press(pilot, "y")
        assert pilot.app.clipboard == screen.draft.command_text()
        frame = await press(pilot, "backspace")
        assert config_of(screen) == load_profile("tiny")
        assert "changed" not in frame

    drive(script)


def test_what_a_rule_forbids_is_greyed_and_explained() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        frame = await go_to(pilot, screen, "mixz.enabled")
        assert "- - (no)" in frame
        assert "MixZ quantises the frozen" in words(screen, "#option-detail")
        assert "w sets mixz.enabled=true" in frame
        frame = await press(pilot, "space")
        assert not config_of(screen).mixz.enabled
        assert "mixz-needs-zero3-and-lora" in frame
        await press(pilot, "w")
        assert config_of(screen).mixz.enabled
        assert config_of(screen).actor.zero_stage == 3

    drive(script, (160, 50), ascii_only=True)


@pytest.mark.slow
def test_values_are_typed_and_what_is_wrong_with_one_is_said() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        await go_to(pilot, screen, "sft.batch_size")
        await press(pilot, "enter", "ctrl+u", *"many")
        frame = await press(pilot, "enter")
        assert "sft.batch_size = 'many': must be a valid integer" in " ".join(frame.split())
        await press(pilot, "ctrl+u", *"32", "enter")
        assert config_of(screen).sft.batch_size == 32
        # what breaks a rule is told, and mended by a key
        await go_to(pilot, screen, "launch.num_accelerators")
        await press(pilot, "enter", "ctrl+u", "7", "enter")
        frame = await press(pilot, "tab")
        assert "breaks a rule" in frame
        assert "[batch-size-divides]" in frame
        await press(pilot, "w")
        assert config_of(screen).sft.batch_size == 35

    drive(script, (60, 16))


def test_profiles_are_filtered_as_a_text_is_typed() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        await press(pilot, "1", "down", "down", "down", "down", "down", "space")
        changed = dict(screen.draft.form.assignments) if screen.draft.form else {}
        assert changed
        await press(pilot, "shift+tab", "slash", *"smoll")
        assert screen.draft.chosen.startswith("smollm2")
        assert config_of(screen).models.actor == load_profile(screen.draft.chosen).models.actor
        # what was changed stays changed on another profile
        assert screen.draft.form is not None
        assert screen.draft.form.assignments == changed
        await press(pilot, *"xyz")
        assert "none with 'smollxyz'" in screen_text(screen)
        frame = await press(pilot, "escape", "escape")
        assert re.search(r"> *[0-9.]+ . smollm2", frame)
        assert "tiny" in frame

    drive(script)


def test_a_filter_can_be_typed_before_all_profiles_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_typed = threading.Event()
    every = profiles.every
    monkeypatch.setattr(profiles, "every", lambda: every() if is_typed.wait(60) else [])

    async def follow() -> None:
        app = Dashboard()
        async with app.run_test(size=(80, 24)) as pilot:
            screen = app.screen
            assert isinstance(screen, StartScreen)
            await until(pilot, lambda: screen.draft.planned is not None)
            assert "none with 'smoll'" in await press(pilot, "slash", *"smoll", "enter")
            is_typed.set()
            await until(pilot, lambda: screen.draft.chosen == "smollm2-135m")

    asyncio.run(follow())


def test_what_does_not_fit_is_asked_about_and_made_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = memory_plan.make(load_profile("tiny"), 80.0).plan.device_bytes
    monkeypatch.setattr(memory_plan, "gpu_memory", lambda: int(0.97 * needed))

    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        def is_searched() -> bool:
            return screen.draft.planned is not None and screen.draft.planned.is_searched

        await until(pilot, is_searched)
        frame = await press(pilot)
        assert "✗ does not fit" in frame
        assert "the smallest change that fits" in frame
        assert "Start it anyway?" in await press(pilot, "s")
        before = screen.draft.planned
        await press(pilot, "n")
        assert pilot.app.screen is screen
        # it plans anew when it comes back
        await until(pilot, lambda: screen.draft.planned is not before and is_searched())
        assert "✓ fits" in await press(pilot, "w")

    drive(script)


@pytest.mark.slow
def test_a_form_is_saved_as_a_profile() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        await go_to(pilot, screen, "ema.enabled")
        await press(pilot, "space", "v", *"tiny", "enter")
        assert "there is a profile tiny already" in screen_text(screen)
        await press(pilot, "ctrl+u", *"mine", "enter")
        await until(pilot, lambda: screen.draft.form is not None)
        frame = await press(pilot)
        assert "new run of mine → output/mine" in frame or "saved" in frame
        assert screen.draft.form is not None
        assert screen.draft.form.command(Path("x"))[3:] == ["mine", "--output", "x"]
        assert load_profile("mine").ema.enabled

    try:
        drive(script)
    finally:
        (user_profiles() / "mine.yaml").unlink()


@pytest.mark.slow
def test_starting_makes_the_run_that_the_form_says_and_shows_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunFolder] = []
    monkeypatch.setattr(supervisor, "start", started.append)

    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        await go_to(pilot, screen, "ema.enabled")
        await press(pilot, "space", "s")
        await until(pilot, lambda: isinstance(pilot.app.screen, RunScreen))
        [run] = started
        assert run.path == here / "output" / "tiny"
        assert load_config(run.config_file) == config_of(screen)
        state = run.read_state()
        assert state is not None
        assert state["profile"] == "tiny"
        assert list(state["steps"]) == ["sft", "reward", "ppo"]
        await pilot.press("escape")
        await pilot.pause()
        assert pilot.app.screen is screen
        # the next one gets a folder of its own
        assert "output/tiny-2" in await press(pilot)

    drive(script)


@pytest.mark.slow
def test_refusals_are_shown_and_nothing_is_made(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "start", lambda run: pytest.fail("it was started"))

    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        await go_to(pilot, screen, "models.actor")
        await press(pilot, "enter", "ctrl+u", *"./nowhere", "enter", "s")
        await until(pilot, lambda: isinstance(pilot.app.screen, Pages))
        frame = await press(pilot)
        assert "The run cannot start" in frame
        assert "models.actor=./nowhere" in frame
        await press(pilot, "escape")
        assert pilot.app.screen is screen
        assert not (here / "output").exists()

    drive(script, (60, 16))


@pytest.mark.slow
def test_the_data_is_shown_as_the_form_would_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    prints = "import sys; print('row 1 [bold]decoded\\x1b[2J', *sys.argv[1:])"
    monkeypatch.setattr(sys, "executable", str(script_of(prints)))

    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        await go_to(pilot, screen, "sft.max_length")
        await press(pilot, "enter", "ctrl+u", *"48", "enter", "d")
        await until(pilot, lambda: isinstance(pilot.app.screen, Pages))
        shown = await press(pilot)
        told = " ".join(shown.replace("│", " ").split())
        assert "row 1 [bold]decoded -m dschat_tui.cli.main data inspect embedded:facts" in told
        assert "--set sft.max_length=48" in told

    drive(script, (160, 50))


def script_of(code: str) -> Path:
    """A program in place of Python: it runs some code, whatever it is told to run."""
    path = Path("python-of-the-test").absolute()
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(code)} "$@"\n')
    path.chmod(0o755)
    return path


def test_a_command_that_nobody_waits_for_is_ended() -> None:
    sleeps = "import time; print('begun', flush=True); time.sleep(60)"
    begun = time.monotonic()
    lines = start_work.output_of(
        [sys.executable, "-c", sleeps], lambda: time.monotonic() > begun + 1
    )
    assert lines in (["begun"], [])
    assert time.monotonic() < begun + 50


def test_help_has_every_key_of_the_screen_and_the_metrics() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        async def told() -> str:
            await pilot.press("question_mark")
            await pilot.pause()
            shown = pilot.app.screen
            assert isinstance(shown, Pages)
            rows = shown._source.rows(0, shown._source.count, 0)
            await pilot.press("escape")
            await pilot.pause()
            return " ".join(" ".join(row_text(row) for row in rows).split())

        def descriptions(*kinds: type) -> list[str]:
            return [key.description for key in keys.keys_of(kinds)]

        text = await told()
        for kind in (StartScreen, OptionList, Dashboard):
            assert descriptions(kind)
            assert all(description in text for description in descriptions(kind))
        assert not any(key.description in text for key in charts.KEYS[-3:])
        assert "explained variance" in text
        assert "Normally rising towards 1." in text
        assert "predicts worse than a constant" in text
        assert "The KL running away" in text
        await pilot.press("r")
        await pilot.pause()
        assert isinstance(pilot.app.screen, RunsScreen)
        text = await told()
        assert all(description in text for description in descriptions(RunsScreen))
        await pilot.press("n")
        await pilot.pause()
        assert pilot.app.screen is screen

    drive(script, (160, 50))


def test_ascii_draws_with_ascii_alone() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        for _ in range(5):
            assert (await press(pilot, "tab")).isascii()
        assert (await press(pilot, "question_mark")).isascii()

    drive(script, (80, 24), ascii_only=True)


@pytest.mark.parametrize(("seconds_ago", "kind"), [(1.0, RunsScreen), (3600.0, StartScreen)])
def test_the_runs_come_first_while_one_goes_on(here: Path, seconds_ago: float, kind: type) -> None:
    run = RunFolder(here / "output" / "going")
    run.create(to_yaml(RunConfig()), "tiny", [])
    state = run.read_state()
    assert state is not None
    state |= {"state": "running", "updated": time.time() - seconds_ago}
    run.state_file.write_text(json.dumps(state))

    async def look() -> None:
        app = Dashboard()
        async with app.run_test() as pilot:
            await pilot.pause()
            assert isinstance(app.screen, kind)
            await pilot.press("n" if kind is RunsScreen else "r")
            await pilot.pause()
            assert isinstance(app.screen, StartScreen if kind is RunsScreen else RunsScreen)

    asyncio.run(look())


def test_keys_typed_ahead_do_what_they_were_meant_for() -> None:
    async def script(pilot: Pilot[None], screen: StartScreen) -> None:
        # as a terminal sends them that was busy: all before the first has been looked at
        for sign in "1/sequences":
            key = "slash" if sign == "/" else sign
            pilot.app.post_message(events.Key(key, sign))
        pilot.app.post_message(events.Key("enter", "\r"))
        await until(
            pilot, lambda: screen.panel.filtered_by == "sequences" and not screen.prompt.is_open
        )
        assert screen.panel.tab_name == "options"
        assert [option.key for option in shown_options(screen)] == ["ppo.kl_horizon"]
        assert not screen.is_starting
        assert config_of(screen) == load_profile("tiny")

    drive(script)
