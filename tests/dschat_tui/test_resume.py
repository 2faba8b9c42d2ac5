"""Runs that stop with a checkpoint, that lose a process, and that go on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import psutil
import pytest
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from dschat_tui.runs import control, fixes, resume, stopping
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.identity import process_identity
from dschat_tui.runs.preflight import Refusal
from dschat_tui.runs.processes import RUN_MARK, end_leftovers, leftovers
from engine.config.loading import load_config, options, to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS
from engine.log.causes import EXCEPTIONS, LINES, RETURN_CODES

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes as on Linux")

SFT = STEPS[0]

# A step that goes on from its checkpoint, and saves one when it is asked to stop.
SAVES = """
checkpoint = folder / "checkpoints" / "step-00000003"
if checkpoint.exists():
    write_model("model")
    sys.exit(0)
(folder.parent / "ready").touch()
while not (folder.parent / "stop-request").exists():
    time.sleep(0.02)
checkpoint.mkdir(parents=True)
manifest = {"step": 3, "ranks": 1, "score": None, "size": 0}
(checkpoint / "checkpoint.json").write_text(json.dumps(manifest))
"""
# A launcher with two ranks beneath it, which work until a file tells them to end.
RANKS = """
rank = (
    "import sys, time; from pathlib import Path; "
    "[time.sleep(0.02) for _ in iter(lambda: Path(sys.argv[1]).exists(), True)]"
)
go = str(folder.parent / "go")
ranks = [subprocess.Popen([sys.executable, "-c", rank, go]) for _ in range(2)]
for process in ranks:
    note_pid(process.pid)
(folder.parent / "ready").touch()
while any(process.poll() is None for process in ranks):
    if any(process.poll() for process in ranks):
        sys.exit(1)
    time.sleep(0.02)
write_model("model")
"""


def dschat(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def write_checkpoint(run: RunFolder, step=SFT, number: int = 3):
    folder = run.step_folder(step) / "checkpoints" / f"step-{number:08d}"
    folder.mkdir(parents=True)
    manifest = {"step": number, "ranks": 1, "score": None, "size": 0}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))


def failed_run(folder, cause: str, config: RunConfig | None = None) -> RunFolder:
    run = RunFolder(folder)
    state = run.create(to_yaml(config or RunConfig()), "tiny", list(STEPS[:3]))
    told = {"id": cause, "line": "the line", "advice": "the advice"}
    state["steps"]["sft"] |= {"state": "failed", "cause": told}
    run.write_state({**state, "state": "failed"})
    return run


def test_a_stop_on_request_saves_and_the_run_goes_on_to_its_end(fake_run):
    fake = fake_run(sft=SAVES)
    supervisor = fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    notes: list[str] = []
    assert stopping.stop(fake.run, False, 60.0, notes.append) == "stopped"
    assert "checkpoint" in notes[0]
    assert supervisor.wait(60) is not None
    state = fake.state()
    assert [step["state"] for step in state["steps"].values()] == ["stopped", "pending", "pending"]
    assert state["steps"]["sft"]["cause"] is None
    assert not fake.run.stop_request.exists()

    resumption = resume.prepare_resume(fake.run, [])
    assert (resumption.first, resumption.after) == (SFT, 3)
    resume.apply(resumption)
    fake.start().wait(60)
    assert fake.state()["state"] == "done"


def test_a_step_that_does_not_heed_the_request_is_ended_after_the_limit(fake_run):
    fake = fake_run(sft="(folder.parent / 'ready').touch(); time.sleep(600)")
    fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    assert stopping.stop(fake.run, False, 0.5, lambda text: None) == "stopped"
    assert fake.survivors() == []
    assert fake.state()["steps"]["sft"]["returncode"] == -signal.SIGTERM


def test_a_request_that_comes_as_a_step_ends_stops_before_the_next(fake_run):
    fake = fake_run(sft="(folder.parent / 'stop-request').touch(); write_model('model')")
    fake.start().wait(60)
    state = fake.state()
    assert state["state"] == "stopped"
    assert [step["state"] for step in state["steps"].values()] == ["done", "pending", "pending"]


def test_a_step_that_fails_while_it_is_asked_to_stop_is_failed(fake_run):
    fake = fake_run(sft="(folder.parent / 'stop-request').touch(); raise MemoryError")
    fake.start().wait(60)
    assert fake.state()["steps"]["sft"]["cause"]["id"] == "out_of_memory"


def test_the_cause_of_a_second_attempt_is_its_own(fake_run):
    script = """
if (folder.parent / "second").exists():
    raise OSError(28, "No space left on device")
(folder.parent / "second").touch()
raise MemoryError
"""
    fake = fake_run(sft=script)
    fake.start().wait(60)
    assert fake.state()["steps"]["sft"]["cause"]["id"] == "out_of_memory"
    resume.apply(resume.prepare_resume(fake.run, []))
    fake.start().wait(60)
    assert fake.state()["steps"]["sft"]["cause"]["id"] == "disk_full"


def test_two_supervisors_never_run_one_run(fake_run):
    fake = fake_run(sft=RANKS)
    first = fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    assert fake.start().wait(60) != 0
    assert "another process looks after this run" in fake.run.supervisor_log.read_text()
    assert len(fake.survivors()) == 3
    (fake.run.path / "go").touch()
    first.wait(60)
    assert fake.state()["state"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher", "supervisor"])
@pytest.mark.parametrize("seed", [1, 2])
def test_after_kill_9_nothing_is_alive_run_json_tells_so_and_the_run_goes_on(
    fake_run, victim, seed
):
    chosen = random.Random(seed)
    step = chosen.choice(["sft", "reward"])
    fake = fake_run(**{step: RANKS})
    supervisor = fake.start(grace_seconds=1.0)
    fake.wait_for((fake.run.path / "ready").exists)
    time.sleep(chosen.random())
    launcher = fake.state()["steps"][step]["process"]["pid"]
    rank = chosen.choice(psutil.Process(launcher).children()).pid
    os.kill({"rank": rank, "launcher": launcher, "supervisor": supervisor.pid}[victim], 9)
    supervisor.wait(60)
    fake.wait_for(lambda: fake.state()["state"] == "failed")
    assert fake.survivors() == []
    told = fake.state()["steps"][step]
    assert told["state"] == "failed"
    expected = {"rank": "unknown", "launcher": "killed", "supervisor": "supervisor_lost"}
    assert told["cause"]["id"] == expected[victim]

    (fake.run.path / "go").touch()
    resume.apply(resume.prepare_resume(fake.run, []))
    fake.start().wait(60)
    assert fake.state()["state"] == "done"


def test_without_guard_a_lost_run_is_shown_so_and_its_rest_is_ended_before_it_goes_on(fake_run):
    fake = fake_run(sft=RANKS)
    supervisor = fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        of_supervisor = str(fake.run.path) in arguments and "harness.py" in " ".join(arguments)
        if of_supervisor and process.pid != supervisor.pid:
            process.kill()
    supervisor.kill()
    supervisor.wait(60)
    assert control.describe(fake.run)["standing"] == "lost"
    assert len(leftovers(fake.state())) == 3
    resume.apply(resume.prepare_resume(fake.run, []))
    assert fake.survivors() == []
    (fake.run.path / "go").touch()
    fake.start().wait(60)
    assert fake.state()["state"] == "done"


def test_only_processes_that_the_run_started_are_ended(tmp_path):
    run = failed_run(tmp_path / "run", "killed")
    state = run.read_state()
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    ours = subprocess.Popen(sleep, env={**os.environ, RUN_MARK: state["id"]})
    stranger = subprocess.Popen(sleep, env={**os.environ, RUN_MARK: "another run"})
    reused = process_identity(stranger.pid)
    state["steps"]["sft"]["process"] = {**reused, "started": reused["started"] - 1000}
    try:
        assert end_leftovers(state, 5.0) == []
        assert ours.wait(60) == -signal.SIGTERM
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_no_step_can_have_another_base_and_every_step_can_have_other_micro_batches():
    fixed_by = {option.key: option.fixed_by for option in options()}
    for key, steps in fixed_by.items():
        assert steps is None or set(steps) <= {step.name for step in STEPS}, key
        if key.split(".")[0] in ("models", "seed", "alignment"):
            assert steps is None, key
        if key.endswith("micro_batch_size") or key.split(".")[0] in ("logging", "checkpoint"):
            assert steps == (), key
    # of a section, of an option in it, and of a section within a section
    assert fixed_by["critic.zero_stage"] == ("reward", "ppo")
    assert fixed_by["critic.learning_rate"] == ("ppo",)
    assert fixed_by["actor.lora.rank"] == ("sft", "ppo", "dpo")


@pytest.mark.parametrize(
    ("assignment", "under_way", "told"),
    [
        ("seed=7", False, "seed affects the whole run"),
        ("models.actor=embedded:tiny-opt", False, "models.actor affects the whole run"),
        ("data.sources=[{path: elsewhere.jsonl}]", False, "data.sources affects the whole run"),
        ("sft.learning_rate=0.5", True, "step 1 is under way"),
        ("actor.zero_stage=1", True, "step 1 is under way"),
        ("launch.num_accelerators=2", True, "step 1 is under way"),
        ("sft.learning_rat=0.5", False, "sft.learning_rate"),
    ],
)
def test_a_change_that_what_is_done_rests_on_is_refused_by_name(
    tmp_path, assignment, under_way, told
):
    run = failed_run(tmp_path / "run", "killed")
    if under_way:
        write_checkpoint(run)
    before = run.config_file.read_text()
    with pytest.raises(Refusal) as refused:
        resume.prepare_resume(run, [assignment])
    assert told in str(refused.value)
    assert run.config_file.read_text() == before


def test_every_refused_change_is_named(tmp_path):
    run = failed_run(tmp_path / "run", "killed")
    with pytest.raises(Refusal) as refused:
        resume.prepare_resume(run, ["seed=7", "data.eval_rows=8", "logging.print_loss=true"])
    assert len(refused.value.reasons) == 2
    assert "seed: 1234 -> 7" in refused.value.reasons[1]


def test_changes_that_may_be_are_written_and_remembered(tmp_path):
    run = failed_run(tmp_path / "run", "killed")
    write_checkpoint(run)
    resume.apply(resume.prepare_resume(run, ["checkpoint.interval=5", "ppo.kl_coef=0.3"]))
    config = load_config(run.config_file)
    assert (config.checkpoint.interval, config.ppo.kl_coef) == (5, 0.3)
    state = run.read_state()
    assert {change["key"] for change in state["changes"]} == {"checkpoint.interval", "ppo.kl_coef"}
    assert state["steps"]["sft"]["state"] == "pending"


def test_a_step_without_checkpoint_begins_with_empty_metrics_and_one_with_it_keeps_them(tmp_path):
    for has_checkpoint in (False, True):
        run = failed_run(tmp_path / f"run{has_checkpoint}", "killed")
        if has_checkpoint:
            write_checkpoint(run)
        run.step_folder(SFT).mkdir(exist_ok=True)
        metrics = run.step_folder(SFT) / "metrics.jsonl"
        metrics.write_text("{}")
        resume.apply(resume.prepare_resume(run, []))
        assert metrics.exists() == has_checkpoint


def test_each_fix_belongs_to_a_known_cause_and_changes_the_configuration():
    known = {cause.id for cause in (*EXCEPTIONS, *LINES)} | {id for id, _ in RETURN_CODES.values()}
    assert set(fixes.FIXES) <= known
    config = RunConfig()
    config.launch.master_port = 29500
    config.actor.offload = config.critic.offload = True
    for cause in fixes.FIXES:
        for step in STEPS:
            assert fixes.fix_for(cause, config, step.name), (cause, step.name)


def test_less_memory_is_asked_for_until_nothing_is_left_to_try():
    config, tried = RunConfig(), []
    for _ in range(20):
        change = fixes.fix_for("out_of_memory", config, "sft")
        if not change:
            break
        tried.append(change)
        for key, value in change.items():
            group, name = key.split(".")
            setattr(getattr(config, group), name, value)
    assert config.sft.micro_batch_size == 1
    assert config.actor.gradient_checkpointing
    assert config.actor.offload
    assert fixes.fix_for("out_of_memory", config, "sft") == {}
    assert len(tried) == len({json.dumps(change) for change in tried})


def test_a_fix_that_no_checkpoint_fits_begins_the_step_anew(tmp_path):
    run = failed_run(tmp_path / "run", "diverged")
    write_checkpoint(run)
    before = load_config(run.config_file).sft.learning_rate
    resumption = resume.prepare_resume(run, [], fix=True)
    assert [change.key for change in resumption.changes] == ["sft.learning_rate"]
    assert (resumption.restarted, resumption.after) == (SFT, None)
    resume.apply(resumption)
    assert load_config(run.config_file).sft.learning_rate < before
    assert run.checkpoints(SFT) == []


def test_a_fix_of_what_no_option_mends_is_refused_with_the_advice(tmp_path):
    run = failed_run(tmp_path / "run", "network")
    with pytest.raises(Refusal, match="the advice"):
        resume.prepare_resume(run, [], fix=True)


def test_runs_are_listed_and_shown_by_name_and_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed_run(tmp_path / "output" / "one", "out_of_memory")
    failed_run(tmp_path / "elsewhere" / "two", "killed")
    assert [item["name"] for item in json.loads(dschat("runs", "list", "--json").stdout)] == ["one"]
    listed = json.loads(dschat("runs", "list", "output", "elsewhere/two", "--json").stdout)
    assert {item["name"]: item["standing"] for item in listed} == {"one": "failed", "two": "failed"}
    shown = dschat("runs", "show", "one").stdout
    assert "out_of_memory" in shown
    assert "dschat run --resume" in shown
    document = json.loads(dschat("runs", "show", "output/one", "--json").stdout)
    assert document["state"]["steps"]["sft"]["cause"]["line"] == "the line"


@pytest.mark.parametrize("command", ["show", "attach", "stop", "resume", "delete"])
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    result = dschat("runs", command, "none")
    assert result.exit_code == 2
    assert "none is no run" in result.stderr


@pytest.mark.parametrize("command", ["attach", "stop"])
def test_a_run_that_is_not_going_on_has_nothing_to_attach_or_stop(tmp_path, command):
    run = failed_run(tmp_path / "run", "killed")
    result = dschat("runs", command, str(run.path))
    assert result.exit_code == 2
    assert "is not running" in result.stderr


def test_delete_asks_removes_what_the_run_made_and_keeps_the_rest(tmp_path):
    run = failed_run(tmp_path / "run", "killed")
    write_checkpoint(run)
    (run.path / "notes.txt").write_text("mine")
    refused = dschat("runs", "delete", str(run.path))
    assert refused.exit_code == 2
    assert run.state_file.exists()
    assert "notes.txt" in dschat("runs", "delete", str(run.path), "--yes").stdout
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]


def test_a_run_that_goes_on_is_neither_deleted_nor_resumed(fake_run):
    fake = fake_run(sft=RANKS)
    supervisor = fake.start()
    fake.wait_for((fake.run.path / "ready").exists)
    for command in (["delete", "--yes"], ["resume"]):
        result = dschat("runs", *command, str(fake.run.path))
        assert result.exit_code == 2
        assert "is running" in result.stderr
    shown = json.loads(dschat("runs", "show", str(fake.run.path), "--json").stdout)
    assert shown["standing"] == "running"
    result = dschat("runs", "stop", str(fake.run.path), "--now", "--json")
    assert json.loads(result.stdout)["standing"] == "stopped"
    assert fake.survivors() == []
    supervisor.wait(60)
