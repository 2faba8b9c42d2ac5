"""`dschat plan`: what it reads, what it says, how it exits."""

from __future__ import annotations

import json
import shutil

import pytest
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from dschat_tui.dashboard.screens.start import work as start_work
from dschat_tui.runs import memory_plan, supervisor
from engine.config.loading import load_profile
from engine.models import embedded

LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def dschat(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def large(tmp_path) -> str:
    """The setting for a model of which there is a config.json alone."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    return f"models.actor={tmp_path}"


def test_a_config_json_alone_is_enough_and_steps_are_told_apart(large):
    result = dschat("plan", "--set", large, "--memory-gib", "80", "--set", "dtype=bf16", "--json")
    document = json.loads(result.stdout)
    assert [step["step"] for step in document["steps"]] == ["sft", "reward", "ppo"]
    weights = [
        item["device_bytes"]
        for item in document["steps"][0]["items"]
        if (item["model"], item["what"]) == ("actor", "weights")
    ]
    assert weights == [pytest.approx(2 * 6.74e9, rel=0.01)]
    assert not document["fits"]


def test_what_does_not_fit_comes_with_a_change_that_does(large):
    ample = json.loads(dschat("plan", "--set", large, "--memory-gib", "4000", "--json").stdout)
    needed = max(step["device_bytes"] for step in ample["steps"]) / 2**30
    arguments = ["plan", "--set", large, "--memory-gib", str(0.95 * needed), "--json"]
    refused = json.loads(dschat(*arguments).stdout)
    assert not refused["fits"]
    assert refused["change"]
    settings = [f"--set={key}={json.dumps(value)}" for key, value in refused["change"].items()]
    assert json.loads(dschat(*arguments, *settings).stdout)["fits"]


def test_more_memory_fits_what_less_does_not(large):
    fits = [
        json.loads(dschat("plan", "--set", large, "--memory-gib", size, "--json").stdout)["fits"]
        for size in ("40", "4000")
    ]
    assert fits == [False, True]


def test_the_table_names_each_step_the_verdict_and_the_change(large):
    result = dschat("plan", "--set", large, "--memory-gib", "40")
    assert result.exit_code == 1
    for word in ("sft", "reward", "ppo", "Adam moments", "does not fit"):
        assert word in result.stdout
    result = dschat("plan", "--set", large, "--memory-gib", "4000")
    assert result.exit_code == 0
    assert "\nfits:" in result.stdout


def test_a_run_that_does_not_fit_is_refused_unless_the_check_is_skipped(tmp_path, monkeypatch):
    shutil.copytree(embedded.build("tiny-llama"), tmp_path / "large")
    (tmp_path / "large" / "config.json").write_text(json.dumps(LLAMA_7B))
    large = f"models.actor={tmp_path / 'large'}"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervisor, "start", lambda run: None)
    monkeypatch.setattr(memory_plan, "gpu_memory", lambda: 40 * 2**30)
    result = dschat("run", "--set", large, "--detach")
    assert result.exit_code == 2
    assert "does not fit" in result.stderr
    assert "--skip-memory-check" in result.stderr
    assert not (tmp_path / "output").exists()
    result = dschat("run", "--set", large, "--detach", "--skip-memory-check")
    assert result.exit_code == 0, result.stderr


@pytest.mark.slow
def test_without_a_critic_the_plan_says_what_that_saves(large):
    options = ("plan", "--set", large, "--memory-gib", "40")
    grpo = ("--set", "rlhf.algorithm=grpo")
    own, ppo = (
        json.loads(dschat(*options, *more, "--json").stdout)["steps"][-1]["device_bytes"] / 2**30
        for more in (grpo, ())
    )
    text = dschat(*options, *grpo).stdout
    (line,) = [line for line in text.splitlines() if line.startswith("step 3 takes")]
    said = [float(word) for word in line.replace(",", "").split() if word[0].isdigit()]
    assert said == pytest.approx(
        [
            3,
            own,
            ppo,
        ],
        rel=0.01,
    )
    assert own < 0.8 * ppo
    assert "without a critic" not in dschat(*options).stdout


def test_without_a_gpu_the_plan_is_held_against_host_memory(large, monkeypatch):
    monkeypatch.setattr(memory_plan, "gpu_memory", lambda: None)
    document = json.loads(dschat("plan", "--set", large, "--json").stdout)
    assert document["device"] == "cpu"
    assert all(step["device_bytes"] == 0 for step in document["steps"])
    assert all(step["host_bytes"] > 0 for step in document["steps"])


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("models.actor=/no/such/model", "/no/such/model"),
        ("actor.offload=true", "actor.zero_stage=2"),
        ("actor.offlaod=true", "actor.offload"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_2(setting, told):
    result = dschat("plan", "--set", setting, "--json")
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


def test_of_an_unknown_family_it_is_said_that_there_is_no_plan_and_that_it_trains(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    for options in ([], ["--json"]):
        result = dschat("plan", "--set", f"models.actor={tmp_path}", *options)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert "there is no plan" in result.stderr
        assert "'phi3'" in result.stderr
        assert "trains all the same" in result.stderr
        assert "Give a folder" not in result.stderr


def test_the_form_says_so_too_and_shows_no_number(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi3"}))
    config = load_profile("tiny", [f"models.actor={tmp_path}"])
    planned = start_work.planned(config, tmp_path / "run", is_searched=False)
    assert planned.report is None
    need = start_work.need(config)
    assert (need.size, need.fits) == ("?", None)
    for told in (planned.problem, need.problem):
        assert "there is no plan" in told
        assert "trains all the same" in told
    assert start_work.effect(config, "actor.zero_stage", 3) == ""
