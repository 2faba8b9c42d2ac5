"""The sweep screen by its keys, as frames of text; no terminal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot

from dschat_tui.dashboard.app import Dashboard, screen_text
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.screens.sweep import SweepScreen
from dschat_tui.sweep.state import SweepFolder

SIZES = [(60, 16), (80, 24), (100, 30), (160, 50)]
HOSTILE = "\x1b[31mred [bold]x[/bold]\nnext \u202eturned"


def a_cell(name: str, state: str, reason: str = "", **numbers: object) -> dict:
    cause = {"id": "killed", "line": reason, "advice": f"advice {reason}"} if reason else None
    values = {"zero_stage": int(name[1]), "lora": name.endswith("true")}
    own = {"name": name, "values": values, "state": state, "reason": reason, "cause": cause}
    return {**own, "started": 1.0, "seconds": 61.0, **numbers}


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    """A sweep in the middle, of whose cells one is done and has a run."""
    folder = SweepFolder(tmp_path / "sweep")
    folder.path.mkdir()
    measured = {"samples_per_s": 12.5, "step_s": 4.0, "generate_s": 2.0, "train_s": 1.0}
    cells = [
        a_cell("z2_lora_true", "done", **measured, other_s=1.0, peak_host_bytes=3 * 2**30),
        a_cell("z2_lora_false", "failed", HOSTILE),
        a_cell("z3_lora_true", "running", seconds=None),
        a_cell("z3_lora_false", "pruned", "a rule"),
    ]
    state = {"steps": [3], "axes": {"zero_stage": [2, 3], "lora": [True, False]}, "cells": cells}
    folder.write({**state, "state": "running", "process": None, "preparations": []})
    run = folder.path / "z2_lora_true"
    (run / "step3-rlhf").mkdir(parents=True)
    (run / "step3-rlhf" / "training.log").write_text("Phase => tokenising\n")
    (run / "run.json").write_text(json.dumps({"state": "done", "steps": {}}))
    return folder


Script = Callable[[Pilot[None], SweepScreen], Awaitable[None]]


def drive(
    folder: SweepFolder, script: Script, size: tuple[int, int] = (100, 30), ascii_only: bool = False
) -> None:
    """Open a sweep and follow a script."""

    async def follow() -> None:
        app = Dashboard(sweep=folder.path, ascii_only=ascii_only)
        async with app.run_test(size=size) as pilot:
            await pilot.pause(0.05)
            screen = app.screen
            assert isinstance(screen, SweepScreen)
            screen.read()
            await pilot.pause(0.05)
            await script(pilot, screen)

    asyncio.run(follow())


def frame(pilot: Pilot[None]) -> str:
    return screen_text(pilot.app.screen)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_size_shows_the_cells_and_their_states(sweep, size, ascii_only):
    async def script(pilot: Pilot[None], screen: SweepScreen) -> None:
        text = frame(pilot)
        rows = text.split("\n")
        assert len(rows) == size[1]
        assert all(cell_len(row) <= size[0] for row in rows)
        for cell in sweep.read()["cells"]:
            (row,) = [row for row in rows if f" {cell['name']} " in row and ":" not in row[:20]]
            assert cell["state"] in row
        assert "12.5" in text
        assert not ascii_only or text.isascii()

    drive(sweep, script, size, ascii_only)


def test_the_matrix_fills_in(sweep):
    async def script(pilot: Pilot[None], screen: SweepScreen) -> None:
        assert "1 done, 1 failed, 1 pruned, 1 running" in frame(pilot)
        state = sweep.read()
        state["cells"][2] |= {"state": "done", "samples_per_s": 77.0, "step_s": 1.0}
        sweep.write(state)
        screen.read()
        await pilot.pause(0.05)
        assert "2 done" in frame(pilot)
        assert "77" in frame(pilot)
        assert "fastest: z3_lora_true" in frame(pilot)

    drive(sweep, script)


def test_a_sweep_whose_process_is_gone_is_not_called_running(sweep):
    async def script(pilot: Pilot[None], screen: SweepScreen) -> None:
        assert "  stopped  " in frame(pilot).split("\n")[0]

    drive(sweep, script, (160, 50))


def test_enter_opens_a_cell_as_a_run_and_escape_comes_back(sweep):
    async def script(pilot: Pilot[None], screen: SweepScreen) -> None:
        await pilot.press("enter")
        await pilot.pause(0.05)
        assert isinstance(pilot.app.screen, RunScreen)
        assert pilot.app.screen.run.source.path == sweep.path / "z2_lora_true"
        await pilot.press("escape")
        await pilot.pause(0.05)
        assert pilot.app.screen is screen

    drive(sweep, script)


def test_the_cell_under_the_cursor_tells_why_and_one_without_a_run_stays(sweep):
    async def script(pilot: Pilot[None], screen: SweepScreen) -> None:
        await pilot.press("down")
        await pilot.pause(0.05)
        text = frame(pilot)
        assert "advice red" in text
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "[bold]x[/bold]" in text
        await pilot.press("end", "enter")
        await pilot.pause(0.05)
        assert pilot.app.screen is screen
        assert "no run: it is pruned" in frame(pilot)

    drive(sweep, script)


def test_a_file_that_is_torn_is_told_and_the_last_picture_stays(sweep):
    async def script(pilot: Pilot[None], screen: SweepScreen) -> None:
        sweep.state_file.write_text("{")
        screen.read()
        await pilot.pause(0.05)
        assert "sweep.json is not JSON" in frame(pilot)
        assert "z3_lora_false" in frame(pilot)

    drive(sweep, script, (160, 50))
