"""What is shown while a run goes on, and how the command ends."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from dschat_tui.cli import watch
from dschat_tui.run_text import result_line
from dschat_tui.runs import control, results
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.history import history
from dschat_tui.runs.progress import progress_of
from dschat_tui.runs.watch import StepWatch, Watch
from engine.config.loading import to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS
from engine.log import write

SFT, REWARD, PPO = STEPS[:3]


def test_progress_follows_phase_step_metrics_and_warnings(tmp_path):
    log = tmp_path / "training.log"
    followed = StepWatch(SFT, tmp_path)
    followed.update()
    assert followed.line() == "starting"

    log.write_text(write.phase("tokenising", 34) + "\n")
    followed.update()
    assert followed.line() == "tokenising 34 %"

    with log.open("a") as file:
        for step in range(3):
            values = {"loss": 2.5 - step, "total_steps": 12}
            file.write(write.metrics(step, values) + "\n")
        file.write(write.warning("careful") + "\n")
    followed.update()
    assert (followed.progress.done, followed.progress.total) == (3, 12)
    assert followed.line() == "3/12, loss 0.5"
    assert followed.warnings == ["careful"]


@pytest.mark.parametrize("step", [SFT, REWARD, PPO])
def test_time_left_follows_the_pace_of_the_log(tmp_path, step):
    followed = StepWatch(step, tmp_path)
    with (tmp_path / "training.log").open("w") as file:
        for number in range(5):
            # one slow step among four, as the first often is, does not count
            seconds = 60.0 if number == 0 else 2.0
            values = {"loss": 1.0, "total_steps": 20}
            if step == PPO:
                values["e2e_s"] = seconds
            else:
                file.write(write.throughput(None, seconds, math.nan, 8.0, 16, 64) + "\n")
            file.write(write.metrics(number, values) + "\n")
    followed.update()
    assert followed.progress.remaining_seconds == 2 * 15
    assert "ETA 0:30" in followed.line()
    # the dashboard shows the same log in the same words
    assert progress_of(followed.model) == followed.progress


def write_metrics(folder, records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def test_final_metrics_of_each_step(tmp_path):
    write_metrics(
        tmp_path,
        [
            {"kind": "eval", "ppl": 1200.0},
            {"kind": "metrics", "step": 0},
            {"kind": "eval", "ppl": 1.2},
        ],
    )
    sft = results.final_metrics("sft", tmp_path)
    assert (sft["ppl_before"], sft["ppl_after"], sft["steps"]) == (1200.0, 1.2, 1)

    scores = {"chosen": 2.0, "rejected": -1.0, "accuracy": 0.9, "pairs": 50}
    write_metrics(tmp_path, [{"kind": "reward_eval", **scores}])
    assert results.final_metrics("reward", tmp_path)["margin"] == 3.0

    steps = [{"kind": "metrics", "step": i, "reward": i * 0.5, "kl": i * 0.1} for i in range(3)]
    write_metrics(tmp_path, steps)
    ppo = results.final_metrics("ppo", tmp_path)
    assert (ppo["reward_first"], ppo["reward_last"], ppo["kl_last"]) == (0.0, 1.0, 0.2)


def test_final_metrics_survive_nan_torn_lines_and_absence(tmp_path):
    assert results.final_metrics("sft", tmp_path) == {"steps": 0}
    nan = {"kind": "reward_eval", "chosen": "nan", "rejected": 1.0, "accuracy": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(nan) + '\n{"kind": "rew')
    metrics = results.final_metrics("reward", tmp_path)
    assert metrics["chosen"] == "nan"
    assert "margin" not in metrics
    json.dumps(metrics, allow_nan=False)


@pytest.mark.parametrize(
    ("step", "record", "told"),
    [
        ("sft", {"kind": "eval", "ppl": None}, "perplexity not measured"),
        ("reward", {"kind": "reward_eval", "accuracy": None, "pairs": 0}, "accuracy not measured"),
    ],
)
def test_a_result_over_no_rows_is_not_measured(tmp_path, step, record, told):
    assert result_line(step, results.final_metrics(step, tmp_path)) == ""
    write_metrics(tmp_path, [record, {"kind": "metrics", "step": 0, "loss": 1.0}, record])
    metrics = results.final_metrics(step, tmp_path)
    assert result_line(step, metrics) == told
    run = RunFolder(tmp_path / "runs" / "run")
    state = run.create(to_yaml(RunConfig()), "fake", list(STEPS[:3]))
    state["steps"][step] |= {"state": "done", "metrics": metrics}
    run.write_state(state)
    (past,) = history(tmp_path / "runs")
    assert past.result == told


def test_a_run_that_succeeds_ends_with_summary_and_the_line_that_opens_the_chat(fake_run, capsys):
    fake = fake_run()
    assert watch.watch(fake.run, fake.start(), json_output=False) == 0
    out, err = capsys.readouterr()
    assert f"dschat chat --path {fake.run.path}" in out
    assert "RLHF" in out
    assert "step 1 SFT" in err or "run:" in err


def test_json_is_one_document_on_stdout(fake_run, capsys):
    fake = fake_run()
    assert watch.watch(fake.run, fake.start(), json_output=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "done"
    assert document["path"] == str(fake.run.path)


def test_a_failure_is_one_line_with_cause_and_log(fake_run, capsys):
    fake = fake_run(reward="raise MemoryError")
    assert watch.watch(fake.run, fake.start(), json_output=True) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "step 2" in last
    assert "out_of_memory" in last
    assert str(fake.run.path / "step2-reward" / "training.log") in last


def test_a_step_that_may_not_write_is_named_with_line_and_advice(fake_run, read_only, capsys):
    fake = fake_run(sft=f"(Path({str(read_only)!r}) / 'model').mkdir()")
    assert watch.watch(fake.run, fake.start(), json_output=True) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "failed, permission" in last
    assert str(read_only / "model") in last
    assert "Make the path writable" in last


def test_terminal_escapes_of_a_log_do_not_reach_the_terminal(fake_run, capsys):
    fake = fake_run(sft="print('\\x1b[2J\\x1b]0;title\\x07RuntimeError: bad'); sys.exit(1)")
    watch.watch(fake.run, fake.start(), json_output=True)
    assert "\x1b" not in capsys.readouterr().err


def test_a_supervisor_that_vanishes_is_said_so(fake_run, capsys):
    fake = fake_run(sft="(folder.parent / 'ready').touch(); time.sleep(600)")
    supervisor = fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    supervisor.kill()
    assert watch.watch(fake.run, supervisor, json_output=True) == 1
    err = capsys.readouterr().err
    assert "supervisor_lost" in err
    assert str(supervisor.pid) in err
    assert fake.survivors() == []


STOPS_ON_REQUEST = """
(folder.parent / "ready").touch()
while not (folder.parent / "stop-request").exists():
    time.sleep(0.05)
"""

WATCHER = """
import subprocess, sys
from pathlib import Path
from dschat_tui.runs.folder import RunFolder
from dschat_tui.cli.watch import watch

supervisor = subprocess.Popen(sys.argv[2:], start_new_session=True)
sys.exit(watch(RunFolder(Path(sys.argv[1])), supervisor, True))
"""


class Signalled:
    """A living supervisor that keeps the signals it gets."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def poll(self) -> None:
        return None

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


@pytest.mark.parametrize("asked_by_another", [False, True])
def test_a_stop_goes_one_step_further_each_time_whoever_asked_before(tmp_path, asked_by_another):
    run = RunFolder(tmp_path / "run")
    state = run.create(to_yaml(RunConfig()), "fake", [SFT])
    if asked_by_another:
        run.request_stop(60.0)
        run.write_state({**state, "stop": {"asked": time.time(), "limit_seconds": 60.0}})
    supervisor = Signalled()
    watched = Watch(run, supervisor)
    if not asked_by_another:
        watched.ask_to_stop()
        assert (run.stop_request.exists(), supervisor.signals) == (True, [])
        assert "Ctrl-C again: without" in watched.stopping_text()
    watched.ask_to_stop()
    assert supervisor.signals == [signal.SIGTERM]
    assert "Ctrl-C again: at once" in watched.stopping_text()
    watched.ask_to_stop()
    assert supervisor.signals == [signal.SIGTERM, signal.SIGTERM]


def test_interrupting_the_command_stops_the_run_and_exits_130(fake_run):
    fake = fake_run(sft=STOPS_ON_REQUEST)
    command = [sys.executable, "-c", WATCHER, fake.run.path, *fake.supervisor_command()]
    watcher = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    fake.wait_for((fake.run.path / "ready").exists)
    os.kill(watcher.pid, signal.SIGINT)
    out, _ = watcher.communicate(timeout=180)
    assert watcher.returncode == 130
    assert json.loads(out)["state"] == "stopped"
    assert fake.survivors() == []


class Terminal:
    """A watching command in a real pseudo-terminal."""

    def __init__(self, fake) -> None:
        self.leader, follower = pty.openpty()
        watcher = [sys.executable, "-c", WATCHER, fake.run.path, *fake.supervisor_command()]
        # `setsid --ctty`: the terminal becomes the one that controls the new session
        command = ["setsid", "--ctty", *watcher]
        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=subprocess.DEVNULL,
            stderr=follower,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(follower)
        self.text = ""

    def wait_for(self, told: str) -> None:
        """Read what is shown until it holds some text."""
        end = time.monotonic() + 180
        while told not in self.text:
            assert time.monotonic() < end, self.text
            if select.select([self.leader], [], [], 0.1)[0]:
                self.text += os.read(self.leader, 65536).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        """Type some keys; \\x03 is Ctrl-C."""
        os.write(self.leader, keys.encode())

    def exit_code(self) -> int:
        """Read on until the command ends."""
        end = time.monotonic() + 180
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            if select.select([self.leader], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.text += os.read(self.leader, 65536).decode("utf-8", "replace")
        return self.process.returncode


@pytest.fixture
def terminal(fake_run):
    """A run whose step stops on request, watched in a terminal."""
    fake = fake_run(sft=STOPS_ON_REQUEST)
    terminal = Terminal(fake)
    fake.wait_for((fake.run.path / "ready").exists)
    yield fake, terminal
    os.close(terminal.leader)
    if control.has_supervisor(fake.state()):
        control.end_now(fake.run)
        fake.wait_for(lambda: not control.has_supervisor(fake.state()))


def test_ctrl_c_asks_and_d_leaves_the_run_going_on(terminal):
    fake, shown = terminal
    shown.type("\x03")
    shown.wait_for("[d]etach")
    shown.type("d\n")
    assert shown.exit_code() == 0
    assert control.has_supervisor(fake.state())
    assert len(fake.survivors()) == 1


@pytest.mark.parametrize("answer", ["s\n", "\x03"])
def test_ctrl_c_asks_and_s_or_a_second_one_stops_the_run(terminal, answer):
    fake, shown = terminal
    shown.type("\x03")
    shown.wait_for("[d]etach")
    shown.type(answer)
    assert shown.exit_code() == 130
    assert fake.state()["state"] == "stopped"
    assert fake.survivors() == []


def test_closing_the_terminal_leaves_the_run_going_on(terminal):
    fake, shown = terminal
    os.kill(shown.process.pid, signal.SIGHUP)
    assert shown.exit_code() != 0
    assert control.has_supervisor(fake.state())
    assert len(fake.survivors()) == 1
    attached = Watch(fake.run)
    attached.look()
    assert attached.running_step() == SFT
