"""The command line: what it imports, what it prints, how it exits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from dschat_tui.runs import preflight, supervisor
from engine.config.loading import profile_names
from engine.log import write

HEAVY = ("torch", "transformers", "deepspeed", "datasets", "textual", "rich", "pydantic")
ROOT = Path(__file__).parents[2]


def dschat(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def modules_after(code: str) -> set[str]:
    check = f"{code}\nimport sys, json\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_command_line_brings_in_nothing_heavy():
    assert not modules_after("import dschat_tui.cli.main") & set(HEAVY)


def test_help_brings_in_nothing_heavy():
    code = """
import contextlib, io, sys
from dschat_tui.cli.main import app
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    app(["--help"])
"""
    assert not modules_after(code) & set(HEAVY)


def test_the_checks_before_a_run_and_its_supervisor_need_no_torch():
    code = "import dschat_tui.runs.preflight, dschat_tui.runs.supervisor, dschat_tui.cli.watch"
    loaded = modules_after(code)
    assert not loaded & {"torch", "transformers", "deepspeed", "datasets", "textual"}


@pytest.mark.parametrize(
    "command",
    [
        *([], ["run"], ["metrics"], ["eval"], ["chat"], ["options"], ["profiles", "show"]),
        *([["runs", name] for name in ("list", "show", "attach", "stop", "resume", "delete")]),
        *(["plan"], ["doctor"]),
    ],
)
def test_every_command_has_help(command):
    result = dschat(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--profile", "tniy"], "did you mean tiny"),
        (["--set", "ppo.kl_ceof=1"], "ppo.kl_coef"),
        (["--set", "ppo.kl_coef=much"], "must be a valid number"),
        (["--set", "ppo.kl_coef"], "key=value"),
        (["--set", "actor.offload=true"], "actor.zero_stage=2"),
        (["--steps", "4"], "--steps 4"),
        (["--steps", "3"], "models.sft"),
        (["--data", "./none.json"], "none.json"),
        (["--no-such-option"], "--no-such-option"),
        (["--resume", "none"], "none is no run"),
        (["--resume", "none", "--steps", "1"], "leave out --steps"),
        (["--fix"], "--resume RUN"),
    ],
)
def test_what_cannot_run_is_refused_with_2_on_stderr_and_starts_nothing(elsewhere, arguments, told):
    result = dschat("run", "--json", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""
    assert list(elsewhere.iterdir()) == []


def test_dry_run_shows_a_configuration_that_loads_and_the_commands_and_writes_nothing(elsewhere):
    result = dschat("run", "--dry-run", "--json", "--set", "ppo.kl_coef=0.3", "--steps", "1,2")
    document = json.loads(result.stdout)
    assert document["config"]["ppo"]["kl_coef"] == 0.3
    assert list(document["commands"]) == ["sft", "reward"]
    assert document["commands"]["sft"][-1] == document["output"]
    assert list(elsewhere.iterdir()) == []
    shown = dschat("run", "--dry-run").stdout
    assert "engine.steps.ppo" in shown
    assert "kl_coef" in shown


def test_a_warm_up_that_outlasts_training_is_noted_before_the_start(elsewhere):
    changes = ["--set", "ppo.scheduler=linear", "--set", "ppo.warmup_steps=100"]
    changes += ["--set", "ppo.max_steps=20", "--set", "ppo.inner_epochs=2"]
    result = dschat("run", "--dry-run", "--json", *changes)
    assert "note: ppo.warmup_steps=100, but training has only 40 optimizer steps" in result.stderr
    assert json.loads(result.stdout)["commands"]
    assert "warmup" not in dschat("run", "--dry-run", "--json", *changes, "--steps", "1,2").stderr


def test_data_given_replaces_the_sources_of_the_profile(elsewhere):
    rows = [{"prompt": "p", "chosen": "c", "rejected": "r"}]
    for name in ("a.json", "b.json"):
        (elsewhere / name).write_text(json.dumps(rows))
    result = dschat("run", "--dry-run", "--json", "--data", "a.json", "--data", "b.json")
    sources = json.loads(result.stdout)["config"]["data"]["sources"]
    paths = [source["path"] for source in sources]
    assert paths == [str(elsewhere / "a.json"), str(elsewhere / "b.json")]


def test_a_run_without_output_takes_the_next_free_name(elsewhere):
    outputs = []
    for _ in range(3):
        result = dschat("run", "--dry-run", "--json")
        outputs.append(json.loads(result.stdout)["output"])
        Path(outputs[-1]).mkdir(parents=True)
    assert [Path(output).name for output in outputs] == ["tiny", "tiny-2", "tiny-3"]


def test_starts_at_once_train_in_folders_of_their_own_or_are_refused(elsewhere, monkeypatch):
    started = []
    monkeypatch.setattr(supervisor, "start", lambda run: started.append(run.path.name))
    prepare = preflight.prepare

    def while_another_starts(config, output, numbers):
        plan = prepare(config, output, numbers)
        if output.name != "tiny-2":
            prepare(config, output, numbers).create("the other")
        return plan

    monkeypatch.setattr(preflight, "prepare", while_another_starts)
    result = dschat("run", "--detach", "--json")
    assert json.loads(result.stdout)["name"] == "tiny-2"
    result = dschat("run", "--detach", "--json", "--output", "mine")
    assert result.exit_code == 2
    assert "another process has just started a run there" in result.stderr
    assert started == ["tiny-2"]


def write_log(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        write.running_training(),
        write.evaluating("perplexity", 0, 1),
        write.perplexity(float("nan"), float("nan")),
        write.metrics(0, {"loss": 2.5}),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_metrics_of_a_log_a_step_and_a_run_as_json_and_as_text(tmp_path):
    log = write_log(tmp_path / "run" / "step1-sft" / "training.log")
    documents = [json.loads(dschat("metrics", str(p), "--json").stdout) for p in (log, log.parent)]
    assert documents[0] == documents[1]
    assert documents[0]["step"] == "sft"
    assert documents[0]["records"][0]["ppl"] == "nan"
    run = json.loads(dschat("metrics", str(tmp_path / "run"), "--json").stdout)
    assert list(run["steps"]) == ["sft"]
    text = dschat("metrics", str(tmp_path / "run")).stdout
    assert "step sft" in text
    assert ["ppl", "nan", "nan", "-", "-"] in [line.split() for line in text.splitlines()]
    assert ["loss", "2.5", "2.5", "2.5", "2.5"] in [line.split() for line in text.splitlines()]


@pytest.mark.parametrize("command", ["metrics", "eval"])
def test_a_path_without_a_run_is_refused(tmp_path, command):
    for path in (tmp_path, tmp_path / "none"):
        result = dschat(command, str(path), "--json")
        assert result.exit_code == 2
        assert str(path) in result.stderr
        assert result.stdout == ""


def test_profiles_are_listed_with_what_they_say_and_shown_as_they_are():
    rows = json.loads(dschat("profiles", "list", "--json").stdout)
    assert sorted(row["name"] for row in rows) == profile_names()
    assert all(row["description"] for row in rows)
    assert "tiny" in dschat("profiles", "list").stdout
    shown = dschat("profiles", "show", "tiny").stdout
    assert shown == (ROOT / "profiles" / "tiny.yaml").read_text()
    assert dschat("profiles", "show", "tyni").exit_code == 2


def test_an_unknown_model_is_refused_with_the_known_ones():
    result = dschat("models", "get", "no-such-model")
    assert result.exit_code == 2
    assert "smollm2-135m" in result.stderr
    assert result.stdout == ""


def test_options_as_json_hold_every_option():
    rows = json.loads(dschat("options", "--json").stdout)
    assert "ppo.kl_coef" in {row["key"] for row in rows}
    assert dschat("options", "no.such").exit_code == 2


def test_chat_refuses_a_path_without_a_model(tmp_path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "chatbot.py"), "--path", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 2
    assert "none" in result.stderr
    assert result.stdout == ""
