"""Every profile can be used; a person's own extend and shadow them; the list, the comparison."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dschat_tui import profiles
from dschat_tui.cli import profiles_report
from dschat_tui.cli.main import app
from dschat_tui.runs import memory_plan, preflight
from dschat_tui.runs.fixes import fix_for
from dschat_tui.runs.models import Origin
from engine.config.loading import (
    ConfigError,
    apply_overrides,
    load_profile,
    profile_names,
    read_profile,
    resolve,
    user_profiles,
)
from engine.config.rules import check
from engine.planning import ModelShape, known_config

ROOT = Path(__file__).parents[2]


def dschat(*arguments: str, **options):
    return CliRunner().invoke(app, list(arguments), **options)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Writes profiles of the user's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    def write(name: str, text: str) -> Path:
        path = user_profiles() / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.mark.parametrize("name", profile_names())
def test_a_profile_loads_keeps_the_rules_fits_and_states_its_plan(name):
    profile = profiles.examine(name)
    assert not profile.problems
    assert profile.report is not None
    assert profile.report.fits
    assert profile.first_sentence
    stated = profiles.plan_sentence(profile.report)
    assert profiles.states_its_plan(profile), f"its comment should say: {stated}"
    if profile.group in ("of DeepSpeed-Chat", "of today"):
        assert "Plan, GiB of an accelerator:" in profile.comment, f"add to its comment: {stated}"


def test_profiles_of_today_are_for_known_memory_and_leave_a_tenth_of_it():
    found = [profile for profile in profiles.every() if profile.group == "of today"]
    assert {profile.devices for profile in found} == {"1 x 24 GB", "1 x 80 GB", "8 x 80 GB"}
    for profile in found:
        assert profile.report is not None
        assert profile.report.plan.device_bytes < 0.91 * profile.report.memory_bytes, profile.name


@pytest.mark.slow
def test_profiles_are_checked_without_torch_and_without_a_network():
    code = """
import socket, sys
def refuse(*arguments, **options):
    raise OSError("no network here")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
from typer.testing import CliRunner
from dschat_tui.cli.main import app
from dschat_tui.runs import preflight
from dschat_tui.runs.fixes import fix_for
result = CliRunner().invoke(app, ["profiles", "validate"])
assert not {"torch", "transformers", "deepspeed", "datasets"} & set(sys.modules)
print(result.output)
sys.exit(result.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(profile_names())} profiles, none with problems" in done.stdout


def test_a_profile_extends_another_key_by_key(own):
    own("base", "seed: 7\nactor: {zero_stage: 2, lora: {rank: 4}}\ndata: {sources: [a, b]}\n")
    own("child", "extends: base\nactor: {lora: {only: true}}\ndata: {sources: [c]}\n")
    config = load_profile("child")
    assert config.seed == 7
    assert (config.actor.zero_stage, config.actor.lora.rank, config.actor.lora.only) == (2, 4, True)
    assert [source.path for source in config.data.sources] == ["c"]
    assert load_profile("child", ["actor.lora.rank=8"]).actor.lora.rank == 8


def test_circles_of_extends_are_refused_with_the_chain(own):
    own("one", "extends: two\n")
    own("two", "extends: three\n")
    own("three", "extends: two\n")
    with pytest.raises(ConfigError, match="two -> three -> two"):
        load_profile("one")
    own("myself", "extends: myself\n")
    with pytest.raises(ConfigError, match="myself -> myself"):
        load_profile("myself")


@pytest.mark.parametrize(
    ("parent", "told"),
    [("tiny2", "tiny"), ("other.yaml", "other.yaml"), ("[tiny]", "name of one profile")],
)
def test_an_unknown_parent_is_refused_with_the_way_out(own, parent, told):
    own("child", f"extends: {parent}\n")
    with pytest.raises(ConfigError, match=told):
        load_profile("child")


def test_a_file_extends_a_file_beside_it(tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 11\n")
    (tmp_path / "child.yaml").write_text("extends: base.yaml\n")
    assert load_profile(str(tmp_path / "child.yaml")).seed == 11


@pytest.mark.slow
def test_a_profile_of_ones_own_shadows_and_may_extend_what_it_shadows(own):
    path = own("tiny", "# Mine.\nextends: tiny\nseed: 99\n")
    config = load_profile("tiny")
    assert config.seed == 99
    assert config.models.actor == "embedded:tiny-llama"
    assert config.sft.epochs > 1
    row = next(r for r in json.loads(dschat("profiles", "list", "--json").stdout) if r["shadows"])
    assert (row["name"], row["file"], row["group"]) == ("tiny", str(path), "yours")
    assert row["shadows"] == str(ROOT / "profiles" / "tiny.yaml")
    assert "tiny: yours, in place of" in dschat("profiles", "list").stdout


def test_parts_for_others_to_extend_are_not_listed(own):
    own("_part", "seed: 5\n")
    own("whole", "extends: _part\n")
    assert "whole" in profile_names()
    assert not any(name.startswith("_") for name in profile_names())
    assert load_profile("whole").seed == 5


@pytest.mark.slow
def test_a_broken_profile_is_told_and_spoils_no_other(own):
    own("misspelt", "actor: {zero_stag: 3}\n")
    own("against-the-rules", "actor: {offload: true}\n")
    own("too-large", "extends: qwen3-8b-24gb\nactor: {lora: {rank: 0, only: false}}\n")
    own("unknown-model", "models: {actor: nobody/has-this}\n")
    result = dschat("profiles", "validate", "--json")
    assert result.exit_code == 2
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert "actor.zero_stage" in rows["misspelt"]["problems"][0]
    assert "offload-needs-zero2" in rows["against-the-rules"]["problems"][0]
    assert "does not fit" in rows["too-large"]["problems"][0]
    # a network would tell its shape: no reason to refuse it
    assert not rows["unknown-model"]["problems"]
    assert "not planned" in rows["unknown-model"]["note"]
    assert sum(bool(row["problems"]) for row in rows.values()) == 3
    assert "misspelt" in dschat("profiles", "list").stdout
    text = dschat("profiles", "validate", "misspelt", "tiny")
    assert text.exit_code == 2
    assert [line.split()[0] for line in text.stdout.splitlines() if line[:1] != " "] == [
        "problem",
        "ok",
        "2",
    ]
    assert dschat("profiles", "validate", "tiny", "opt-1.3b").exit_code == 0
    assert dschat("profiles", "validate", "no-such").exit_code == 2


def test_a_stated_plan_that_is_no_more_true_is_noted(own):
    now = profiles.examine("qwen3-4b-80gb")
    own("stale", f"# Mine. {_stated(now)}\nextends: qwen3-4b-80gb\nsft: {{micro_batch_size: 1}}\n")
    own("current", f"# Mine. {_stated(now)}\nextends: qwen3-4b-80gb\n")
    assert "out of date" in profiles.examine("stale").note
    assert profiles.examine("current").note == ""


def _stated(profile: profiles.Profile) -> str:
    assert profile.report is not None
    return profiles.plan_sentence(profile.report)


def test_without_a_gpu_a_profile_is_planned_for_the_one_it_is_for(monkeypatch):
    monkeypatch.setattr(memory_plan, "gpu_memory", lambda: None)
    told = json.loads(dschat("plan", "--profile", "qwen3-4b-24gb", "--json").stdout)
    assert (told["device"], told["memory_bytes"], told["fits"]) == ("cuda", 24 * 2**30, True)
    listed = profiles.examine("qwen3-4b-24gb").report
    assert listed is not None
    assert listed.plan.device_bytes == max(step["device_bytes"] for step in told["steps"])
    assert json.loads(dschat("plan", "--profile", "tiny", "--json").stdout)["device"] == "cpu"


def test_profiles_are_compared_option_by_option():
    text = dschat("profiles", "diff", "llama2-7b", "llama2-7b-lora").stdout
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines()[2:]}
    assert rows["actor.lora.rank"] == ["0", "64"]
    assert rows["actor.lora.only"] == ["false", "true"]
    assert not any(key.startswith("models.") for key in rows)
    both = dschat("profiles", "diff", "llama2-7b", "llama2-7b-lora", "--json")
    assert json.loads(both.stdout)["critic.lora.rank"] == [0, 64]
    assert "alike" in dschat("profiles", "diff", "tiny", "tiny").stdout
    assert dschat("profiles", "diff", "tiny", "no-such").exit_code == 2


def test_a_profile_is_shown_resolved_with_what_it_extends():
    shown = yaml.safe_load(dschat("profiles", "show", "opt-30b-lora", "--resolved").stdout)
    assert resolve(shown, "shown") == load_profile("opt-30b-lora")
    assert "extends" not in shown


def test_the_shell_completes_names_of_profiles(own):
    own("opt-of-mine", "seed: 1\n")
    for words in (
        "dschat profiles show opt-",
        "dschat run --profile opt-",
        "dschat plan --profile opt-",
    ):
        result = dschat(
            prog_name="dschat",
            env={
                "_DSCHAT_COMPLETE": "complete_bash",
                "COMP_WORDS": words,
                "COMP_CWORD": str(len(words.split()) - 1),
            },
        )
        proposed = result.stdout.split()
        assert {"opt-of-mine", "opt-1.3b", "opt-66b"} <= set(proposed), words
        assert all(name.startswith("opt-") for name in proposed)


def test_an_override_holds_in_its_step_alone():
    values = {"critic": {"zero_stage": 3}, "reward": {"overrides": {"critic": {"zero_stage": 0}}}}
    config = resolve(values, "test")
    stages = {step: config.for_step(step).critic.zero_stage for step in ("sft", "reward", "ppo")}
    assert stages == {"sft": 3, "reward": 0, "ppo": 3}
    assert config.for_step("reward").model_dump(exclude={"critic", "reward"}) == config.model_dump(
        exclude={"critic", "reward"}
    )


def test_what_is_set_for_a_run_holds_in_every_step():
    values = apply_overrides(read_profile("opt-6.7b"), ["critic.zero_stage=1"])
    assert resolve(values, "test").for_step("reward").critic.zero_stage == 1
    config = load_profile("llama2-7b-lora", ["critic.lora.rank=16"])
    assert config.for_step("reward").critic.lora.rank == 16
    # what was not set keeps its value of the step
    assert config.for_step("reward").critic.offload
    given = dschat("run", "--profile", "opt-1.3b", "--data", "a.json", "--dry-run", "--json")
    assert given.exit_code == 2  # no such file, and no other data set is asked for
    assert "Dahoas" not in given.stderr


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"critic": {"zero_stage": 7}}, "reward.overrides.critic.zero_stage = 7"),
        ({"critic": {"zero_stag": 0}}, "reward.overrides.critic.zero_stag"),
        ({"models": {"actor": "x"}}, "actor, critic and data can"),
    ],
)
def test_an_override_that_cannot_be_is_refused_by_its_key(overrides, told):
    with pytest.raises(ConfigError, match=told):
        resolve({"reward": {"overrides": overrides}}, "test")


def test_rules_and_plan_see_what_a_step_overrides():
    broken = resolve({"reward": {"overrides": {"critic": {"offload": True}}}}, "test")
    assert [violation.id for violation in check(broken)] == ["offload-needs-zero2"]
    plain = load_profile("llama2-7b")
    for_step_2 = profiles.examine("llama2-7b").report
    without = memory_plan.on_gpus(resolve(_without_overrides(plain), "test"))
    assert for_step_2 is not None
    steps = [{s.step: s.host_bytes for s in r.plan.steps} for r in (for_step_2, without)]
    assert steps[0]["reward"] > steps[1]["reward"]
    assert steps[0]["ppo"] == steps[1]["ppo"]


def _without_overrides(config):
    values = config.model_dump()
    values["reward"]["overrides"] = {}
    return values


def test_a_fix_starts_from_what_the_step_overrides():
    settings = ["reward.micro_batch_size=1", "critic.gradient_checkpointing=true"]
    config = load_profile("opt-6.7b", settings)
    assert fix_for("out_of_memory", config, "reward") == {"critic.zero_stage": 3}
    assert "critic.zero_stage" not in fix_for("out_of_memory", config, "ppo")


def test_data_that_a_step_overrides_is_checked_and_its_path_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("plain.json").write_text(json.dumps([{"prompt": "a", "response": "b"}] * 20))
    values = read_profile("tiny")
    values["reward"]["overrides"] = {"data": {"sources": ["plain.json"]}}
    with pytest.raises(preflight.Refusal) as refused:
        preflight.prepare(resolve(values, "test"), tmp_path / "run", [1, 2])
    assert any("plain.json" in reason and "pairs" in reason for reason in refused.value.reasons)
    del values["reward"]["overrides"]
    values["sft"]["overrides"] = {"data": {"sources": ["plain.json"]}}
    plan = preflight.prepare(resolve(values, "test"), tmp_path / "run", [1, 2])
    seen = {step: plan.config.for_step(step).data.sources[0].path for step in ("sft", "reward")}
    assert seen == {"sft": str(tmp_path / "plain.json"), "reward": "embedded:facts"}


def test_the_number_of_nodes_counts_in_batches_and_needs_several_nodes():
    base = {"launch": {"deployment": "multi_node", "hostfile": "hosts", "num_accelerators": 8}}
    config = resolve({**base, "sft": {"batch_size": 8}}, "test")
    assert not check(config)
    config.launch.num_nodes = 4
    assert "batch-size-divides" in [violation.id for violation in check(config)]
    one_node = resolve({"launch": {"num_nodes": 2}}, "test")
    violation = next(v for v in check(one_node) if v.id == "hostfile-and-deployment")
    assert violation.fix["launch.num_nodes"] == "null"


def test_known_shapes_have_the_parameters_that_are_published():
    table = yaml.safe_load((ROOT / "engine" / "planning" / "known_shapes.yaml").read_text())
    for entry in table:
        for name in entry["names"]:
            assert ModelShape.from_config(known_config(name)).parameters == entry["parameters"], (
                name
            )
    names = [name for entry in table for name in entry["names"]]
    assert len(names) == len(set(names))


def test_a_folder_is_read_before_the_table_of_known_shapes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = Origin("models.actor", "facebook/opt-350m")
    table = memory_plan.shape_of(model, offline=True)
    folder = tmp_path / "facebook" / "opt-350m"
    folder.mkdir(parents=True)
    known = dict(known_config("facebook/opt-350m") or {}, num_hidden_layers=2)
    (folder / "config.json").write_text(json.dumps(known))
    assert table.layers == 24
    assert memory_plan.shape_of(model, offline=True).layers == 2


def test_the_page_of_profiles_is_current():
    current = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    # the same on every machine: files beside a profile have no path
    assert str(ROOT) not in profiles_report.as_markdown()
    assert current == profiles_report.as_markdown(), (
        "run: dschat profiles list --markdown > docs/profiles.md"
    )


def test_examples_of_the_page_on_writing_profiles_can_be_used(own):
    page = (ROOT / "docs" / "writing-profiles.md").read_text(encoding="utf-8")
    examples = page.split("```yaml\n")[1:]
    assert examples
    for number, example in enumerate(examples):
        own(f"example-{number}", example.partition("```")[0])
        assert not profiles.examine(f"example-{number}").problems
