"""Runs whose step 2 is DPO: their steps, folders, summaries, panels, and the model to talk to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dschat_tui import run_text
from dschat_tui.chat.paths import PathError, find_model, relatives
from dschat_tui.dashboard.screens.panels import PANELS
from dschat_tui.logs.follow import Batch
from dschat_tui.logs.parse import LogParser
from dschat_tui.logs.quantities import QUANTITIES
from dschat_tui.logs.source import find_source
from dschat_tui.runs import fixes, launch
from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.preflight import Refusal, prepare
from dschat_tui.runs.results import final_metrics
from engine.config.loading import resolve, to_yaml
from engine.config.rules import ModelFacts, check
from engine.config.schema import RunConfig
from engine.config.steps import STEPS, pipeline
from engine.log import write
from engine.planning import ModelShape, plan_memory

SFT, _, _, DPO = STEPS


def dpo(**values) -> RunConfig:
    return resolve({"alignment": "dpo", **values}, "test")


def write_model(folder: Path, architecture: str = "LlamaForCausalLM") -> None:
    folder.mkdir(parents=True)
    content = {"architectures": [architecture], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def test_the_run_ends_with_step_2(tmp_path):
    plan = prepare(dpo(), tmp_path / "run", None)
    assert [(step.number, step.name) for step in plan.steps] == [(1, "sft"), (2, "dpo")]
    command = launch.step_command(plan.config, plan.run, plan.steps[1], 1, {})
    assert "engine.steps.dpo" in command


def test_step_3_is_refused_with_the_reason(tmp_path):
    with pytest.raises(Refusal) as caught:
        prepare(dpo(), tmp_path / "run", [1, 2, 3])
    told = "\n".join(caught.value.reasons)
    assert "step 3" in told
    assert "alignment=ppo" in told


def test_step_2_starts_from_step_1_and_needs_no_reward_model(tmp_path):
    config = dpo(models={"reward": "/no/such/model", "trained_reward": None})
    assert [step.name for step in prepare(config, tmp_path / "run", None).steps] == ["sft", "dpo"]
    with pytest.raises(Refusal, match="starts from the model of step 1"):
        prepare(dpo(), tmp_path / "run", [2])


def test_a_finished_sft_model_stands_in_for_step_1(tmp_path):
    write_model(tmp_path / "sft")
    config = dpo(models={"sft": str(tmp_path / "sft")})
    assert [step.name for step in prepare(config, tmp_path / "run", None).steps] == ["dpo"]


def test_rules_look_at_the_steps_that_are_run():
    broken = {"ppo": {"batch_size": 5, "rollout_batch_size": 7}, "reward": {"max_length": 10_000}}
    short = ModelFacts(actor_positions=600, reward_positions=600)
    assert check(dpo(**broken), short) == []
    assert check(resolve(broken, "test"), short) != []
    (violation,) = check(dpo(dpo={"max_length": 601}), short)
    assert "dpo.max_length = 601" in str(violation)
    two = {"launch": {"deployment": "single_node", "num_accelerators": 2}}
    assert "dpo.batch_size=3" in str(check(dpo(dpo={"batch_size": 3}, **two))[0])


def test_run_json_knows_the_steps_and_their_results(tmp_path):
    run = RunFolder(tmp_path / "run")
    state = run.create(to_yaml(dpo()), "test", pipeline(dpo().alignment))
    assert list(state["steps"]) == ["sft", "dpo"]
    folder = run.step_folder(DPO)
    folder.mkdir()
    rows = [
        {"kind": "metrics", "step": 0, "loss": 0.69},
        {"kind": "reward_eval", "chosen": 1.5, "rejected": -0.5, "accuracy": 0.9, "pairs": 40},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = final_metrics("dpo", folder)
    assert metrics["accuracy"] == 0.9
    assert metrics["margin"] == 2.0
    state["steps"]["dpo"] |= {"state": "done", "metrics": metrics}
    assert "2 DPO" in run_text.summary(state)
    assert "accuracy 0.9" in run_text.summary(state)


def test_chat_opens_the_model_of_dpo(tmp_path):
    run = tmp_path / "run"
    write_model(run / "step1-sft/model")
    assert find_model(str(run)).name == "sft"
    write_model(run / "step2-dpo/model")
    for path in (run, run / "step2-dpo", run / "step2-dpo/model"):
        found = find_model(str(path))
        assert (found.name, found.run) == ("dpo", run.resolve())
        assert Path(found.location) == run / "step2-dpo/model"
    assert set(relatives(run)) == {"sft", "dpo"}
    (run / "step2-reward").mkdir()
    with pytest.raises(PathError, match="reward model"):
        find_model(str(run / "step2-reward"))


def test_the_dashboard_follows_the_logs_of_this_pipeline(tmp_path):
    run = RunFolder(tmp_path / "run")
    run.create(to_yaml(dpo()), "test", pipeline(dpo().alignment))
    assert list(find_source(run.path).logs) == ["sft", "dpo"]
    other = RunFolder(tmp_path / "other")
    other.create(to_yaml(RunConfig()), "test", pipeline(RunConfig().alignment))
    assert list(find_source(other.path).logs) == ["sft", "reward", "ppo"]
    log = run.step_folder(DPO) / "training.log"
    log.parent.mkdir()
    log.write_text("")
    assert list(find_source(log).logs) == ["dpo"]


def test_its_panels_have_the_numbers_of_its_log():
    values = {"loss": 0.6, "accuracy": 0.7, "margin": 0.3, "chosen": 0.2, "rejected": -0.1}
    lines = [
        write.evaluating("rewards", 0, 1),
        write.dpo_scores(0.0, 0.0, 0.693),
        write.throughput(1e-3, 0.5, 0.1, 64.0, 32, 40),
        write.metrics(0, {**values, "learning_rate": 1e-3, "total_steps": 1}),
        write.evaluating("rewards", 1, 1),
        write.dpo_scores(0.4, -0.6, 0.5),
        write.metrics(0, {"eval_accuracy": 0.95}),
    ]
    offsets = list(range(len(lines)))
    update = LogParser().read(Batch(lines, offsets, restarted=False))
    told = {name: points.values for name, points in update.points.items()}
    assert update.status.step == "dpo"
    assert update.status.done == 1
    assert told["eval_accuracy"] == [0.95]
    assert told["eval_margin"] == [0.0, 1.0]
    assert {name: told[name][-1] for name in values} == values
    panels = PANELS["dpo"]
    assert len(panels) == 6
    for panel in panels:
        assert any(name in told for name in panel.names)
        assert set(panel.names + panel.instead) <= set(QUANTITIES)


def test_memory_of_step_2_holds_actor_and_reference_but_no_critic():
    shape = ModelShape.from_config(
        {
            "model_type": "opt",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 128,
            "vocab_size": 512,
            "max_position_embeddings": 128,
            "word_embed_proj_dim": 64,
        }
    )

    def step_2(**values):
        plan = plan_memory(dpo(**values), shape, dtype="bf16")
        assert [step.step for step in plan.steps] == ["sft", "dpo"]
        return plan.steps[1]

    def weights(**values) -> dict[str, int]:
        items = [item for item in step_2(**values).items if item.what == "weights"]
        return {item.model: item.device_bytes + item.host_bytes for item in items}

    apart = weights()
    assert apart["actor"] == apart["reference"] == 2 * shape.parameters
    lora = {"lora": {"rank": 4, "only": True}}
    assert set(weights(actor=lora)) == {"actor"}
    assert set(weights(actor=lora, ref={"share_actor": False})) == {"actor", "reference"}
    longer = step_2(dpo={"max_length": 1024}).device_bytes
    assert longer > step_2(dpo={"max_length": 64}).device_bytes
    assert step_2(ref={"offload": True}).host_bytes > step_2().host_bytes


def test_a_failure_is_mended_by_its_own_options():
    config = dpo()
    assert fixes.fix_for("diverged", config, "dpo").keys() == {"dpo.learning_rate"}
    assert fixes.fix_for("out_of_memory", config, "dpo").keys() == {"dpo.micro_batch_size"}
