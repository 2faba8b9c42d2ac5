"""The list of runs and their comparison by their keys, at three sizes, as frames of text."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot
from textual.screen import Screen

from dschat_tui.dashboard.app import Dashboard, screen_text
from dschat_tui.dashboard.screens.compare import CompareScreen
from dschat_tui.dashboard.screens.dialogs import Entry, Question
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.screens.runs import RunsScreen
from dschat_tui.dashboard.widgets.chart import View, plot
from dschat_tui.dashboard.widgets.rows import row_text
from dschat_tui.logs.series import Series
from dschat_tui.logs.source import find_source
from dschat_tui.runs import gates
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.history import compare, differing_options, history
from dschat_tui.runs.identity import process_identity
from engine.config.loading import load_config, to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS
from engine.log import write

pytestmark = pytest.mark.usefixtures("patient")

SIZES = [(60, 16), (80, 24), (160, 50)]
SFT = STEPS[0]
METRICS = {"sft": {"ppl_before": 900.0, "ppl_after": 3.5}, "reward": {"accuracy": 0.875}}


def make_run(folder: Path, name: str, config: RunConfig | None = None) -> RunFolder:
    """A run of three steps whose first two are done, with a log of the first."""
    run = RunFolder(folder / name)
    state = run.create(to_yaml(config or RunConfig()), "fake", list(STEPS[:3]))
    for step in STEPS[:2]:
        model = run.step_folder(step) / "model"
        model.mkdir(parents=True)
        for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
            (model / file).write_text("{}")
        (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
        state["steps"][step.name] |= {"state": "done", "metrics": METRICS[step.name]}
    lines = [
        write.metrics(step, {"loss": 4.0 - step / 10, "total_steps": 30}) for step in range(30)
    ]
    run.training_log(SFT).write_text("\n".join(lines) + "\n")
    change(run, state, state="stopped")
    return run


def change(run: RunFolder, before: dict[str, Any] | None = None, **values: object) -> None:
    run.write_state({**(before or run.read_state() or {}), **values})


def pause(run: RunFolder) -> None:
    """Make a run wait at a gate after step 1."""
    config = load_config(run.config_file)
    config.gates.sft_perplexity = 2.0
    run.write_config(to_yaml(config))
    change(run, state="paused", gates=gates.missed(config, "sft", METRICS["sft"]))


def fail(run: RunFolder) -> None:
    state = run.read_state()
    assert state is not None
    cause = {"id": "out_of_memory", "line": "no memory", "advice": "less at once"}
    state["steps"]["ppo"] |= {"state": "failed", "cause": cause}
    change(run, state, state="failed")


def done(run: RunFolder) -> None:
    state = run.read_state()
    assert state is not None
    del state["steps"]["ppo"]
    change(run, state, state="done")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three runs, `last` the newest."""
    slower = RunConfig()
    slower.sft.learning_rate = 1e-3
    for age, (name, config) in enumerate([("last", None), ("middle", slower), ("first", None)]):
        run = make_run(tmp_path, name, config)
        then = time.time() - 100 * age
        os.utime(run.state_file, (then, then))
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The runs that a supervisor was started for, while none really is."""
    paths: list[Path] = []
    monkeypatch.setattr("dschat_tui.runs.supervisor.start", lambda run: paths.append(run.path))
    return paths


Script = Callable[[Pilot[None], RunsScreen], Awaitable[None]]


def drive(
    folder: Path, script: Script, size: tuple[int, int] = (80, 24), ascii_only: bool = False
) -> None:
    """Open the list of a folder's runs, wait until it has been read, and follow a script."""

    async def follow() -> None:
        app = Dashboard(find_source(folder / "last"), runs=folder, ascii_only=ascii_only)
        async with app.run_test(size=size) as pilot:
            screen = RunsScreen(folder)
            app.push_screen(screen)
            await until(pilot, lambda: bool(screen.runs))
            await script(pilot, screen)

    asyncio.run(follow())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, screen_text(pilot.app.screen)
        await pilot.pause(0.05)


async def until_told(pilot: Pilot[None], text: str) -> str:
    """Wait until a text stands on the screen, and give the frame."""
    await until(pilot, lambda: text in screen_text(pilot.app.screen))
    return screen_text(pilot.app.screen)


async def press(pilot: Pilot[None], *keys: str) -> str:
    await pilot.press(*keys)
    await pilot.pause(0.05)
    return screen_text(pilot.app.screen)


async def until_on(pilot: Pilot[None], kind: type[Screen[Any]]) -> str:
    await until(pilot, lambda: isinstance(pilot.app.screen, kind))
    await pilot.pause(0.1)
    return screen_text(pilot.app.screen)


@pytest.mark.parametrize(
    ("size", "ascii_only"), [*((size, False) for size in SIZES), ((80, 24), True)]
)
def test_every_size_tells_state_and_results(
    folder: Path, size: tuple[int, int], ascii_only: bool
) -> None:
    pause(RunFolder(folder / "middle"))
    fail(RunFolder(folder / "first"))

    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        frame = await press(pilot)
        rows = frame.split("\n")
        assert len(rows) == size[1]
        assert max(map(cell_len, rows)) <= size[0]
        told = {row.split()[0]: row for row in rows if row.split()[:1] in (["first"], ["middle"])}
        assert "failed" in told["first"]
        assert "paused" in told["middle"]
        assert frame.isascii() or not ascii_only
        if size[0] >= 80:
            assert "perplexity 3.5" in frame
            assert "m mark" in rows[-1]
        if size[1] >= 24:
            assert "1 SFT" in frame

    drive(folder, script, size, ascii_only)


def test_enter_opens_a_run_and_escape_leads_back(folder: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        wanted = screen.runs[1].path
        await press(pilot, "down", "enter")
        await until_on(pilot, RunScreen)
        assert isinstance(pilot.app.screen, RunScreen)
        assert pilot.app.screen.run.source.path == wanted
        await press(pilot, "escape")
        assert pilot.app.screen is screen

    drive(folder, script)


def test_the_cursor_stays_on_its_run_when_another_changes(folder: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        chosen = screen.runs[1].path
        await press(pilot, "down")
        change(RunFolder(screen.runs[2].path))
        screen.read()
        await until(pilot, lambda: screen.runs[0].path.name == "first")
        assert screen.chosen is not None
        assert screen.chosen.path == chosen

    drive(folder, script)


def test_a_state_that_is_not_understood_is_listed_and_breaks_nothing(folder: Path) -> None:
    for name, text in {
        "torn": "{",
        "list": "[]",
        "odd": '{"steps": {"sft": 3}, "state": 7}',
    }.items():
        (folder / name).mkdir()
        (folder / name / "run.json").write_text(text)
    (folder / "hostile").mkdir()
    state = {"steps": {}, "state": "\x1b[31m[red]x"}
    (folder / "hostile" / "run.json").write_text(json.dumps(state))

    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        frame = await press(pilot)
        assert "torn" in frame
        assert "\x1b" not in frame
        for _ in screen.runs:
            assert "\x1b" not in await press(pilot, "down")

    drive(folder, script)


def test_a_stop_is_asked_for_once_confirmed(folder: Path) -> None:
    run = RunFolder(folder / "last")
    change(run, state="running", supervisor=process_identity(os.getpid()))

    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        await press(pilot, "x")
        assert isinstance(pilot.app.screen, Question)
        await press(pilot, "n")
        assert not run.stop_request.exists()
        await press(pilot, "x", "y")
        assert "x again" in await until_told(pilot, "checkpoint")
        assert run.stop_request.exists()
        assert "is running; stop it first" in await press(pilot, "d")
        assert "is not running" in await press(pilot, "down", "x")

    drive(folder, script, (160, 50))


@pytest.mark.slow
def test_a_paused_run_goes_on_with_the_reason_typed(folder: Path, started: list[Path]) -> None:
    run = RunFolder(folder / "last")
    pause(run)

    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        await press(pilot, "u")
        frame = await until_on(pilot, Entry)
        assert "perplexity 3.5" in frame
        await press(pilot, "enter")
        assert isinstance(pilot.app.screen, Entry)
        await press(pilot, *"a quick trial", "enter")
        assert "step 3" in await until_on(pilot, Question)
        await press(pilot, "y")
        await until(pilot, lambda: bool(started))

    drive(folder, script)
    state = run.read_state()
    assert state is not None
    assert state["gates"][0]["accepted"]["reason"] == "a quick trial"
    assert started == [run.path]


def test_leaving_the_reason_out_leaves_the_run_alone(folder: Path, started: list[Path]) -> None:
    pause(RunFolder(folder / "last"))

    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        await press(pilot, "u")
        await until_on(pilot, Entry)
        await press(pilot, "q", "escape")
        assert pilot.app.screen is screen

    drive(folder, script, (60, 16))
    assert not started


def test_what_mends_a_failure_is_shown_before(folder: Path, started: list[Path]) -> None:
    run = RunFolder(folder / "last")
    fail(run)
    before = load_config(run.config_file)

    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        await press(pilot, "u")
        frame = await until_on(pilot, Question)
        assert "ppo.micro_batch_size: null -> 16" in frame
        assert load_config(run.config_file) == before
        await press(pilot, "f")
        await until(pilot, lambda: bool(started))

    drive(folder, script)
    assert load_config(run.config_file).ppo.micro_batch_size == 16


def test_why_a_run_cannot_go_on_is_said(folder: Path, started: list[Path]) -> None:
    done(RunFolder(folder / "last"))

    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        await press(pilot, "u")
        assert "nothing left to do" in " ".join((await until_on(pilot, Question)).split())
        await press(pilot, "enter")
        assert pilot.app.screen is screen

    drive(folder, script)
    assert not started


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["first", "fir"])
def test_a_run_is_deleted_once_its_name_or_the_begin_of_it_is_typed(
    folder: Path, typed: str
) -> None:
    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        await press(pilot, "down", "down", "d")
        assert "type its name, first," in await until_on(pilot, Entry)
        for wrong in ("fi", "irst", "last", "y", "first2", "First"):
            frame = await press(pilot, "ctrl+u", *wrong, "enter")
            assert "not the run's name" in frame
        await press(pilot, "ctrl+u", *typed, "enter")
        await until(pilot, lambda: len(screen.runs) == 2)
        assert sorted(path.name for path in folder.iterdir()) == ["last", "middle"]

    drive(folder, script)


@pytest.mark.parametrize("size", SIZES)
def test_marked_runs_are_compared(folder: Path, size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], screen: RunsScreen) -> None:
        assert "mark 2" in await press(pilot, "c")
        assert "1 marked" in await press(pilot, "m")
        await press(pilot, "m", "c")
        await until_on(pilot, CompareScreen)
        shown = pilot.app.screen
        assert isinstance(shown, CompareScreen)
        await until(pilot, lambda: shown.has_all)
        shown.tick()
        frame = await press(pilot, "1")
        assert max(map(cell_len, frame.split("\n"))) <= size[0]
        assert "A ━ middle" in frame
        assert "B ┄ last" in frame
        assert "Loss  ━ A 1.1  ┄ B 1.1" in frame
        frame = await press(pilot, "d")
        assert "sft.learning_rate" in frame
        assert "0.001" in frame
        assert "reward.learning_rate" not in frame
        assert "Loss" in await press(pilot, "escape")
        await press(pilot, "escape")
        assert pilot.app.screen is screen

    drive(folder, script, size)


def test_six_curves_are_told_apart_without_colour() -> None:
    legends, drawn = set(), set()
    for index in range(6):
        named = [(letter, Series()) for letter in "ABCDEF"]
        for step in range(60):
            named[index][1].append(1.0, step)
        rows = plot("", named, 40, 8, View(patterned=True, banded=False))
        legends.add(row_text(rows[0]))
        drawn.add(tuple(row_text(row) for row in rows[1:]))
    assert len(legends) == len(drawn) == 6


def test_options_that_differ_are_those_and_no_others() -> None:
    first, second = RunConfig(), RunConfig()
    first.ppo.kl_coef = 0.1
    second.ppo.kl_coef, second.actor.lora.rank, second.sft.max_steps = 0.2, 8, 5
    found = dict(differing_options([c.model_dump(mode="json") for c in (first, second)]))
    assert found == {
        "ppo.kl_coef": ["0.1", "0.2"],
        "actor.lora.rank": ["0", "8"],
        "sft.max_steps": ["empty", "5"],
    }


def test_a_run_that_lacks_a_metric_or_an_option_still_compares(folder: Path) -> None:
    run = RunFolder(folder / "last")
    state = run.read_state()
    assert state is not None
    state["steps"]["reward"]["metrics"] = {}
    change(run, state)
    lines = run.config_file.read_text().splitlines()
    run.config_file.write_text("\n".join(line for line in lines if not line.startswith("seed")))
    metrics, options = compare([folder / "first", folder / "last"])
    assert dict(metrics)["reward model: accuracy"] == ["0.875", "-"]
    assert dict(options) == {"seed": ["1234", "-"]}


def test_the_history_has_the_newest_first(folder: Path) -> None:
    assert [run.path.name for run in history(folder)] == ["last", "middle", "first"]
    assert history(folder / "nowhere") == []


def test_the_run_screen_explains_a_gate_and_goes_on(folder: Path, started: list[Path]) -> None:
    pause(RunFolder(folder / "last"))

    async def follow() -> None:
        app = Dashboard(find_source(folder / "last"))
        async with app.run_test(size=(100, 30)) as pilot:
            frame = await until_told(pilot, "paused:")
            assert "perplexity 3.5 is above 2 (gates.sft_perplexity)" in frame
            await press(pilot, "u")
            await until_on(pilot, Entry)
            await press(pilot, *"why not", "enter")
            await until_on(pilot, Question)
            await press(pilot, "y")
            await until(pilot, lambda: bool(started))

    asyncio.run(follow())


def test_the_run_screen_tells_a_gate_that_only_warns_and_a_stop_asked_for_elsewhere(
    folder: Path,
) -> None:
    run = RunFolder(folder / "last")
    pause(run)
    state = run.read_state()
    assert state is not None
    state["gates"][0]["action"] = "warn"
    change(run, state, state="running", stop={"asked": time.time(), "limit_seconds": 100})

    async def follow() -> None:
        app = Dashboard(find_source(run.path))
        async with app.run_test(size=(80, 40)) as pilot:
            assert "(x again: without)" in await until_told(pilot, "saving a checkpoint")
            await press(pilot, "1", "h")
            assert "check this: gate: step 1 (SFT)" in await until_told(pilot, "check this: gate")
            assert "paused:" not in screen_text(pilot.app.screen)

    asyncio.run(follow())
