"""The run screen by its keys, at the four sizes, as frames of text; no terminal."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.cells import cell_len
from textual.events import Key
from textual.pilot import Pilot
from textual.widgets import Input

from dschat_tui.dashboard.app import Dashboard, one_frame, screen_text
from dschat_tui.dashboard.screens.panels import PANELS
from dschat_tui.dashboard.screens.run.answers import AnswersTab
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.widgets.lines import LineList
from dschat_tui.logs.source import find_source
from dschat_tui.runs.state import read_run_state
from engine.log import write

pytestmark = pytest.mark.usefixtures("patient")

SIZES = [(60, 16), (80, 24), (100, 30), (160, 50)]
STEPS = 30
HOSTILE = [
    "\x1b[2J\x1b[31mcleared\x1b[0m",
    "[bold red]markup[/bold red] [link=x]y[/]",
    "\x9b31m bell \x07 \u202eturned",
    "z" * 300_000,
]


def sft_lines() -> list[str]:
    lines = [write.note("dtype bf16"), write.phase("tokenising", 50), write.running_training()]
    for step in range(STEPS):
        lines.append(write.throughput(0.001, 0.5, 12.0, 32.0, 16, 20))
        lines.append(write.metrics(step, {"loss": 4.0 - step / 10, "total_steps": STEPS}))
    return [*lines, write.step_finished("/runs/a/step1-sft/model")]


def ppo_lines() -> list[str]:
    lines = [write.running_training(STEPS)]
    for step in range(STEPS):
        values = {"reward": step / 10, "reward_ema": step / 12, "kl": -3.0, "eos_share": 0.9}
        times = {"e2e_s": 10.0, "generate_s": 6.0, "train_s": 3.0}
        lines.append(write.metrics(step, {**values, **times, "total_steps": STEPS}))
    return [*lines, write.warning("look after this"), "the last words of the log"]


def write_log(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogatepass")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run whose second step has not begun."""
    write_log(tmp_path / "step1-sft" / "training.log", sft_lines())
    write_log(tmp_path / "step3-rlhf" / "training.log", ppo_lines())
    with (tmp_path / "step3-rlhf" / "rollouts.jsonl").open("w") as file:
        for step in range(STEPS):
            for number in range(2):
                record = {
                    "step": step,
                    "prompt": f"question {step}",
                    "answer": f"answer {step} [bold]{'good' if number else 'bad'}\x1b[31m",
                    "reward": step + number / 2,
                    "kl": 0.1,
                    "length": 5,
                    "ended": True,
                }
                file.write(json.dumps(record) + "\n")
    return tmp_path


Script = Callable[[Pilot[None], RunScreen], Awaitable[None]]


def drive(
    path: Path, script: Script, size: tuple[int, int] = (100, 30), ascii_only: bool = False
) -> None:
    """Open a path, wait until everything has been read, and follow a script."""

    async def follow() -> None:
        app = Dashboard(find_source(path), ascii_only=ascii_only)
        async with app.run_test(size=size) as pilot:
            screen = app.screen
            assert isinstance(screen, RunScreen)
            await until(pilot, lambda: screen.run.has_all)
            await script(pilot, screen)

    asyncio.run(follow())


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < end, screen_text(pilot.app.screen)
        await pilot.pause(0.05)


async def press(pilot: Pilot[None], *keys: str) -> str:
    """Press keys and give the frame that they lead to."""
    await pilot.press(*keys)
    await pilot.pause(0.05)
    if isinstance(pilot.app.screen, RunScreen):
        pilot.app.screen.tick()
    await pilot.pause(0.05)
    return screen_text(pilot.app.screen)


def titles(frame: str) -> list[str]:
    names = ("Reward ", "Losses", "KL, entropy", "Time of a step", "TFLOPs", "Samples/s")
    return [name.strip() for name in names if name in frame.split("charts")[0]]


@pytest.mark.parametrize("size", SIZES)
def test_every_size_has_its_picture(run: Path, size: tuple[int, int]) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        frame = await press(pilot)
        rows = frame.split("\n")
        assert len(rows) == size[1]
        assert max(map(cell_len, rows)) <= size[0]
        assert "[3 RLHF]" in rows[1]
        assert "[charts]" in frame
        assert "q quit" in rows[-1]
        alone = size[0] < 80
        assert len(titles(frame)) == (1 if alone else 6)
        frame = await press(pilot, "h")
        assert "check this: KL to the reference: -3 nats" in frame
        assert bool(titles(frame)) == (size[1] >= 30)

    drive(run, script, size)


def test_one_panel_at_a_time_where_it_is_small(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        seen = [titles(await press(pilot))]
        for _ in range(6):
            seen.append(titles(await press(pilot, "tab")))
        assert [len(names) for names in seen] == [1] * 7
        assert len({names[0] for names in seen}) == 6
        assert seen[-1] == seen[0]
        assert titles(await press(pilot, "shift+tab")) == seen[5]

    drive(run, script, (60, 16))


def test_a_panel_can_have_all_the_place(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        assert titles(await press(pilot, "tab", "tab", "m")) == ["KL, entropy"]
        assert len(titles(await press(pilot, "m"))) == 6

    drive(run, script, (80, 24))


def test_each_step_has_its_panels(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        frame = await press(pilot, "1")
        assert "[1 SFT]" in frame
        assert "Perplexity" in frame
        assert "Loss  ━ 1.1" in frame
        frame = await press(pilot, "2")
        assert "Margin" in frame
        assert "no values yet" in frame
        assert "Reward  " in await press(pilot, "0")

    drive(run, script, (160, 50))


def test_a_step_with_fewer_panels_leaves_none_of_the_last_steps(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PANELS, "sft", PANELS["sft"][:2])

    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        assert len(titles(await press(pilot, "tab", "tab", "tab"))) == 6
        frame = await press(pilot, "1")
        charts = frame.split("[charts]")[0]
        assert "Perplexity" in charts
        assert titles(frame) == []
        # two panels share all the room, down to the row above the tabs
        assert "Loss" in charts.split("\n")[2]
        assert "Perplexity" in charts.split("\n")[2]
        assert f"step {STEPS - 1}" in charts.split("\n")[-2]
        # and keys act on them
        assert "at 28" in await press(pilot, "tab", "left", "left")
        assert len(titles(await press(pilot, "3"))) == 6

    drive(run, script, (100, 30))


def test_the_cursor_reads_values_and_leads_to_the_line(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        frame = await press(pilot, "left", "left", "left")
        step = int(screen.charts.view.cursor or 0)
        assert 0 < step < STEPS - 1
        assert f"at {step}" in frame
        assert f"{step / 10:g}" in frame.split("\n")[2]
        await press(pilot, "j")
        listed = screen.query_one("#log", LineList)
        (row,) = listed.source.rows(listed.cursor, 1, 0)
        assert f"step: {step}," in "".join(text for text, _ in row)

    drive(run, script, (80, 24))


def test_zoom_shows_fewer_steps_and_the_whole_again(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        def first_step(frame: str) -> int:
            rows = frame.split("\n")
            return int(next(row for row in rows if f"step {STEPS - 1}" in row).split()[0])

        assert first_step(await press(pilot)) == 0
        near = first_step(await press(pilot, "plus"))
        assert 5 < near < STEPS - 5
        assert first_step(await press(pilot, "minus")) == 0

    drive(run, script, (80, 24))


def test_smoothing_log_scale_and_markers_are_told(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        assert "~0.6" in await press(pilot, "o")
        assert " log" in await press(pilot, "g")
        frame = await press(pilot, "b")
        assert not any("\u2800" < sign <= "\u28ff" for sign in frame)
        assert any("\u2800" < sign <= "\u28ff" for sign in await press(pilot, "b", "b"))

    drive(run, script)


def test_answers_are_sorted_searched_and_shown_whole(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        await until(pilot, lambda: len(screen.run.rollouts) > 0)
        frame = await press(pilot, "a")
        assert "newest first" in frame
        assert f"answer {STEPS - 1} [bold]good" in frame
        frame = await press(pilot, "r", "r")
        assert "worst first" in frame
        assert "answer 0 [bold]bad" in frame
        assert "step 0  reward 0 " in frame
        assert "step 0  reward 0.5" in await press(pilot, "down")
        await press(pilot, "slash", *"question 17", "enter")
        await until(pilot, lambda: screen.query_one(AnswersTab).found is not None)
        frame = await press(pilot)
        assert "2 with 'question 17'" in frame
        assert "answer 17" in frame
        assert "answer 18" not in frame

    drive(run, script)


def test_the_log_follows_is_searched_and_is_looked_at_sideways(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        assert "the last words of the log" in await press(pilot, "l")
        await press(pilot, "slash", *"STEP: 7,", "enter")
        listed = screen.query_one("#log", LineList)
        await until(pilot, lambda: listed.cursor == 8)
        assert "Metrics => step: 7," in await press(pilot)
        assert "Metrics => step: 7," not in await press(pilot, "right_square_bracket")
        with (run / "step3-rlhf" / "training.log").open("a") as file:
            file.write("a line that came later\n")
        assert "came later" not in await press(pilot)
        assert listed.cursor == 8
        await press(pilot, "left_square_bracket", "f")
        await until(pilot, lambda: "came later" in screen_text(screen) or bool(screen.tick()))

    drive(run, script, (80, 24))


def test_a_burst_of_keys_goes_into_the_search_that_its_first_opens(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        for key, character in (("slash", "/"), *((each, each) for each in "lost")):
            pilot.app.post_message(Key(key, character))
        await pilot.pause()
        assert screen.query_one("#line", Input).value == "lost"

    drive(run, script, (80, 24))


def test_an_event_leads_to_its_line(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        assert "look after this" in await press(pilot, "e")
        await press(pilot, "end", "enter")
        assert screen.tab == "log"
        listed = screen.query_one("#log", LineList)
        (row,) = listed.source.rows(listed.cursor, 1, 0)
        assert row[0][0] == "Warning => look after this"

    drive(run, script, (80, 24))


def test_the_machine_is_described(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        await press(pilot, "s")
        await until(pilot, lambda: "GiB" in screen_text(screen))
        assert "memory" in screen_text(screen)

    drive(run, script, (80, 24))


def test_a_paused_picture_stands_still_while_reading_goes_on(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        before = await press(pilot, "p")
        assert "paused" in before
        with (run / "step3-rlhf" / "training.log").open("a") as file:
            file.write(write.metrics(STEPS, {"reward": 77.0}) + "\n")
        await until(pilot, lambda: screen.run.log.status.done == STEPS + 1)
        assert await press(pilot) == before
        assert "77" in await press(pilot, "p")

    drive(run, script, (80, 24))


def test_only_panels_in_sight_are_drawn(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dschat_tui.dashboard.screens.charts import Panel

    drawn: list[str] = []
    original = Panel.show_spec

    def counting(panel: Panel, *arguments: object) -> None:
        drawn.append(panel.id or "")
        original(panel, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Panel, "show_spec", counting)

    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        await press(pilot, "m")
        drawn.clear()
        screen.tick()
        assert drawn == ["panel-0"]
        await press(pilot, "l")
        drawn.clear()
        screen.tick()
        assert drawn == []

    drive(run, script, (80, 24))


@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_hostile_log_neither_breaks_nor_colours_the_screen(
    tmp_path: Path, ascii_only: bool
) -> None:
    path = tmp_path / "training.log"
    text = "\n".join([*ppo_lines(), *HOSTILE, write.warning("\x1b[31m[red]x"), "end \udcff"]) + "\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))

    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        for key in ("l", "e", "h", "a", "c"):
            frame = await press(pilot, key)
            assert "\x1b" not in frame
            assert "\u202e" not in frame
            assert frame.isascii() or not ascii_only
            assert max(map(cell_len, frame.split("\n"))) <= 100
            if key == "l":
                assert "[bold red]markup[/bold red] [link=x]y[/]" in frame
                assert "cleared" in frame

    drive(path, script, ascii_only=ascii_only)


def test_without_colour_lines_have_patterns(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        assert screen.charts.view.patterned

    drive(run, script)


def test_a_failed_step_tells_its_cause_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "training.log"
    write_log(
        path,
        [
            "[2026-01-01 00:00:00,000] [INFO] [launch.py:245:main] process 77 spawned with command",
            *ppo_lines(),
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
            "[2026-01-01 00:00:00,000] [INFO] [launch.py:316:sigkill_handler] "
            "Killing subprocess 77",
        ],
    )

    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        frame = await press(pilot)
        assert "failed" in frame
        assert "out_of_memory: torch.OutOfMemoryError" in frame
        assert "micro_batch_size" in frame

    drive(path, script)


def test_one_frame_as_text_needs_no_terminal(run: Path) -> None:
    frame = asyncio.run(one_frame(Dashboard(find_source(run), ascii_only=True), 80, 24))
    assert frame.isascii()
    assert len(titles(frame)) == 6
    assert f"{len(ppo_lines())} lines" in frame


def test_leaving_a_run_that_goes_on_asks(run: Path) -> None:
    state = {"state": "running", "updated": time.time(), "steps": {"ppo": {"state": "running"}}}
    (run / "run.json").write_text(json.dumps(state))

    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        frame = await press(pilot)
        assert "running" in frame
        await press(pilot, "q")
        frame = screen_text(pilot.app.screen)
        assert "[d] detach" in frame
        assert "[s] stop" in frame
        assert frame.isascii()
        await press(pilot, "c")
        assert pilot.app.screen is screen
        await press(pilot, "q", "d")
        assert pilot.app._exit

    drive(run, script, ascii_only=True)


def test_a_run_whose_logs_are_not_read_yet_has_a_picture(run: Path) -> None:
    state = {"state": "running", "updated": time.time(), "steps": {"ppo": {"state": "running"}}}
    (run / "run.json").write_text(json.dumps(state))

    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        screen.run.logs.clear()
        screen.run.state = read_run_state(screen.run.source.state_file)
        screen.draw()
        await pilot.pause()
        assert "reading" in screen_text(screen)

    drive(run, script)


def test_what_cannot_be_done_is_said(run: Path) -> None:
    async def script(pilot: Pilot[None], screen: RunScreen) -> None:
        assert "nothing to stop" in await press(pilot, "x")
        await press(pilot, "l", "slash", *"nowhere", "enter")
        await until(pilot, lambda: "no line holds 'nowhere'" in screen_text(screen))

    drive(run, script, (160, 50))
