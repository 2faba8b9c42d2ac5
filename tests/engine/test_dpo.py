"""Step 2 by DPO on one rank, in this process: what needs whole models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import resumed
import torch
from small_run import configuration
from transformers import AutoModelForCausalLM

from engine.config.schema import RunConfig
from engine.data.batches import LabelledPairCollator
from engine.data.encoding import IGNORED
from engine.log.read import LogReader
from engine.models.folders import is_complete_model
from engine.trainers.context import StepContext
from engine.trainers.dpo import DPOTrainer

pytestmark = pytest.mark.usefixtures("group")

LORA = ("actor.lora.rank=4", "actor.lora.only=true", "actor.lora.learning_rate=1e-2")


def options(run: Path, *assignments: str) -> RunConfig:
    finished = f"models.sft={run}/step1-sft/model"
    return configuration("alignment=dpo", finished, "dpo.max_steps=3", *assignments)


def trainer(run: Path, folder: Path, *assignments: str) -> DPOTrainer:
    return DPOTrainer(StepContext.create(options(run, *assignments), folder, "dpo"))


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = (folder / "step2-dpo/metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if row["kind"] == kind]


def weights(engine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


def test_it_starts_at_ln_2_learns_and_tells_so(run, tmp_path, capfd):
    started = trainer(run, tmp_path, "actor.gradient_checkpointing=true")
    assert started.train()
    started.save()
    steps, evaluations = records(tmp_path, "metrics"), records(tmp_path, "reward_eval")
    assert [row["step"] for row in steps] == [0, 1, 2]
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[0]["chosen"] == steps[0]["rejected"] == 0
    assert steps[-1]["margin"] != 0
    assert evaluations[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evaluations[0]["accuracy"] == 0
    assert evaluations[-1]["loss"] < math.log(2)
    assert evaluations[-1]["chosen"] > evaluations[-1]["rejected"]
    assert evaluations[-1]["accuracy"] > 0.5
    assert is_complete_model(tmp_path / "step2-dpo/model")
    AutoModelForCausalLM.from_pretrained(tmp_path / "step2-dpo/model")

    reader = LogReader()
    told = [record for line in capfd.readouterr().out.splitlines() for record in reader.feed(line)]
    assert reader.step == "dpo"
    scores = [record for record in told if record["kind"] == "reward_eval"]
    assert [row["epoch"] for row in scores] == [0, 1]
    for name in ("chosen", "rejected", "loss"):
        assert scores[-1][name] == pytest.approx(evaluations[-1][name], rel=1e-9)
    accuracies = [record["eval_accuracy"] for record in told if "eval_accuracy" in record]
    assert accuracies == [pytest.approx(evaluations[-1]["accuracy"], rel=1e-5)]


def test_pairs_and_padding_are_cut_and_joined_without_a_difference(run, tmp_path):
    pairs = trainer(run, tmp_path)
    # Away from the start, where every loss is the same.
    pairs.train_step(0, pairs.batches.epoch(0)[0])
    rows = [pairs.data.train[row] for row in pairs.batches.epoch(0)[1]]
    with torch.no_grad():
        whole, chosen, rejected = pairs.loss(pairs.collate(rows))
        parts = [pairs.loss(pairs.collate([row])) for row in rows]
    torch.testing.assert_close(sum(part[0] for part in parts), whole, atol=1e-4, rtol=1e-4)
    alone = torch.stack([torch.cat(part[1:]) for part in parts], dim=1)
    torch.testing.assert_close(alone, torch.stack((chosen, rejected)), atol=1e-4, rtol=1e-4)
    assert chosen.abs().max() > 1e-3


def test_micro_batches_do_not_change_an_optimizer_step(run, tmp_path):
    moved = []
    for micro in (8, 2):
        one = trainer(run, tmp_path / str(micro), f"dpo.micro_batch_size={micro}")
        one.train_step(0, one.batches.epoch(0)[0])
        moved.append(weights(one.engine))
    torch.testing.assert_close(moved[0], moved[1], atol=2e-4, rtol=0)


def test_adapters_alone_share_the_model_with_the_reference(run, tmp_path):
    shared = trainer(run, tmp_path / "shared", *LORA)
    apart = trainer(run, tmp_path / "apart", *LORA, "ref.share_actor=false")
    assert shared.ref is None
    assert apart.ref is not None
    losses = {}
    for name, each in (("shared", shared), ("apart", apart)):
        assert each.train()
        losses[name] = [row["loss"] for row in records(tmp_path / name, "metrics")]
    assert losses["shared"] == losses["apart"]
    assert losses["shared"][0] == pytest.approx(math.log(2), abs=1e-6)
    assert len(set(losses["shared"])) == 3
    assert shared.engine.training


@pytest.mark.slow
def test_a_resumed_step_equals_an_uninterrupted_one(run, tmp_path, monkeypatch):
    monkeypatch.setitem(resumed.TRAINERS, "dpo", DPOTrainer)
    config = options(run, "actor.dropout=0.1", "dpo.eval_interval=2")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert resumed.train(config, whole, "dpo")
    assert not resumed.train(config, broken, "dpo", stop_after=2)
    assert resumed.train(config, broken, "dpo")
    assert resumed.records(broken, "dpo") == resumed.records(whole, "dpo")


def test_labels_are_the_answers_with_their_end(run, tmp_path):
    pairs = trainer(run, tmp_path)
    tokenizer = pairs.tokenizer
    rows = [pairs.data.eval[row] for row in range(4)]
    labels = pairs.collate(rows)["labels"]
    for number, row in enumerate(rows):
        for half, name in ((0, "chosen_ids"), (4, "rejected_ids")):
            prompt, answer = row[name][: row["prompt_length"]], row[name][row["prompt_length"] :]
            assert tokenizer.decode(prompt).endswith("Assistant:")
            learnt = labels[half + number]
            assert learnt[learnt != IGNORED].tolist() == answer
            assert answer[-1] == tokenizer.eos_token_id
            assert (learnt[: len(prompt)] == IGNORED).all()
    # By place and not by comparing tokens with pad.
    same = LabelledPairCollator(tokenizer.eos_token_id)(rows)["labels"]
    assert torch.equal(same, labels)


def test_the_rows_of_a_step_3_that_never_comes_serve_the_others(tmp_path):
    data = tmp_path / "pairs.jsonl"
    pair = {"chosen": "yes, it is", "rejected": "no"}
    data.write_text("".join(json.dumps({"prompt": f"q {i}?", **pair}) + "\n" for i in range(100)))
    sizes = {}
    for alignment in ("ppo", "dpo"):
        config = configuration(f"alignment={alignment}", f"data.sources={data}", "data.split=2,4,4")
        context = StepContext.create(config, tmp_path / alignment, "sft")
        tokenizer = context.load_tokenizer(context.resolve_model(config.models.actor))
        rows = [len(context.build_data(tokenizer, phase).train) for phase in ("sft", "reward")]
        sizes[alignment] = rows
    assert sizes["dpo"][1] == pytest.approx(2 * sizes["dpo"][0], abs=1)
    assert sum(sizes["dpo"]) > sum(sizes["ppo"])


@pytest.mark.slow
def test_sharded_and_offloaded_models_lose_the_same(run, tmp_path):
    losses = []
    for number, features in enumerate(
        [(), ("actor.zero_stage=3", "actor.offload=true", "ref.offload=true")]
    ):
        folder = tmp_path / str(number)
        assert trainer(run, folder, "dpo.max_steps=2", *features).train()
        losses.append([row["loss"] for row in records(folder, "metrics")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
