"""What /save and /prefer write is what the data module reads."""

from __future__ import annotations

from types import SimpleNamespace

from dschat_tui.chat.commands import respond
from dschat_tui.chat.session import Session
from engine.config.schema import DataSource
from engine.data.files import read_rows
from engine.data.rows import normalise
from engine.data.schemas import schema_of


class Two:
    """A model that alternates between two answers."""

    name, context = "two", 1000
    usage = SimpleNamespace(prompt_tokens=1, kept_tokens=0, new_tokens=1, finish="stop")
    asked = 0

    def count(self, messages):
        return sum(1 + len(message["content"].split()) for message in messages)

    def stream(self, messages, **settings):
        self.asked += 1
        yield "odd" if self.asked % 2 else "even"


def training_row(file):
    """The one row of a file as training sees it, and the steps that it serves."""
    schema = schema_of(DataSource(path=str(file)))
    ((where, row),) = read_rows(file)
    return normalise(row, schema, where), schema.phases


def test_preferences_train_a_reward_model(tmp_path) -> None:
    file = tmp_path / "preferences.jsonl"
    session = Session(Two(), system="Be odd.")
    for line in ("one", "two", "/prefer", f"/prefer 2 {file}"):
        for _ in respond(session, line):
            pass
    row, phases = training_row(file)
    assert "reward" in phases
    assert [turn["role"] for turn in row["prompt"]] == ["system", "user", "assistant", "user"]
    assert (row["chosen"], row["rejected"]) == ("odd", "even")


def test_conversations_train_an_sft_model(tmp_path) -> None:
    file = tmp_path / "talk.jsonl"
    session = Session(Two())
    for line in ("one", "two", f"/save {file}"):
        for _ in respond(session, line):
            pass
    row, phases = training_row(file)
    assert "sft" in phases
    assert [turn["content"] for turn in row["prompt"]] == ["one", "odd", "two"]
    assert row["chosen"] == "even"
