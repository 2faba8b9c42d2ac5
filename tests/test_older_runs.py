"""Runs, logs and profiles of version 0.1 still open, resume and compare.

`fixtures/version-0.1` was written by that version: a finished run of PPO and one of DPO (without
their models), one stopped in step 3 with its checkpoint, the model and the profile they began
with, and what `dschat metrics --json` said of the finished ones. @FOLDER@ and @BIN@ stand for
the folders of the machine that made them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dschat_tui.dashboard.app import Dashboard, screen_text
from dschat_tui.logs.source import find_source

FIXTURE = Path(__file__).parent / "fixtures" / "version-0.1"
BIN = Path(sys.executable).parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the fixture with the paths of this machine."""
    copy = tmp_path / "old"
    shutil.copytree(FIXTURE, copy)
    for file in copy.rglob("*"):
        if file.suffix in {".json", ".yaml", ".log"}:
            text = file.read_text(encoding="utf-8")
            file.write_text(
                text.replace("@FOLDER@", str(copy)).replace("@BIN@", str(BIN)), encoding="utf-8"
            )
    return copy


def dschat(*arguments: object) -> str:
    ended = subprocess.run(
        [BIN / "dschat", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize("run", ["finished", "dpo"])
def test_metrics_are_read_as_they_were(folder: Path, run: str) -> None:
    before = json.loads((folder / f"{run}-metrics.json").read_text(encoding="utf-8"))
    assert json.loads(dschat("metrics", folder / run, "--json")) == before


def test_their_state_is_shown(folder: Path) -> None:
    finished, stopped = (dschat("runs", "show", folder / name) for name in ("finished", "stopped"))
    assert "perplexity 322.9 -> 322" in finished
    assert "reward -2.299 -> -1.839, KL 0 -> 0.0033" in finished
    assert "stopped" in stopped
    assert "checkpoints of step 3 after: 11" in stopped


@pytest.mark.parametrize(("run", "shown"), [("finished", "-1.839"), ("dpo", "0.875")])
def test_the_dashboard_opens_them(folder: Path, run: str, shown: str) -> None:
    async def frame() -> str:
        app = Dashboard(find_source(folder / run))
        async with app.run_test(size=(120, 40)) as pilot:
            for _ in range(100):
                await pilot.pause(0.05)
                if shown in screen_text(app.screen):
                    break
            return screen_text(app.screen)

    assert shown in asyncio.run(frame())


def test_their_profile_is_read(folder: Path) -> None:
    shown = dschat("run", "--profile", folder / "profile.yaml", "--dry-run")
    assert str(folder / "model") in shown


@pytest.mark.slow
def test_a_stopped_one_resumes(folder: Path) -> None:
    run = folder / "stopped"
    dschat("run", "--resume", run)
    records = [json.loads(line) for line in (run / "step3-rlhf/metrics.jsonl").open()]
    steps = [record["step"] for record in records if record["kind"] == "metrics"]
    assert steps == list(range(40))
    assert json.loads((run / "run.json").read_text())["state"] == "done"
