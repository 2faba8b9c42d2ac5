"""The conversation with a scripted model: turns, cuts, interruption, commands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dschat_tui.chat.commands import COMMANDS, complete, respond
from dschat_tui.chat.events import Answer, Error, Note, Quit, Table, Token
from dschat_tui.chat.files import read_prompts
from dschat_tui.chat.session import Relatives, Session
from dschat_tui.chat.settings import Settings


class Scripted:
    """A generator that counts a token a word and a message, and repeats or follows a script."""

    def __init__(self, script=(), name="scripted", context=1000):
        self.name = name
        self.context = context
        self.script = list(script)
        self.seen: list[list[dict[str, str]]] = []
        self.settings: list[dict] = []
        self.usage = SimpleNamespace(prompt_tokens=0, kept_tokens=0, new_tokens=0, finish="stop")
        self.on_piece = lambda: None

    def count(self, messages) -> int:
        return sum(1 + len(message["content"].split()) for message in messages)

    def stream(self, messages, **settings) -> Iterator[str]:
        self.seen.append([dict(message) for message in messages])
        self.settings.append(settings)
        answer = self.script.pop(0) if self.script else f"echo {messages[-1]['content']}"
        if isinstance(answer, Exception):
            raise answer
        self.usage = SimpleNamespace(
            prompt_tokens=self.count(messages), kept_tokens=1, new_tokens=0, finish="stop"
        )
        for piece in re.findall(r"\S+\s*", answer):
            self.usage.new_tokens += 1
            yield piece
            self.on_piece()


def say(session: Session, *lines: str) -> list:
    """All events of some lines."""
    return [event for line in lines for event in respond(session, line)]


def texts(events, kind) -> list[str]:
    """The texts of the events of a kind."""
    return [event.text for event in events if isinstance(event, kind)]


def test_an_answer_streams_and_both_turns_are_kept() -> None:
    session = Session(Scripted(["It is Paris."]))
    events = say(session, "What is the capital of France?")
    assert texts(events, Token) == ["It ", "is ", "Paris."]
    (answer,) = (event for event in events if isinstance(event, Answer))
    assert (answer.text, answer.finish, answer.statistics.new_tokens) == ("It is Paris.", "stop", 3)
    say(session, "And?")
    assert session.generator.seen[1] == [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "It is Paris."},
        {"role": "user", "content": "And?"},
    ]


def test_the_words_of_the_original_work() -> None:
    session = Session(Scripted())
    say(session, "one", "clear", "two")
    assert [turn["content"] for turn in session.messages] == ["two", "echo two"]
    assert [type(event) for event in say(session, "quit")] == [Quit]


def test_empty_lines_ask_nothing() -> None:
    session = Session(Scripted())
    assert say(session, "", "   ") == []


def test_undo_and_retry() -> None:
    session = Session(Scripted(["a", "b", "c"]))
    say(session, "one", "two", "/undo")
    assert [turn["content"] for turn in session.messages] == ["one", "a"]
    events = say(session, "/retry")
    assert [turn["content"] for turn in session.messages] == ["one", "c"]
    assert any("temperature" in text for text in texts(events, Note))
    say(session, "/undo")
    with pytest.raises(ValueError, match="nothing to take back"):
        say(session, "/undo")


def test_a_fixed_seed_repeats_answers_but_not_a_retry() -> None:
    session = Session(Scripted(), Settings(seed=5, temperature=1.0))
    say(session, "one", "/retry", "/retry", "two")
    assert [each["seed"] for each in session.generator.settings] == [5, 6, 7, 5]


@given(
    questions=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    context=st.integers(30, 120),
    room=st.integers(1, 60),
)
def test_the_history_is_cut_by_whole_turns_and_always_fits(questions, context, room) -> None:
    session = Session(Scripted(context=context), Settings(max_new_tokens=room))
    notes = 0
    for number, words in enumerate(questions):
        seen = session.visible()
        events = say(session, f"q{number} " + "word " * (words - 1))
        sent = session.generator.seen[-1]
        assert session.generator.count(sent) + min(room, context // 2) <= context
        assert sent[0]["role"] == "user"
        assert sent[-1]["content"].split()[0] == f"q{number}"
        cut = len(sent) < len(seen) + 1
        assert cut == any("no longer sees" in text for text in texts(events, Note))
        notes += cut
        # What is sent is a tail of the whole conversation, without a hole.
        assert session.messages[-len(sent) - 1 : -1] == sent
    assert len(session.messages) == 2 * len(questions)


def test_a_cut_makes_room_for_several_rounds() -> None:
    session = Session(Scripted(context=100), Settings(max_new_tokens=20))
    cuts = [
        any("no longer sees" in text for text in texts(say(session, "a b c d e"), Note))
        for _ in range(40)
    ]
    assert sum(cuts) > 1
    assert not any(first and second for first, second in pairwise(cuts))


def test_a_question_longer_than_the_context_is_refused_and_forgotten() -> None:
    session = Session(Scripted(context=20))
    say(session, "short")
    with pytest.raises(ValueError, match="holds 20"):
        say(session, "word " * 30)
    assert len(session.messages) == 2


def test_an_interrupted_answer_keeps_what_was_said() -> None:
    session = Session(Scripted(["one two three four"]))

    def interrupt() -> None:
        session.stopping = True

    session.generator.on_piece = interrupt
    events = say(session, "count")
    (answer,) = (event for event in events if isinstance(event, Answer))
    assert answer.finish == "interrupted"
    assert session.messages[-1]["content"] == answer.text
    assert answer.text in ("one ", "one two ")
    session.generator.on_piece = lambda: None
    say(session, "go on")
    assert session.generator.seen[-1][1]["content"] == answer.text


def test_a_failed_answer_takes_its_question_back() -> None:
    session = Session(Scripted([RuntimeError("out of memory")]))
    with pytest.raises(RuntimeError):
        say(session, "one")
    assert session.messages == []


def test_settings_are_checked_and_passed_on() -> None:
    session = Session(Scripted())
    say(session, "/set temperature 0.5", "/set top_k 7", "/set seed=3", "one")
    used = session.generator.settings[0]
    assert (used["temperature"], used["top_k"], used["seed"]) == (0.5, 7, 3)
    for line, reason in (
        ("/set temperature 9", "from 0.0 to 5.0"),
        ("/set temperature nan", "must be from"),
        ("/set top_k 1.5", "whole number"),
        ("/set warmth 1", "There is no setting 'warmth'"),
    ):
        with pytest.raises(ValueError, match=re.escape(reason)):
            say(session, line)
    say(session, "/set seed none")
    assert session.settings.seed is None
    (table,) = say(session, "/set")
    assert {row["name"]: row["value"] for row in table.rows}["top_k"] == 7


def test_a_system_message_leads_the_conversation_until_removed() -> None:
    session = Session(Scripted())
    say(session, "/system Be brief.", "one")
    assert session.generator.seen[0][0] == {"role": "system", "content": "Be brief."}
    say(session, "clear", "/system", "two")
    assert session.generator.seen[1][0]["role"] == "user"


def test_a_template_that_drops_system_messages_is_noticed() -> None:
    generator = Scripted()
    generator.count = lambda messages: sum(m["role"] != "system" for m in messages)
    with pytest.raises(ValueError, match="leaves system messages out"):
        Session(generator, system="Be brief.")


def test_save_and_load_go_through_the_training_format(tmp_path) -> None:
    file = tmp_path / "new" / "talk.jsonl"
    session = Session(Scripted(), system="Sé breve.")
    say(session, "one", f"/save {file}", "two", f"/save {file}")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [len(row["messages"]) for row in rows] == [3, 5]
    other = Session(Scripted())
    say(other, f"/load {file}")
    assert other.conversation() == session.conversation()
    say(other, "three")
    assert len(other.generator.seen[0]) == 6


def test_separators_inside_of_text_end_no_line(tmp_path) -> None:
    text = "one\u2028two\u2029three\x85four\x0cfive"
    file = tmp_path / "talk.jsonl"
    session = Session(Scripted())
    say(session, text, f"/save {file}", "again", f"/save {file}")
    other = Session(Scripted())
    say(other, f"/load {file}")
    assert other.conversation() == session.conversation()
    assert other.conversation()[0]["content"] == text
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n\n")
    assert read_prompts(prompts) == [text]
    prompts.rename(tmp_path / "prompts.txt")
    (tmp_path / "prompts.txt").write_text("one\u2028two\r\n\nthree\n")
    assert read_prompts(tmp_path / "prompts.txt") == ["one\u2028two", "three"]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no json",
        "[1]",
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": "unanswered"}]}',
        '{"messages": [{"role": "assistant", "content": "first"}]}',
    ],
)
def test_a_damaged_file_is_refused_and_changes_nothing(tmp_path, content) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text(content)
    session = Session(Scripted())
    say(session, "one")
    before = session.conversation()
    with pytest.raises(ValueError, match=r"talk\.jsonl"):
        say(session, f"/load {file}")
    assert session.conversation() == before


def test_statistics_have_a_row_an_answer() -> None:
    session = Session(Scripted(["a b c", "d"]))
    with pytest.raises(ValueError, match="before the first answer"):
        say(session, "/stats")
    (table,) = [e for e in say(session, "one", "two", "/stats") if isinstance(e, Table)]
    assert [row["new tokens"] for row in table.rows] == [3, 1]


def test_unknown_commands_name_the_nearest() -> None:
    session = Session(Scripted())
    (error,) = say(session, "/histroy")
    assert isinstance(error, Error)
    assert "/history" in error.text
    say(session, "//etc is what?")
    assert session.messages[0]["content"] == "/etc is what?"


def test_help_lists_every_command() -> None:
    (table,) = say(Session(Scripted()), "/help")
    assert [row["command"].split()[0] for row in table.rows] == list(COMMANDS)


def test_completion(tmp_path) -> None:
    assert complete("/s") == ["/system", "/set", "/save", "/score", "/stats"]
    assert complete("/set te") == ["temperature"]
    assert complete("/set temperature 0") == []
    assert complete("hello") == []
    (tmp_path / "talk.jsonl").touch()
    (tmp_path / "folder").mkdir()
    assert complete(f"/load {tmp_path}/t") == [f"{tmp_path}/talk.jsonl"]
    assert complete(f"/load {tmp_path}/f") == [f"{tmp_path}/folder/"]
    assert complete("/load /nowhere/at/all") == []


@dataclass
class Judge:
    """Rewards by length, or by a constant."""

    def score(self, messages) -> float:
        return float(len(messages[-1]["content"]))


def family(session: Session, **others: Scripted) -> None:
    """Give a session relatives."""
    generators = {name: lambda each=each: each for name, each in others.items()}
    session.relatives = Relatives(
        {**generators, session.generator.name: lambda: session.generator},
        Judge,
        lambda first, second, messages: 0.25 if second.name == "sft" else 9.0,
    )


def test_compare_asks_all_models_the_same_and_keeps_the_conversation() -> None:
    session = Session(Scripted(["mine", "mine too"]))
    with pytest.raises(ValueError, match="no other model"):
        say(session, "/compare")
    sft = Scripted(["theirs"], name="sft")
    family(session, sft=sft)
    (table,) = [e for e in say(session, "one", "/compare") if isinstance(e, Table)]
    assert {row["model"]: row["answer"] for row in table.rows} == {
        "sft": "theirs",
        "scripted": "mine too",
    }
    assert sft.seen[0] == session.generator.seen[1] == session.messages[:1]
    say(session, "/compare another question")
    assert sft.seen[1][-1]["content"] == "another question"
    assert len(session.messages) == 2


def test_score_gives_reward_and_divergence_of_every_answer() -> None:
    session = Session(Scripted(["abc", "de"]))
    say(session, "one", "two")
    with pytest.raises(ValueError, match="no reward model"):
        say(session, "/score")
    family(session, sft=Scripted(name="sft"))
    (table,) = say(session, "/score")
    assert [row["reward"] for row in table.rows] == [3.0, 2.0]
    assert {row["KL to SFT, nats a token"] for row in table.rows} == {0.25}


@pytest.mark.parametrize(("pick", "chosen", "rejected"), [("1", "a", "b"), ("/prefer 2", "b", "a")])
def test_prefer_appends_a_pair_and_goes_on_with_the_better(
    tmp_path, monkeypatch, pick, chosen, rejected
) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session(Scripted(["a", "a", "b"]))
    table = next(e for e in say(session, "one", "/prefer") if isinstance(e, Table))
    assert [row["answer"] for row in table.rows] == ["a", "b"]
    assert session.generator.settings[-1]["temperature"] > 0
    say(session, pick)
    (line,) = (tmp_path / "preferences.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "prompt": [{"role": "user", "content": "one"}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
    assert session.messages[-1]["content"] == chosen


def test_an_unpicked_pair_is_dropped(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    session = Session(Scripted(["a", "b"]))
    say(session, "one", "/prefer", "next question", "1")
    assert [turn["content"] for turn in session.messages[2:]] == [
        "next question",
        "echo next question",
        "1",
        "echo 1",
    ]
    with pytest.raises(ValueError, match="no two answers"):
        say(session, "/prefer 1")
    assert not list(tmp_path.iterdir())
