"""Pairs of a file scored by a run's reward model; what /prefer writes trains one."""

from __future__ import annotations

import json
from math import nan
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_run import configuration
from typer.testing import CliRunner

from dschat_tui.chat.commands import respond
from dschat_tui.chat.session import Session
from dschat_tui.cli.main import app
from engine.config.loading import to_yaml
from engine.evaluation import figures_of_pairs, score_pairs
from engine.generation.chat import ChatJudge

QUESTION = "What is the capital of France?"


class Alternating:
    """A model that answers each question in one of two ways."""

    name, context = "alternating", 1000
    usage = SimpleNamespace(prompt_tokens=1, kept_tokens=0, new_tokens=1, finish="stop")
    asked = 0

    def count(self, messages):
        """A token a word."""
        return sum(1 + len(message["content"].split()) for message in messages)

    def stream(self, messages, **settings):
        """One, then the other."""
        self.asked += 1
        yield "Paris." if self.asked % 2 else "I do not know, ask somebody else."


def preferences(file: Path, rounds: int) -> Path:
    """A file of pairs as a person makes them with /prefer, two rounds a conversation."""
    session = Session(Alternating(), system="Be brief.")
    for _ in range(rounds):
        for line in (QUESTION, "/prefer", f"/prefer 1 {file}", "And of Italy?"):
            list(respond(session, line))
        for line in ("/prefer", f"/prefer 1 {file}", "/new"):
            list(respond(session, line))
    return file


@pytest.fixture
def scored_run(run) -> Path:
    """The run of steps 1 and 2, with its run.yaml."""
    (run / "run.yaml").write_text(to_yaml(configuration()))
    return run


def test_a_tie_is_not_correct() -> None:
    kinds = ["sum", "sum", "city", None]
    ratings = [torch.tensor([1.0, 2.0, 0.0, 2.0]), torch.tensor([3.0, nan, 4.0, 0.0])]
    figures = figures_of_pairs([{"kind": kind} for kind in kinds], ratings)
    assert figures["accuracy"] == 0.25
    assert figures["kinds"] == {"city": 0.0, "sum": 0.5}


@pytest.mark.slow
def test_pairs_of_a_file_are_scored_as_the_judge_scores_them(scored_run, tmp_path) -> None:
    file = preferences(tmp_path / "preferences.jsonl", 1)
    document = score_pairs(scored_run, file)
    judge = ChatJudge.from_pretrained(str(scored_run / "step2-reward" / "model"), torch.float32)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert document["pairs"] == len(rows) == 2
    for row, scored in zip(rows, document["scores"], strict=True):
        for name in ("chosen", "rejected"):
            assert scored[name] == row[name][0]["content"]
            expected = judge.score([*row["prompt"], *row[name]])
            assert scored[f"{name}_score"] == pytest.approx(expected, abs=1e-4)
    margins = [each["chosen_score"] - each["rejected_score"] for each in document["scores"]]
    assert document["margin"] == pytest.approx(sum(margins) / 2)
    assert document["accuracy"] == sum(margin > 0 for margin in margins) / 2

    dschat = CliRunner()
    arguments = ["eval", "reward", str(scored_run), "--data", str(file)]
    told = dschat.invoke(app, [*arguments, "--json"])
    assert json.loads(told.stdout)["scores"] == document["scores"]
    shown = dschat.invoke(app, arguments).stdout
    assert "2 pairs, accuracy" in shown
    assert QUESTION in shown


@pytest.mark.slow
def test_a_file_without_pairs_is_refused(scored_run, tmp_path) -> None:
    file = tmp_path / "talk.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    arguments = ["eval", "reward", str(scored_run), "--data", str(file), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no pairs" in result.stderr


@pytest.mark.slow
def test_what_prefer_wrote_trains_step_2_as_it_is(run, tmp_path) -> None:
    from engine.trainers.context import StepContext
    from engine.trainers.reward import RewardTrainer

    file = preferences(tmp_path / "preferences.jsonl", 8)
    config = configuration(
        f'data.sources=[{{"path": "{file}"}}]',
        f"models.sft={run / 'step1-sft' / 'model'}",
        "data.split=[0,1,0]",
        "reward.max_steps=12",
        "reward.batch_size=4",
    )
    trainer = RewardTrainer(StepContext.create(config, tmp_path / "run", "reward"))
    trainer.train()
    trainer.save()
    (tmp_path / "run" / "run.yaml").write_text(to_yaml(config))
    document = score_pairs(tmp_path / "run", file)
    assert document["pairs"] == 16
    assert document["accuracy"] == 1.0
