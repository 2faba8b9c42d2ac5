"""What is refused before anything starts, and with which words."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from dschat_tui.runs import preflight
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.identity import process_identity
from dschat_tui.runs.preflight import Refusal, Taken, differences, model_facts, prepare
from dschat_tui.runs.state import DONE
from engine.config.loading import load_config, load_profile, resolve, to_yaml
from engine.config.schema import RunConfig
from engine.config.steps import STEPS


def config(**values) -> RunConfig:
    return resolve(values, "test")


def reasons(config: RunConfig, output: Path, steps: list[int] | None = None) -> str:
    with pytest.raises(Refusal) as caught:
        prepare(config, output, steps)
    return "\n".join(caught.value.reasons)


def write_model(folder: Path, vocabulary: dict[str, int], **model_config) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **model_config}))
    (folder / "tokenizer_config.json").write_text("{}")
    tokenizer = {"model": {"type": "BPE", "vocab": vocabulary}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def write_run(path: Path, config: RunConfig, **states: str) -> RunFolder:
    run = RunFolder(path)
    steps = [step for step in STEPS if step.name in states]
    state = run.create(to_yaml(config), "test", steps)
    for name, step_state in states.items():
        state["steps"][name]["state"] = step_state
    for step in steps:
        if states[step.name] == DONE:
            for folder in run.model_folders(step, ema=False):
                write_model(folder, {"a": 0})
    run.write_state(state)
    return run


def test_the_default_configuration_may_run_and_nothing_is_written(tmp_path):
    plan = prepare(config(), tmp_path / "run", None)
    assert [step.number for step in plan.steps] == [1, 2, 3]
    assert not (tmp_path / "run").exists()


def test_a_broken_rule_is_refused_with_its_way_out(tmp_path):
    told = reasons(config(actor={"offload": True}), tmp_path / "run")
    assert "offload-needs-zero2" in told
    assert "actor.zero_stage=2" in told


def test_data_without_pairs_is_refused_for_steps_2_and_3_and_taken_for_step_1(tmp_path):
    file = tmp_path / "alpaca.json"
    file.write_text(json.dumps([{"instruction": "Say hi", "input": "", "output": "Hi"}] * 3))
    alpaca = config(data={"sources": [str(file)]})
    assert "pairs" in reasons(alpaca, tmp_path / "run")
    assert [step.number for step in prepare(alpaca, tmp_path / "run", [1]).steps] == [1]


def test_missing_data_is_named(tmp_path):
    missing = config(data={"sources": [str(tmp_path / "none.json")]})
    assert "none.json" in reasons(missing, tmp_path / "run")


@pytest.mark.parametrize("name", ["embedded:no-such", "./no/such/folder", "/no/such/folder"])
def test_a_model_that_is_not_there_is_refused_by_key_and_value(tmp_path, name):
    told = reasons(config(models={"actor": name}), tmp_path / "run")
    assert "models.actor" in told
    assert name in told


def test_a_model_folder_without_config_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    told = reasons(config(models={"actor": str(tmp_path / "empty")}), tmp_path / "run")
    assert "config.json" in told


def test_a_hub_id_is_left_to_the_hub(tmp_path):
    hub = config(models={"actor": "facebook/opt-125m"})
    assert prepare(hub, tmp_path / "run", None).config.models.actor == "facebook/opt-125m"


def test_actor_and_reward_model_with_different_vocabularies_are_refused(tmp_path):
    actor = write_model(tmp_path / "actor", {"a": 0, "b": 1})
    same = write_model(tmp_path / "same", {"b": 1, "a": 0})
    other = write_model(tmp_path / "other", {"a": 1, "b": 0})
    good = config(models={"actor": str(actor), "reward": str(same)})
    bad = config(models={"actor": str(actor), "reward": str(other)})
    assert prepare(good, tmp_path / "run", None)
    assert "same-tokenizer" in reasons(bad, tmp_path / "run")


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "max_seq_len"])
def test_prompt_and_answer_must_fit_the_positions_of_a_local_model(tmp_path, key):
    folder = write_model(tmp_path / "actor", {"a": 0}, **{key: 600})
    models = {"actor": str(folder)}
    assert prepare(config(models=models), tmp_path / "run", None)
    long = config(models=models, ppo={"max_answer_length": 512})
    assert "fits-position-embeddings" in reasons(long, tmp_path / "run")


def test_a_model_without_position_embeddings_has_no_limit(tmp_path):
    folder = write_model(tmp_path / "b", {"a": 0}, model_type="bloom", seq_length=8)
    assert model_facts(config(models={"actor": str(folder)})).actor_positions is None


def test_reward_model_from_sft_needs_step_1_or_a_finished_sft_model(tmp_path):
    assert "models.sft=FOLDER" in reasons(config(), tmp_path / "run", [2])
    folder = write_model(tmp_path / "sft", {"a": 0})
    plan = prepare(config(models={"sft": str(folder)}), tmp_path / "run", [2])
    assert [step.number for step in plan.steps] == [2]
    own = config(models={"reward": "embedded:tiny-llama"})
    assert prepare(own, tmp_path / "run", [2])


def test_step_3_names_both_models_that_it_lacks(tmp_path):
    told = reasons(config(), tmp_path / "run", [3])
    assert "models.sft=FOLDER" in told
    assert "models.trained_reward=FOLDER" in told


def test_finished_models_take_the_place_of_steps_1_and_2(tmp_path):
    finished = {
        "sft": str(write_model(tmp_path / "sft", {"a": 0})),
        "trained_reward": str(write_model(tmp_path / "reward", {"a": 0})),
    }
    plan = prepare(config(models=finished), tmp_path / "run", None)
    assert [step.number for step in plan.steps] == [3]
    assert "models.sft replaces" in reasons(config(models=finished), tmp_path / "run", [1, 3])


def test_an_unfinished_model_is_refused_with_what_it_lacks(tmp_path):
    folder = write_model(tmp_path / "sft", {"a": 0})
    (folder / "model.safetensors").unlink()
    told = reasons(config(models={"sft": str(folder)}), tmp_path / "run")
    assert "models.sft" in told
    assert "model.safetensors" in told


def test_later_steps_may_be_added_to_a_run_of_the_same_configuration(tmp_path):
    plan = prepare(config(), tmp_path / "run", None)
    write_run(tmp_path / "run", plan.config, sft=DONE)
    assert [s.number for s in prepare(config(), tmp_path / "run", [2, 3]).steps] == [2, 3]


def test_a_begun_step_is_never_overwritten(tmp_path):
    for number, state in enumerate((DONE, "failed", "stopped", "running")):
        run = write_run(tmp_path / str(number), config(), sft=state)
        before = run.state_file.read_bytes()
        told = reasons(config(), run.path)
        assert f"sft ({state})" in told
        assert "--output" in told
        assert run.state_file.read_bytes() == before


def test_files_of_reward_functions_are_read_before_the_first_step(tmp_path):
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text("def mine(completions, **kwargs):\n    raise SystemExit('not run')\n")
    bad.write_text("def mine(:\n")

    def rewarded(name, path):
        functions = [{"name": name, "path": str(path)}, {"kind": "model"}]
        return config(rewards={"functions": functions})

    def told(name, path):
        return reasons(rewarded(name, path), tmp_path / "run")

    prepare(rewarded("mine", good), tmp_path / "run", None)
    assert "no function 'other', only mine" in told("other", good)
    assert "bad.py is not Python: invalid syntax" in told("mine", bad)
    assert "there is no Python file" in told("mine", tmp_path / "none.py")


def test_another_configuration_is_refused_by_its_keys(tmp_path):
    write_run(tmp_path / "run", config(), sft=DONE)
    told = reasons(config(ppo={"kl_coef": 0.2}, seed=7), tmp_path / "run", [2, 3])
    assert "ppo.kl_coef" in told
    assert "seed" in told
    assert "ppo.clip" not in told


def test_a_step_that_is_said_to_be_done_but_lost_its_model_is_no_input(tmp_path):
    run = write_run(tmp_path / "run", config(), sft=DONE)
    (run.path / "step1-sft" / "model" / "model.safetensors").unlink()
    assert "models.sft=FOLDER" in reasons(config(), run.path, [2, 3])


def test_a_run_that_is_going_on_is_left_alone(tmp_path):
    run = write_run(tmp_path / "run", config(), sft=DONE)
    state = run.read_state()
    run.write_state({**state, "state": "running", "supervisor": process_identity(os.getpid())})
    assert str(os.getpid()) in reasons(config(), run.path, [2])


def test_a_folder_with_parts_of_a_run_but_no_state_is_refused(tmp_path):
    (tmp_path / "run" / "step1-sft").mkdir(parents=True)
    assert "step1-sft" in reasons(config(), tmp_path / "run")


def test_a_damaged_run_json_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{")
    assert "run.json" in reasons(config(), tmp_path / "run")


def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    assert "is a file" in reasons(config(), tmp_path / "file")
    assert "is a file" in reasons(config(), tmp_path / "file" / "run")


def test_a_folder_without_permission_is_refused(read_only):
    told = reasons(config(), read_only / "run")
    assert f"no permission to write in {read_only}" in told


def test_the_command_names_each_fault_its_value_and_the_way_out(read_only, tmp_path):
    actor = write_model(tmp_path / "actor", {"a": 0, "b": 1})
    other = write_model(tmp_path / "other", {"a": 1, "b": 0})
    models = [f"--set=models.actor={actor}", f"--set=models.reward={other}"]
    command = ["run", "--profile", "tiny", "--output", str(read_only / "run"), *models]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    told = " ".join(result.stderr.split())
    assert f"no permission to write in {read_only}. Choose another --output" in told
    assert "same-tokenizer" in told
    assert "models.reward=sft" in told
    assert not (read_only / "run").exists()


def test_a_full_disk_is_refused(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1024})
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda folder: usage)
    assert "GiB free" in reasons(config(), tmp_path / "run")


def test_several_faults_are_told_at_once(tmp_path):
    bad = config(
        actor={"offload": True}, models={"actor": "./none"}, data={"sources": ["./no.json"]}
    )
    told = reasons(bad, tmp_path / "run")
    assert all(part in told for part in ("offload-needs-zero2", "./none", "no.json"))


def test_local_paths_become_absolute_and_other_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "base", {"a": 0})
    (tmp_path / "pairs.json").write_text(
        json.dumps([{"prompt": "p", "chosen": "c", "rejected": "r"}])
    )
    relative = config(
        models={"actor": "base"}, data={"sources": ["pairs.json", "embedded:facts", "Dahoas/rm"]}
    )
    found = prepare(relative, Path("run"), None)
    assert found.config.models.actor == str(tmp_path / "base")
    assert found.config.models.reward == "sft"
    paths = [source.path for source in found.config.data.sources]
    assert paths == [str(tmp_path / "pairs.json"), "embedded:facts", "Dahoas/rm"]
    assert relative.models.actor == "base"
    assert found.run.path == tmp_path / "run"


def test_what_is_written_as_run_yaml_reads_back_equal(tmp_path):
    original = config(seed=3, data={"split": [1, 2, 3]}, actor={"lora": {"rank": 4}})
    run = write_run(tmp_path / "run", original, sft="pending")
    assert differences(load_config(run.config_file), original) == []


def test_more_ranks_than_visible_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.launch, "visible_gpus", lambda environment: ["3"])
    two = config(launch={"deployment": "single_node", "num_accelerators": 2})
    assert "CUDA_VISIBLE_DEVICES" in reasons(two, tmp_path / "run")


@pytest.mark.slow
def test_a_family_that_the_planner_does_not_know_is_asked_what_it_can_be(tmp_path: Path) -> None:
    """The answers come from the classes of transformers, in a process of its own."""
    phi = write_model(tmp_path / "phi", {"a": 0}, model_type="phi3")
    actor = [f"models.actor={phi}", "actor.lora.rank=4"]
    plan = prepare(load_profile("tiny", actor), tmp_path / "run", None)
    assert [note for note in plan.notes if "there is no plan" in note and "phi3" in note]
    prepare(load_profile("tiny", [*actor, "actor.lora.targets=qkv_proj$"]), tmp_path / "run", None)
    wrong = load_profile("tiny", [*actor, "actor.lora.targets=q_proj"])
    assert "qkv_proj" in reasons(wrong, tmp_path / "run")

    codegen = write_model(tmp_path / "codegen", {"a": 0}, model_type="codegen")
    arguments = ["run", "--dry-run", "--output", str(tmp_path / "run")]
    arguments += ["--set", f"models.actor={codegen}"]
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert f"models.actor={codegen} cannot be the critic" in refused.stderr
    assert "set models.reward" in refused.stderr
    sft_alone = CliRunner().invoke(app, [*arguments, "--steps", "1"])
    assert sft_alone.exit_code == 0, sft_alone.stderr
    assert "there is no plan" in sft_alone.stderr


def test_lora_targets_that_match_nothing_are_refused_before_the_start(tmp_path: Path) -> None:
    config = load_profile("tiny", ["actor.lora.rank=4", "actor.lora.targets=decoder.layers"])
    with pytest.raises(Refusal, match=r"actor\.lora\.targets .* match no linear layer"):
        prepare(config, tmp_path / "run", None)
    config = load_profile("tiny", ["actor.lora.rank=4", "actor.lora.targets=q_proj"])
    prepare(config, tmp_path / "run", None)


def test_of_several_starts_at_once_one_gets_the_folder(tmp_path):
    plans = [prepare(config(), tmp_path / "run", None) for _ in range(8)]
    barrier = threading.Barrier(len(plans))

    def create(index: int) -> bool:
        barrier.wait()
        try:
            plans[index].create(f"profile {index}")
        except Taken:
            return False
        return True

    with ThreadPoolExecutor(len(plans)) as pool:
        winners = [index for index, won in enumerate(pool.map(create, range(len(plans)))) if won]
    assert len(winners) == 1
    state = RunFolder(tmp_path / "run").read_state()
    assert state is not None
    assert state["profile"] == f"profile {winners[0]}"


def test_a_folder_that_a_supervisor_holds_is_taken(tmp_path):
    plan = prepare(config(), tmp_path / "run", None)
    (tmp_path / "run").mkdir()
    with RunFolder(tmp_path / "run").lock(wait=False), pytest.raises(Taken):
        plan.create("test")
