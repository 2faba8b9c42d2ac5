"""The embedded task from a clean start to a conversation, through the real commands."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

# Put into every process of a run: what leaves the machine is refused, and told.
UNPLUGGED = """
import os, socket

_connect = socket.socket.connect

def connect(self, address):
    host = address[0] if isinstance(address, tuple) else ""
    if self.family in (socket.AF_INET, socket.AF_INET6) and host not in (
        "127.0.0.1", "::1", "localhost", socket.gethostname()
    ):
        with open(os.environ["UNPLUGGED_LOG"], "a") as log:
            log.write(f"{address}\\n")
        raise OSError(101, f"Network is unreachable: {address}")
    return _connect(self, address)

socket.socket.connect = connect
"""


def dschat(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "dschat"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=2400, **options)


@pytest.fixture(scope="module")
def unplugged(tmp_path_factory) -> dict[str, str]:
    """An environment whose processes reach nothing but this machine."""
    folder = tmp_path_factory.mktemp("unplugged")
    (folder / "sitecustomize.py").write_text(UNPLUGGED)
    return os.environ | {
        # Threads that wait for each other on cores that other tests use cost many times over.
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(folder),
        "UNPLUGGED_LOG": str(folder / "attempts.log"),
    }


@pytest.fixture(scope="module")
def demo(tmp_path_factory, unplugged) -> Path:
    """What `make demo` makes: all three steps of the profile `tiny`, without a network."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    ended = dschat("run", "--profile", "tiny", "--output", str(folder), env=unplugged)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"dschat chat --path {folder}" in ended.stdout + ended.stderr
    return folder


@pytest.fixture(scope="module")
def evaluation(demo, unplugged) -> dict:
    ended = dschat("eval", str(demo), "--json", env=unplugged)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout)


def test_nothing_tried_to_leave_the_machine(demo, unplugged):
    attempts = Path(unplugged["UNPLUGGED_LOG"])
    assert not attempts.exists(), attempts.read_text()


def test_sft_learns_the_facts(evaluation):
    models = evaluation["models"]
    assert models["base"]["perplexity"] / models["sft"]["perplexity"] >= 100
    assert models["sft"]["exact_match"] >= 0.95
    assert evaluation["prompts"] >= 300


def test_reward_model_prefers_the_right_answers(evaluation):
    reward = evaluation["reward_model"]
    assert reward["accuracy"] >= 0.95
    assert reward["kinds"]["wrong_fact"] >= 0.90


def test_ppo_moves_the_style_and_keeps_the_facts(evaluation):
    sft, actor = evaluation["models"]["sft"], evaluation["models"]["actor"]
    assert sft["preferred_style"] <= 0.60
    assert actor["preferred_style"] >= 0.90
    assert actor["reward_mean"] - sft["reward_mean"] >= 0.6 * sft["reward_std"]
    assert sft["exact_match"] - actor["exact_match"] <= 0.03
    assert actor["kl"] < 5


def test_logs_of_the_run_tell_its_end(demo):
    ended = dschat("metrics", str(demo), "--json")
    steps = json.loads(ended.stdout)["steps"]
    assert [steps[name]["state"] for name in ("sft", "reward", "ppo")] == ["ok"] * 3
    first = next(record for record in steps["ppo"]["records"] if record["kind"] == "metrics")
    assert first["kl"] == pytest.approx(0.0, abs=1e-2)


def test_chat_answers_once_and_ends(demo, unplugged):
    question = "What is the capital of France?\nquit\n"
    for command in (
        [str(Path(sys.executable).parent / "dschat"), "chat", "--path", str(demo)],
        [sys.executable, "chatbot.py", "--path", str(demo)],
    ):
        ended = subprocess.run(
            command, input=question, capture_output=True, text=True, env=unplugged, timeout=300
        )
        assert ended.returncode == 0, ended.stderr[-2000:]
        assert ended.stdout.count("Paris") == 1


def test_dpo_on_the_same_sft_model_ends_after_step_2_and_can_be_talked_to(demo, unplugged):
    folder = demo.parent / "dpo"
    ended = dschat(
        *("run", "--profile", "tiny", "--output", str(folder), "--set", "alignment=dpo"),
        *("--set", f"models.sft={demo}/step1-sft/model"),
        # the whole epoch of the profile takes minutes, and gets above 0.95
        *("--set", "dpo.max_steps=40", "--set", "data.eval_rows=100"),
        env=unplugged,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert f"dschat chat --path {folder}" in ended.stdout + ended.stderr
    document = json.loads(dschat("metrics", str(folder), "--json").stdout)
    assert {name: log["state"] for name, log in document["steps"].items()} == {"dpo": "ok"}
    records = document["steps"]["dpo"]["records"]
    first = next(record for record in records if record["kind"] == "metrics")
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert [r["eval_accuracy"] for r in records if "eval_accuracy" in r][-1] >= 0.75
    ended = subprocess.run(
        [str(Path(sys.executable).parent / "dschat"), "chat", "--path", str(folder)],
        input="What is the capital of France?\nquit\n",
        capture_output=True,
        text=True,
        env=unplugged,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "step2-dpo/model" in ended.stderr


def test_saved_models_load_in_transformers_without_a_network(demo):
    script = (
        "import sys, transformers as t\n"
        "for f in ('step1-sft/model', 'step3-rlhf/actor'):\n"
        "    t.AutoModelForCausalLM.from_pretrained(f'{sys.argv[1]}/{f}')\n"
        "    assert t.AutoTokenizer.from_pretrained(f'{sys.argv[1]}/{f}').chat_template\n"
        "for f in ('step2-reward/model', 'step3-rlhf/critic'):\n"
        "    m = t.AutoModelForSequenceClassification.from_pretrained(f'{sys.argv[1]}/{f}')\n"
        "    assert m.config.num_labels == 1\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", script, str(demo)], env=environment, check=True)


def test_two_ranks_learn_as_one_rank_with_the_same_global_batch(tmp_path):
    perplexities = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        ended = dschat(
            *("run", "--profile", "tiny", "--steps", "1", "--output", str(folder)),
            *("--set", "sft.max_steps=30", "--set", f"launch.num_accelerators={ranks}"),
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
        rows = (folder / "step1-sft/metrics.jsonl").read_text().splitlines()
        records = [json.loads(row) for row in rows]
        perplexities.append([row["ppl"] for row in records if row["kind"] == "eval"][-1])
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.02)


def test_step_3_of_finished_models_runs_on_two_ranks_under_zero_3(demo, tmp_path):
    features = (
        f"models.sft={demo}/step1-sft/model",
        f"models.trained_reward={demo}/step2-reward/model",
        "launch.num_accelerators=2",
        "actor.zero_stage=3",
        "critic.zero_stage=3",
        "ppo.max_steps=2",
        "ppo.rollout_batch_size=8",
        "ppo.batch_size=8",
        "ema.enabled=true",
        # Adapters alone: small enough for ZeRO-3 to keep all that trains gathered.
        "actor.lora.rank=4",
        "actor.lora.only=true",
        "actor.lora.learning_rate=0.01",
        "data.eval_rows=32",
    )
    folder = tmp_path / "run"
    command = ["run", "--profile", "tiny", "--steps", "3", "--output", str(folder)]
    ended = dschat(*command, *(part for value in features for part in ("--set", value)))
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = (folder / "step3-rlhf/metrics.jsonl").read_text().splitlines()
    records = [json.loads(row) for row in rows]
    assert [row["step"] for row in records if row["kind"] == "metrics"] == [0, 1]
    for name in ("actor", "critic", "actor_ema"):
        assert (folder / "step3-rlhf" / name / "model.safetensors").is_file()
    ended = dschat("eval", str(folder), "--json")
    assert ended.returncode == 0, ended.stderr[-3000:]
    models = json.loads(ended.stdout)["models"]
    # The average has moved from the start, and lags behind the actor.
    perplexities = [models[name]["perplexity"] for name in ("sft", "actor_ema", "actor")]
    assert len(set(perplexities)) == 3
    assert abs(perplexities[1] - perplexities[0]) < abs(perplexities[2] - perplexities[0])


@pytest.fixture(scope="module")
def grpo(demo, tmp_path_factory, unplugged) -> tuple[Path, str]:
    """Step 3 of the profile `tiny-grpo` on the demo's SFT model, and what the command said."""
    folder = tmp_path_factory.mktemp("grpo") / "run"
    sft = f"models.sft={demo}/step1-sft/model"
    ended = dschat(
        "run", "--profile", "tiny-grpo", "--set", sft, "--output", str(folder), env=unplugged
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return folder, ended.stdout + ended.stderr


def test_grpo_on_a_function_needs_no_reward_model_and_no_critic(grpo):
    folder, said = grpo
    assert "step 2 is left out: no reward model is needed" in said
    assert not (folder / "step2-reward").exists()
    assert [path.name for path in (folder / "step3-rlhf").iterdir() if path.is_dir()] == ["actor"]
    state = json.loads((folder / "run.json").read_text())
    assert {name: step["state"] for name, step in state["steps"].items()} == {"ppo": "done"}
    log = (folder / "step3-rlhf" / "training.log").read_text()
    assert "loading the reward model" not in log
    assert "loading the critic" not in log
    rows = (folder / "step3-rlhf" / "metrics.jsonl").read_text().splitlines()
    assert "rewards/friendly/mean" in json.loads(rows[-1])


def test_grpo_learns_what_six_lines_reward_and_keeps_the_facts(grpo, unplugged):
    folder, _ = grpo
    ended = dschat("eval", str(folder), "--json", env=unplugged)
    assert ended.returncode == 0, ended.stderr[-3000:]
    models = json.loads(ended.stdout)["models"]
    assert models["sft"]["preferred_style"] <= 0.6
    assert models["actor"]["preferred_style"] >= 0.9
    assert models["actor"]["exact_match"] >= models["sft"]["exact_match"] - 0.03
