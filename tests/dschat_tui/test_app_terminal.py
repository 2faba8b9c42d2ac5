"""The app in a real pseudo-terminal: signals, keys that end it, runs that go on or are stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import random
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from dschat_tui.dashboard.screens.settling import SETTLE_SECONDS
from dschat_tui.runs import control
from dschat_tui.runs.control import end_now, has_supervisor
from dschat_tui.runs.folder import RunFolder
from engine.config.loading import load_config, user_profiles
from engine.log import write

SLEEPS = "print('ready', flush=True)\ntime.sleep(120)"


class Terminal:
    """A program on a pseudo-terminal of its own, which controls it; `shell` may run it."""

    def __init__(
        self,
        *arguments: str,
        size: tuple[int, int] = (24, 80),
        shell: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.columns = size[1]
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *shell, sys.executable, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color", **variables},
        )
        self.seen = b""

    def read(self) -> None:
        """Take what was written, waiting a little for it."""
        if select.select([self.master], [], [], 0.1)[0]:
            self.seen += os.read(self.master, 1 << 16)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 180) -> None:
        """Read until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.seen[-3000:].decode(errors="replace")
            self.read()

    def wait_for_text(self, text: str) -> None:
        """Read until a text was written since the last key."""
        self.wait_for(lambda: text.encode() in self.seen)

    def frame(self) -> str:
        """The text of a whole picture, which another width makes the program draw."""
        self.columns = 161 - self.columns % 2
        self.seen = b""
        self.resize(50, self.columns)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            self.read()
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen.decode(errors="replace"))

    def press(self, keys: str) -> None:
        """Send keys; what was written before counts no more."""
        self.seen = b""
        os.write(self.master, keys.encode())

    def resize(self, rows: int, columns: int) -> None:
        """Give it another size, of which its programs are told."""
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def hang_up(self) -> None:
        """Close it, as a dropped connection does."""
        os.close(self.master)
        os.close(self.slave)

    def press_after_a_pause(self, keys: str) -> None:
        """Send keys that start or stop something, which a screen that just changed ignores."""
        time.sleep(1.2 * SETTLE_SECONDS)
        self.press(keys)

    def exit_code(self) -> int:
        """Read until the program has ended."""
        self.wait_for(lambda: self.process.poll() is not None)
        for _ in range(5):
            self.read()
        return int(self.process.returncode)

    def is_restored(self) -> bool:
        """Whether the terminal's modes are as before, on its main screen with a cursor."""
        main_screen = self.seen.rfind(b"\x1b[?1049l") > self.seen.rfind(b"\x1b[?1049h")
        cursor = self.seen.rfind(b"\x1b[?25h") > self.seen.rfind(b"\x1b[?25l")
        return termios.tcgetattr(self.slave) == self.before and main_screen and cursor


@pytest.fixture
def terminal():
    """Start programs on terminals; whatever is left of them is ended after the test."""
    started: list[Terminal] = []

    def start(*arguments: str, **variables: str) -> Terminal:
        started.append(Terminal(*arguments, **variables))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        os.close(one.master)
        os.close(one.slave)


@pytest.fixture
def training_log(tmp_path: Path) -> Path:
    """A short log."""
    path = tmp_path / "training.log"
    lines = [write.metrics(step, {"reward": step, "kl": 0.1}) for step in range(20)]
    path.write_text("\n".join(lines) + "\n")
    return path


def monitor(*arguments: object) -> list[str]:
    return ["-m", "dschat_tui.cli.main", "monitor", *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_the_terminal_sane(
    terminal, training_log: Path, number: signal.Signals, code: int
) -> None:
    shown = terminal(*monitor(training_log))
    shown.wait_for_text("20 lines")
    assert termios.tcgetattr(shown.slave) != shown.before
    shown.process.send_signal(number)
    assert shown.exit_code() == code
    assert shown.is_restored()


# what `dschat run --dashboard` does once the run is started, with a chat that answers at once
IN_DASHBOARD = """
import subprocess, sys
from pathlib import Path
from dschat_tui.cli import chat, run
from dschat_tui.runs.folder import RunFolder
from dschat_tui.dashboard.screens.settling import SETTLE_SECONDS

chat.chat = lambda path: print("talks with", path)
nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
process = subprocess.Popen(sys.argv[2:], start_new_session=True, **nothing)
sys.exit(run.in_dashboard(RunFolder(Path(sys.argv[1])), process))
"""

# A shell that keeps a hang-up to itself, as some wrappers of logins do: no signal reaches programs.
DEAF_SHELL = ("sh", "-c", "trap '' HUP; \"$@\"; :", "sh")
# the environment variable by which the processes of one terminal are found
MARK = "DSCHAT_TEST_TERMINAL"
# the chat screen with a model that loads for ever and ends neither on SIGTERM nor on end of input
IN_CHAT = """
import sys
from pathlib import Path
from dschat_tui.dashboard import app
from dschat_tui.dashboard.screens.chat import ChatScreen

HANGS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

class Talking(app.Dashboard):
    def action_show_start(self):
        command = [sys.executable, "-c", HANGS]
        self.push_screen(ChatScreen({"sft": "model"}, lambda folder: command))

sys.exit(app.show(Talking(runs=Path("nowhere"))))
"""


def marked(mark: str) -> list[psutil.Process]:
    """The processes that were started on a terminal, and those that they started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            is_marked = process.environ().get(MARK) == mark
            if is_marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left_by_a_hang_up(number: int, programs: list[tuple[list[str], str]]) -> str:
    """Start one of the programs on a terminal, close that at a random moment; who outlives it.

    Args:
        number: of the attempt; it seeds the moment.
        programs: arguments of Python, and the text by which a program shows that it is ready.
    """
    chance = random.Random(number)
    arguments, ready = programs[number % len(programs)]
    moment = chance.choice(["starting", "drawing", "ready", "stalled"])
    mark = f"{os.getpid()}-{number}"
    shell = DEAF_SHELL if chance.random() < 0.5 else ()
    terminal = Terminal(*arguments, shell=shell, **{MARK: mark})
    if moment == "starting":
        time.sleep(chance.uniform(0.05, 0.8))
    elif moment == "drawing":
        terminal.wait_for(
            lambda: b"\x1b[?1049h" in terminal.seen or ready.encode() in terminal.seen
        )
        time.sleep(chance.uniform(0, 0.3))
    else:
        terminal.wait_for_text(ready)
    if moment == "stalled":
        # nobody reads, so that the program waits to write; then it is asked to end
        for _ in range(30):
            terminal.resize(chance.randrange(30, 60), chance.randrange(100, 200))
            time.sleep(0.05)
        terminal.press("q")
    time.sleep(chance.uniform(0, 0.5))
    terminal.hang_up()
    end = time.monotonic() + 30
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    told = [f"{moment}, {shell[:1]}: {process.cmdline()}" for process in left]
    for process in left:
        process.kill()
    terminal.process.wait()
    return "; ".join(told)


@pytest.mark.slow
def test_a_lost_terminal_leaves_nothing_behind_and_no_run_ends(
    fake_run, training_log: Path
) -> None:
    made = fake_run(sft=SLEEPS)
    supervisor = made.start()
    made.wait_for(lambda: made.state()["steps"]["sft"]["state"] == "running")
    programs = [
        (monitor(training_log), "20 lines"),
        (["-c", IN_CHAT], "loading"),
        (["-m", "dschat_tui.dashboard.app", str(made.run.path)], "running"),
        (["-c", IN_DASHBOARD, str(made.run.path), "true"], "running"),
        (["-m", "dschat_tui.cli.main", "runs", "attach", str(made.run.path)], "SFT"),
    ]
    with ThreadPoolExecutor(2) as pool:
        left = list(pool.map(lambda number: left_by_a_hang_up(number, programs), range(15)))
    assert [told for told in left if told] == []
    assert supervisor.poll() is None
    assert made.survivors()
    control.end_now(made.run)
    supervisor.wait(60)


@pytest.mark.slow
def test_a_conversation_on_a_lost_terminal_ends() -> None:
    talk = ["-m", "dschat_tui.cli.main", "chat", "--path", "embedded:tiny-llama"]
    shown = Terminal(*talk, shell=DEAF_SHELL, **{MARK: "conversation"})
    shown.wait_for_text("you> ")
    shown.hang_up()
    shown.process.wait(60)
    assert marked("conversation") == []


@pytest.mark.slow
def test_a_program_that_cannot_leave_ends_on_a_signal(terminal, training_log: Path) -> None:
    shown = terminal(*monitor(training_log))
    shown.wait_for_text("20 lines")
    for columns in range(100, 140):  # nobody reads: the main thread waits to write
        shown.resize(50, columns)
        time.sleep(0.05)
    shown.process.send_signal(signal.SIGTERM)
    assert shown.process.wait(60) == 143


@pytest.mark.slow
def test_quitting_leaves_the_terminal_sane(terminal, training_log: Path) -> None:
    shown = terminal(*monitor(training_log, "--replay", "--speed", 1000))
    shown.wait_for_text("20 lines")
    shown.press("q")
    assert shown.exit_code() == 0
    assert termios.tcgetattr(shown.slave) == shown.before


@pytest.mark.slow
def test_ascii_without_colour_writes_neither(terminal, training_log: Path) -> None:
    shown = terminal(*monitor(training_log, "--ascii"), NO_COLOR="1")
    shown.wait_for_text("20 lines")
    shown.press("hlec")
    shown.wait_for_text("[charts]")
    assert shown.seen.isascii()


@pytest.mark.slow
def test_a_run_is_left_found_and_stopped(terminal, fake_run) -> None:
    made = fake_run(sft=SLEEPS)
    supervisor = made.start(grace_seconds=1.0)
    made.wait_for(lambda: made.state()["steps"]["sft"]["state"] == "running")
    shown = terminal("-m", "dschat_tui.dashboard.app", str(made.run.path))
    shown.wait_for_text("1 SFT")
    shown.wait_for_text("running")
    time.sleep(1.5)  # until run.json has been looked at
    shown.press("q")
    shown.wait_for_text("detach")
    shown.press("c")
    # The question says "running" too, and may be drawn once more before it closes.
    shown.wait_for(lambda: "detach" not in (frame := shown.frame()) and "charts" in frame)
    shown.press("q")
    shown.wait_for_text("detach")
    shown.press("d")
    assert shown.exit_code() == 0
    assert supervisor.poll() is None
    assert made.survivors()

    again = terminal("-m", "dschat_tui.dashboard.app", str(made.run.path))
    again.wait_for_text("running")
    again.press_after_a_pause("x")
    again.wait_for_text("stop the run")
    again.press_after_a_pause("y")
    again.wait_for_text("saving a checkpoint")  # in the header: the question is closed
    again.press_after_a_pause("x")
    made.wait_for(lambda: made.state()["state"] == "stopped")
    again.wait_for_text("stopped")
    supervisor.wait(30)
    assert made.survivors() == []
    again.press("q")
    assert again.exit_code() == 0


@pytest.mark.slow
def test_the_list_of_runs_opens_one(terminal, fake_run, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_run()
    monkeypatch.chdir(made.run.path.parent)
    made.run.path.rename(made.run.path.parent / "moved")
    (made.run.path.parent / "output").mkdir()
    (made.run.path.parent / "moved").rename(made.run.path.parent / "output" / "first-run")
    shown = terminal("-m", "dschat_tui.dashboard.app")
    shown.wait_for_text("new run")
    shown.press("r")
    shown.wait_for_text("first-run")
    shown.press("\r")
    shown.wait_for_text("1 SFT")
    shown.press("q")
    assert shown.exit_code() == 0


def in_dashboard(made) -> list[str]:
    return ["-c", IN_DASHBOARD, str(made.run.path), *made.supervisor_command(grace_seconds=1.0)]


@pytest.mark.slow
def test_a_run_in_the_dashboard_ends_with_its_summary_and_the_chat(terminal, fake_run) -> None:
    made = fake_run()
    shown = terminal(*in_dashboard(made))
    shown.wait_for_text("q: the summary")
    shown.press("q")
    assert shown.exit_code() == 0
    assert b"RLHF (PPO)" in shown.seen
    assert f"talks with {made.run.path}".encode() in shown.seen


@pytest.mark.slow
def test_a_run_in_the_dashboard_can_be_left_and_goes_on(terminal, fake_run) -> None:
    made = fake_run(sft=SLEEPS)
    shown = terminal(*in_dashboard(made))
    shown.wait_for_text("running")
    made.wait_for(lambda: made.state()["steps"]["sft"]["state"] == "running")
    time.sleep(1.5)  # until run.json has been looked at
    shown.press("q")
    shown.wait_for_text("detach")
    shown.press("d")
    assert shown.exit_code() == 0
    assert b"The run continues" in shown.seen
    assert b"talks with" not in shown.seen
    assert made.survivors()
    control.end_now(made.run)
    made.wait_for(lambda: made.state()["state"] == "stopped")


QUICK = """# A few steps of everything: quick to see.
extends: tiny
gates: {sft_perplexity: null, reward_accuracy: null}
data: {eval_rows: 8}
sft: {epochs: 1, max_steps: 60, batch_size: 4, max_length: 48}
reward: {max_steps: 4, batch_size: 4, max_length: 48}
ppo: {max_steps: 3, rollout_batch_size: 4, batch_size: 4, max_answer_length: 8}
"""
# a quantity in the title of a panel: its line and the value that it has now
READOUT = re.compile(r"━ [a-z ]*-?\d")


@pytest.fixture
def ends_run():
    """Runs whose processes are ended after the test, should any be left."""
    runs: list[RunFolder] = []
    yield runs
    for run in runs:
        if has_supervisor(run.read_state() or {}):
            for _ in range(2):  # the second skips the grace
                end_now(run)
                time.sleep(0.5)


@pytest.mark.slow
def test_a_run_from_the_form_to_its_end(
    terminal, ends_run: list[RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = user_profiles() / "quick.yaml"
    profile.parent.mkdir(parents=True, exist_ok=True)
    profile.write_text(QUICK)
    run = RunFolder(tmp_path / "output" / "quick")
    ends_run.append(run)

    def state() -> str:
        return str((run.read_state() or {"state": "none"})["state"])

    # 1. Choose the profile, switch two toggles, start, and see the first panels fill.
    shown = terminal("-m", "dschat_tui.dashboard.app")
    shown.wait_for_text("> ")
    shown.press("/quick\r")
    shown.wait_for_text("output/quick")
    for key in ("actor.gradient_checkpointing", "ema.enabled"):
        shown.press(f"1/{key}\r")
        shown.wait_for_text(key)
        shown.press(" ")
        shown.wait_for_text(f"{key}=true")
    shown.press_after_a_pause("s")
    shown.wait_for_text("[1 SFT]")
    config = load_config(run.config_file)
    assert config.ema.enabled
    assert config.actor.gradient_checkpointing
    assert config.sft.max_steps == 60
    shown.wait_for(lambda: READOUT.search(shown.frame()) is not None)
    # 2. Leave it.
    shown.press("q")
    shown.wait_for_text("detach")
    shown.press("d")
    assert shown.exit_code() == 0
    assert shown.is_restored()
    assert state() == "running"
    # 3. Find it again, and stop it.
    again = terminal("-m", "dschat_tui.dashboard.app")
    again.wait_for_text("runs in output")
    again.wait_for_text("quick")
    again.press("\r")
    again.wait_for_text("1 SFT")
    again.wait_for(lambda: "running" in again.frame())
    again.press_after_a_pause("x")
    again.wait_for_text("stop the run")
    again.press_after_a_pause("y")
    again.wait_for(lambda: state() == "stopped")
    # 4. Go on with it, and see it done.
    again.press("\x1b")
    again.wait_for(lambda: "runs in output" in again.frame() and "stopped" in again.frame())
    again.press_after_a_pause("u")
    again.wait_for_text("resumes with step")
    again.press_after_a_pause("y")
    again.wait_for(lambda: state() == "done", 600)
    again.press("\r")
    again.wait_for_text("1 SFT")
    for number in ("1", "2", "3"):
        again.press(number)
        again.wait_for(lambda: READOUT.search(again.frame()) is not None)
    assert "done" in again.frame()
    again.press("q")
    assert again.exit_code() == 0
    assert (run.path / "step3-rlhf" / "actor_ema" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["-m", "dschat_tui.dashboard.app"], "dschat monitor PATH --once"),
        (["-m", "dschat_tui.cli.main", "monitor", "."], "dschat monitor PATH"),
    ],
)
def test_without_a_terminal_the_command_to_use_is_named(
    arguments: list[str], advice: str, training_log: Path
) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=training_log.parent,
    )
    assert done.returncode == 2
    assert advice in done.stderr
    assert done.stdout == ""


def test_one_frame_goes_into_a_pipe(training_log: Path) -> None:
    done = subprocess.run(
        [sys.executable, *monitor(training_log, "--once", "--ascii")],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80", "LINES": "24"},
    )
    assert done.returncode == 0, done.stderr
    assert "20 lines" in done.stdout
    assert done.stdout.isascii()
    assert len(done.stdout.splitlines()) == 24


def test_nothing_to_watch_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *monitor(tmp_path / "nowhere")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "does not exist" in done.stderr


IMPORTS = """
import sys
import {module}
heavy = [name for name in {heavy} if name in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "dschat_tui.dashboard.app",
            ["torch", "transformers", "deepspeed", "datasets", "pydantic"],
        ),
        ("dschat_tui.cli.main", ["torch", "transformers", "textual", "rich"]),
    ],
)
def test_importing_brings_in_nothing_heavy(module: str, heavy: list[str]) -> None:
    script = IMPORTS.format(module=module, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
