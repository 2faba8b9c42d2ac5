"""The supervisor with fake steps: no process survives, and run.json tells the truth."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

import psutil
import pytest

from dschat_tui.runs.identity import is_alive

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="process groups")

# A child that ignores SIGTERM, and a grandchild that left the group for a session of its own.
STUBBORN_TREE = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = "import os, signal, time; os.setsid(); signal.signal(15, signal.SIG_IGN); "
grandchild += "time.sleep(600)"
child = f"import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
child += f"p = subprocess.Popen([sys.executable, '-c', {grandchild!r}]); "
child += "print(p.pid, flush=True); time.sleep(600)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
note_pid(process.pid)
note_pid(int(process.stdout.readline()))
time.sleep(0.5)
(folder.parent / "ready").touch()
"""


def test_steps_run_in_order_and_end_done(fake_run):
    fake = fake_run()
    assert fake.start().wait(60) == 0
    state = fake.state()
    assert state["state"] == "done"
    assert [step["state"] for step in state["steps"].values()] == ["done"] * 3
    ends = [step["ended"] for step in state["steps"].values()]
    starts = [step["started"] for step in state["steps"].values()]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert [step["returncode"] for step in state["steps"].values()] == [0, 0, 0]


def test_output_of_a_step_goes_to_its_log_and_stdin_is_empty(fake_run):
    script = "print('out'); print('err', file=sys.stderr); print(repr(sys.stdin.read()));"
    fake = fake_run(sft=script + "write_model('model')")
    fake.start().wait(60)
    log = (fake.run.path / "step1-sft" / "training.log").read_text()
    assert sorted(log.split()) == ["''", "err", "out"]


def test_exit_0_with_an_incomplete_model_is_failed_and_later_steps_do_not_run(fake_run):
    torn = "write_model('model'); (folder / 'model' / 'model.safetensors').write_bytes(b'12345678')"
    fake = fake_run(sft=torn)
    fake.start().wait(60)
    state = fake.state()
    assert state["state"] == "failed"
    assert state["steps"]["sft"]["returncode"] == 0
    assert state["steps"]["sft"]["cause"]["id"] == "incomplete_model"
    assert state["steps"]["reward"]["state"] == "pending"
    assert not (fake.run.path / "step2-reward").exists()


def test_a_complete_model_with_another_exit_code_is_failed(fake_run):
    fake = fake_run(reward="write_model('model'); sys.exit(3)")
    fake.start().wait(60)
    state = fake.state()
    assert [step["state"] for step in state["steps"].values()] == ["done", "failed", "pending"]
    assert state["steps"]["reward"]["returncode"] == 3


def test_the_cause_comes_from_the_log(fake_run):
    fake = fake_run(sft="raise FileNotFoundError(2, 'No such file or directory', '/data/x.json')")
    fake.start().wait(60)
    cause = fake.state()["steps"]["sft"]["cause"]
    assert cause["id"] == "missing_file"
    assert "/data/x.json" in cause["line"]
    assert cause["advice"]


# Mapped memory that its file has no room for: what a small /dev/shm does to ranks.
TOUCHES_LOST_MEMORY = """
import mmap
with (folder / "shared").open("wb+") as file:
    file.truncate(4096)
    shared = mmap.mmap(file.fileno(), 4096)
    file.truncate(0)
shared[0] = 1
"""


@pytest.mark.parametrize(
    ("dies", "cause"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "killed"), (TOUCHES_LOST_MEMORY, "bus_error")],
    ids=["SIGKILL", "SIGBUS"],
)
def test_death_by_a_signal_is_named_though_the_log_says_nothing(fake_run, dies, cause):
    fake = fake_run(sft=dies)
    fake.start().wait(60)
    assert fake.state()["steps"]["sft"]["cause"]["id"] == cause


def test_a_program_that_is_missing_fails_the_step(fake_run):
    fake = fake_run()
    fake.start(program="/no/such/program").wait(60)
    cause = fake.state()["steps"]["sft"]["cause"]
    assert cause["id"] == "missing_program"
    assert "/no/such/program" in cause["line"]


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_a_stop_ends_the_whole_tree_also_what_ignores_sigterm_or_left_the_group(fake_run):
    fake = fake_run(sft=STUBBORN_TREE + "time.sleep(600)")
    supervisor = fake.start(grace_seconds=1.0)
    fake.wait_for((fake.run.path / "ready").exists)
    assert len(fake.survivors()) == 3
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(60)
    assert fake.survivors() == []
    state = fake.state()
    assert state["state"] == "stopped"
    assert [step["state"] for step in state["steps"].values()] == ["stopped", "pending", "pending"]


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_a_dead_leader_is_no_empty_group(fake_run):
    fake = fake_run(sft=STUBBORN_TREE + "os._exit(1)")
    supervisor = fake.start(grace_seconds=1.0)
    supervisor.wait(60)
    assert (fake.run.path / "ready").exists()
    assert fake.survivors() == []
    assert fake.state()["steps"]["sft"]["state"] == "failed"


def test_a_second_request_skips_the_grace(fake_run):
    fake = fake_run(
        sft="signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(folder.parent / 'ready').touch()\ntime.sleep(600)"
    )
    supervisor = fake.start(grace_seconds=500.0)
    fake.wait_for((fake.run.path / "ready").exists)
    supervisor.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert supervisor.poll() is None
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(60)
    assert fake.survivors() == []


def test_a_step_that_ends_within_the_grace_is_not_killed(fake_run):
    script = """
def end(number, frame):
    (folder / "saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, end)
(folder.parent / "ready").touch()
time.sleep(600)
"""
    fake = fake_run(sft=script)
    supervisor = fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    supervisor.send_signal(signal.SIGTERM)
    supervisor.wait(60)
    assert (fake.run.path / "step1-sft" / "saved").exists()
    assert fake.state()["steps"]["sft"]["returncode"] == 1


def test_a_hangup_does_not_end_the_run(fake_run):
    fake = fake_run(
        sft="(folder.parent / 'ready').touch()\n"
        "while not (folder.parent / 'go').exists(): time.sleep(0.05)\nwrite_model('model')"
    )
    supervisor = fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    supervisor.send_signal(signal.SIGHUP)
    (fake.run.path / "go").touch()
    assert supervisor.wait(60) == 0
    assert fake.state()["state"] == "done"


def test_while_a_step_runs_run_json_names_its_processes(fake_run):
    fake = fake_run(
        sft="(folder.parent / 'ready').touch()\n"
        "while not (folder.parent / 'go').exists(): time.sleep(0.05)\nwrite_model('model')"
    )
    supervisor = fake.start()
    fake.wait_for(lambda: fake.state()["steps"]["sft"]["process"] is not None)
    state = fake.state()
    assert state["state"] == "running"
    assert state["supervisor"]["pid"] == supervisor.pid
    assert is_alive(state["supervisor"])
    assert is_alive(state["steps"]["sft"]["process"])
    (fake.run.path / "go").touch()
    supervisor.wait(60)
    assert not is_alive(state["steps"]["sft"]["process"])


def test_run_json_is_whole_at_every_moment(fake_run):
    fake = fake_run()
    stop, seen = threading.Event(), 0

    def read():
        nonlocal seen
        while not stop.is_set():
            json.loads(fake.run.state_file.read_text())
            seen += 1
            time.sleep(0.001)

    reader_error = []

    def guarded():
        try:
            read()
        except ValueError as error:
            reader_error.append(error)

    reader = threading.Thread(target=guarded)
    reader.start()
    state = fake.state()
    for number in range(200):
        fake.run.write_state({**state, "padding": "x" * (number * 50)})
    stop.set()
    reader.join()
    assert seen > 10
    assert not reader_error
    assert [p.name for p in fake.run.path.iterdir() if p.name.startswith(".run.json")] == []


def test_another_process_with_the_same_pid_is_not_taken_for_ours(fake_run):
    started = psutil.Process(os.getpid()).create_time()
    assert is_alive({"pid": os.getpid(), "started": started})
    assert not is_alive({"pid": os.getpid(), "started": started - 60})
    assert not is_alive({"pid": 2**22 + 1, "started": started})
    assert not is_alive(None)
