"""Gates between steps: a run waits or warns, and goes on with a reason that is kept."""

from __future__ import annotations

import json
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from dschat_tui.cli import watch
from dschat_tui.cli.main import app
from dschat_tui.runs import control, gates, resume
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.preflight import Refusal
from dschat_tui.runs.state import parse_run_state
from engine.config.loading import load_config, load_profile, to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS

SFT, REWARD, PPO = STEPS[:3]


def told(**values: object) -> str:
    """What makes a fake step tell a line of metrics."""
    line = json.dumps(values)
    return f"(folder / 'metrics.jsonl').open('a').write({line!r} + '\\n')\n"


def sft(perplexity: object) -> str:
    return told(kind="eval", ppl=perplexity) + "write_model('model')"


def reward(accuracy: float, margin: float) -> str:
    scores = {"accuracy": accuracy, "chosen": margin, "rejected": 0.0}
    return told(kind="reward_eval", **scores) + "write_model('model')"


def gated(**thresholds: object) -> RunConfig:
    config = RunConfig()
    for name, value in thresholds.items():
        setattr(config.gates, name, value)
    return config


def paused_run(folder) -> RunFolder:
    """A run that waits after step 1, as its supervisor leaves it."""
    run = RunFolder(folder)
    config = gated(sft_perplexity=2.0)
    state = run.create(to_yaml(config), "fake", list(STEPS[:3]))
    model = run.step_folder(SFT) / "model"
    model.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    metrics = {"ppl_after": 3.5}
    state["steps"]["sft"] |= {"state": "done", "metrics": metrics}
    state["gates"] = gates.missed(config, "sft", metrics)
    run.write_state({**state, "state": "paused"})
    return run


def dschat(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_a_perplexity_misses_its_gate_exactly_where_it_is_above(reading: float, bar: float):
    missed = gates.missed(gated(sft_perplexity=bar), "sft", {"ppl_after": reading})
    assert bool(missed) == (reading > bar)
    if missed:
        assert (missed[0]["reading"], missed[0]["threshold"]) == (reading, bar)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(-5, 5), st.floats(-5, 5))
def test_each_gate_of_step_2_is_held_against_its_own_reading(
    accuracy: float, lowest: float, margin: float, narrowest: float
):
    config = gated(reward_accuracy=lowest, reward_margin=narrowest)
    missed = gates.missed(config, "reward", {"accuracy": accuracy, "margin": margin})
    names = {record["gate"].removeprefix("gates.reward_") for record in missed}
    assert ("accuracy" in names) == (accuracy < lowest)
    assert ("margin" in names) == (margin < narrowest)


@pytest.mark.parametrize("metrics", [{}, {"ppl_after": "nan"}, {"ppl_after": math.nan}])
def test_a_gate_without_a_usable_reading_is_missed(metrics: dict):
    (record,) = gates.missed(gated(sft_perplexity=2.0), "sft", metrics)
    told = gates.told(record)
    assert "gates.sft_perplexity" in told
    assert ("is nan" if metrics else "was not measured") in told


def test_without_thresholds_nothing_is_missed():
    for step in STEPS:
        assert gates.missed(RunConfig(), step.name, {"ppl_after": "nan", "accuracy": 0.0}) == []


def test_the_embedded_profile_has_gates_that_a_whole_run_reaches():
    config = load_profile("tiny")
    # the least that the whole run is tested to reach
    assert gates.missed(config, "sft", {"ppl_after": 1.25}) == []
    assert gates.missed(config, "reward", {"accuracy": 0.95}) == []
    assert gates.missed(config, "sft", {"ppl_after": 20.0})
    assert gates.missed(config, "reward", {"accuracy": 0.6})


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_a_run_waits_at_a_gate_and_goes_on_with_a_reason(fake_run, capsys):
    fake = fake_run(
        gated(sft_perplexity=2.0, reward_accuracy=0.9), sft=sft(3.5), reward=reward(0.5, 1.0)
    )
    assert watch.watch(fake.run, fake.start(), json_output=False) == 1
    out, err = capsys.readouterr()
    assert "perplexity 3.5 is above 2 (gates.sft_perplexity)" in out
    assert "--accept" in err
    state = fake.state()
    assert state["state"] == "paused"
    assert [step["state"] for step in state["steps"].values()] == ["done", "pending", "pending"]

    with pytest.raises(Refusal, match="is above 2"):
        resume.prepare_resume(fake.run, [])
    resumption = resume.prepare_resume(fake.run, [], accept="a trial")
    assert resumption.first == REWARD
    resume.apply(resumption)
    fake.start().wait(60)
    state = fake.state()
    assert state["state"] == "paused"
    first, second = state["gates"]
    assert first["accepted"]["reason"] == "a trial"
    assert (second["gate"], second["reading"]) == ("gates.reward_accuracy", 0.5)

    resume.apply(resume.prepare_resume(fake.run, [], accept="still a trial"))
    fake.start().wait(60)
    state = fake.state()
    assert state["state"] == "done"
    assert [g["accepted"]["reason"] for g in state["gates"]] == ["a trial", "still a trial"]


@pytest.mark.skipif(sys.platform == "win32", reason="process groups")
def test_with_warn_the_miss_is_noted_and_the_run_goes_on(fake_run, capsys):
    fake = fake_run(gated(sft_perplexity=2.0, action="warn"), sft=sft(3.5))
    assert watch.watch(fake.run, fake.start(), json_output=False) == 0
    assert "is above 2 (gates.sft_perplexity)" in capsys.readouterr().out
    (record,) = fake.state()["gates"]
    assert (record["action"], record["accepted"]) == ("warn", None)


def test_a_reason_is_asked_for_and_noted_by_the_command(tmp_path, monkeypatch):
    run = paused_run(tmp_path / "run")
    started: list[RunFolder] = []
    monkeypatch.setattr("dschat_tui.runs.supervisor.start", started.append)
    path = str(run.path)
    for refused in (
        dschat("runs", "resume", path, "--detach"),
        dschat("runs", "resume", path, "--detach", "--accept", " "),
        dschat("run", "--accept", "why"),
    ):
        assert refused.exit_code == 2
        assert "--accept" in refused.stderr
    assert not started
    assert dschat("run", "--resume", path, "--detach", "--accept", "small trial").exit_code == 0
    assert [folder.path for folder in started] == [run.path]
    state = run.read_state()
    assert state is not None
    assert state["gates"][0]["accepted"]["reason"] == "small trial"
    assert state["gates"][0]["accepted"]["time"] >= state["gates"][0]["time"]


def test_a_run_that_waits_at_no_gate_takes_no_reason(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.write_state(
        {**run.create(to_yaml(RunConfig()), "fake", list(STEPS[:3])), "state": "stopped"}
    )
    with pytest.raises(Refusal, match="waits at no gate"):
        resume.prepare_resume(run, [], accept="why not")


@pytest.mark.parametrize("change", ["gates.sft_perplexity=4", "gates.action=warn"])
def test_a_gate_that_is_moved_lets_the_run_go_on_and_says_so(tmp_path, change: str):
    run = paused_run(tmp_path / "run")
    with pytest.raises(Refusal):
        resume.prepare_resume(run, ["gates.sft_perplexity=3"])
    resume.apply(resume.prepare_resume(run, [change]))
    state = run.read_state()
    assert state is not None
    assert change.partition("=")[0] in state["gates"][0]["accepted"]["reason"]
    assert gates.waiting(state) == []
    assert load_config(run.config_file).gates != gated(sft_perplexity=2.0).gates


def test_lists_tell_a_paused_run_and_the_way_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = paused_run(tmp_path / "output" / "waits")
    assert control.describe(run)["standing"] == "paused"
    assert "paused" in dschat("runs", "list").stdout
    shown = dschat("runs", "show", "waits").stdout
    assert "perplexity 3.5" in shown
    assert "--accept" in shown


def test_records_that_are_not_understood_are_left_out():
    config = gated(sft_perplexity=2.0)
    good = gates.missed(config, "sft", {"ppl_after": 3.5})
    odd = [None, 3, {}, {"gate": "gates.sft_perplexity"}, {**good[0], "gate": "gates.other"}]
    content = {"gates": [*odd, *good], "steps": {"sft": {"state": "done"}}}
    state = parse_run_state(json.dumps(content))
    assert gates.known(state) == gates.waiting(state) == good
    for content in ({"gates": "none"}, {}):
        assert gates.known(parse_run_state(json.dumps(content))) == []
