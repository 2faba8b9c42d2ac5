"""Data that means something else than it says at first sight: what is learnt of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from engine.config.schema import DataSource
from engine.data.checks import check_rows
from engine.data.files import read_rows
from engine.data.rows import UnusableRow, normalise
from engine.data.schemas import schema_of
from engine.data.sources import load_source


def user(content, **marks):
    return {"role": "user", "content": content, **marks}


def assistant(content, **marks):
    return {"role": "assistant", "content": content, **marks}


def system(content):
    return {"role": "system", "content": content}


@pytest.fixture
def source(tmp_path):
    def write(*rows, parquet=False):
        if parquet:
            path = tmp_path / "rows.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        else:
            path = tmp_path / "rows.jsonl"
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataSource(path=str(path))

    return write


def read(source):
    """The rows as they are learnt, and those left out by reason."""
    schema = schema_of(source)
    kept, left_out = [], []
    for where, row in read_rows(Path(source.path)):
        try:
            kept.append(normalise(row, schema, where))
        except UnusableRow as unusable:
            left_out.append((unusable.reason, unusable.detail))
    return kept, left_out


DIALOGUE = [user("I have 1 pear."), assistant("And?"), user("Double them.")]


@pytest.mark.parametrize(
    "order", [("prompt", "chosen", "rejected"), ("rejected", "chosen", "prompt")]
)
@pytest.mark.parametrize("parquet", [False, True])
def test_a_prompt_beside_dialogues_does_not_hide_the_turns_between(source, order, parquet):
    row = {
        "prompt": "I have 1 pear.",
        "chosen": [*DIALOGUE, assistant("2.")],
        "rejected": [*DIALOGUE, assistant("Apples.")],
    }
    kept, left_out = read(source({name: row[name] for name in order}, parquet=parquet))
    assert left_out == []
    assert kept[0]["prompt"] == DIALOGUE
    assert (kept[0]["chosen"], kept[0]["rejected"]) == ("2.", "Apples.")


def test_a_system_turn_of_either_is_kept_and_turns_as_text_are_read(source):
    text = "\n\nHuman: I have 1 pear.\n\nAssistant: And?\n\nHuman: Double them.\n\nAssistant: "
    kept, _ = read(
        source(
            {
                "prompt": "I have 1 pear.",
                "chosen": [system("Count."), *DIALOGUE, assistant("2.")],
                "rejected": [system("Count."), *DIALOGUE, assistant("3.")],
            },
            {"prompt": "I have 1 pear.", "chosen": text + "2.", "rejected": text + "3."},
            {
                "prompt": [system("Count."), *DIALOGUE],
                "chosen": [assistant("2.")],
                "rejected": [assistant("3.")],
            },
        )
    )
    prompts = [row["prompt"] for row in kept]
    assert prompts == [[system("Count."), *DIALOGUE], DIALOGUE, [system("Count."), *DIALOGUE]]
    assert {(row["chosen"], row["rejected"]) for row in kept} == {("2.", "3.")}


def test_dialogues_of_another_question_than_the_prompt_are_left_out(source):
    other = [user("How are you?"), assistant("Well."), user("Why?")]
    rows = source(
        {
            "prompt": "I have 1 pear.",
            "chosen": [*other, assistant("2.")],
            "rejected": [*other, assistant("3.")],
        },
        {
            "prompt": "I have 1 pear.",
            "chosen": [*DIALOGUE, assistant("2.")],
            "rejected": [user("I have 1 pear."), assistant("3.")],
        },
    )
    kept, left_out = read(rows)
    assert kept == []
    assert [reason for reason, _ in left_out] == ["unusable", "unusable"]


@pytest.mark.parametrize(
    "marks", [{"label": False}, {"kto_tag": "false"}, {"train": False}, {"weight": 0.0}]
)
def test_rows_marked_as_bad_are_not_learnt_and_counted(source, marks):
    good = {
        name: 1.0 if value == 0.0 and name == "weight" else True for name, value in marks.items()
    }
    rows = source(
        {"messages": [user("Is 0 even?"), assistant("No.")], **marks},
        {"messages": [user("Is 2 even?"), assistant("Yes.")], **good},
    )
    kept, left_out = read(rows)
    assert [row["chosen"] for row in kept] == ["Yes."]
    assert left_out == [("unwanted", left_out[0][1])]
    assert next(iter(marks)) in left_out[0][1]
    assert check_rows(rows, schema_of(rows)).dropped.counts["unwanted"] == 1


def test_a_prompt_and_its_completion_with_a_label_from_parquet(source):
    rows = source(
        {"prompt": "Is 0 even?", "completion": "BAD", "label": False},
        {"prompt": "Is 2 even?", "completion": "GOOD", "label": True},
        parquet=True,
    )
    kept, left_out = read(rows)
    assert [row["chosen"] for row in kept] == ["GOOD"]
    assert len(left_out) == 1


def test_a_label_that_is_a_class_says_nothing_and_is_listed(source):
    rows = source(*({"prompt": "Say.", "response": "Yes.", "label": n} for n in (0, 1, 2)))
    assert len(read(rows)[0]) == 3
    assert schema_of(rows).unread == ("label",)


@pytest.mark.parametrize("mark", [{"weight": 0}, {"train": False}, {"loss_weight": 0.0}])
def test_turns_marked_as_context_are_not_learnt(source, mark):
    turns = [
        system("Be brief."),
        user("Say 0."),
        assistant("WRONG", **mark),
        user("No, again."),
        assistant("0"),
        user("Now 1."),
        assistant("1"),
    ]
    ((row,), left_out) = read(source({"messages": turns}))
    assert left_out == []
    assert row["chosen"] == "1"
    assert row["learnt_turns"] == [False, False, False, False, True, False]
    # an answer that is context at the end is no answer to learn
    ((row,), _) = read(source({"messages": [*turns, user("And?"), assistant("BAD", **mark)]}))
    assert row["chosen"] == "1"
    kept, left_out = read(source({"messages": [user("Say 0."), assistant("WRONG", **mark)]}))
    assert (kept, left_out) == ([], [("unwanted", "every answer is")])


@pytest.mark.parametrize("parquet", [False, True])
def test_nan_is_an_empty_cell(source, parquet):
    rows = source(
        {"prompt": "Say 1.", "chosen": "1", "rejected": math.nan if not parquet else None},
        {"prompt": "Say 2.", "chosen": "2", "rejected": "no"},
        {"prompt": "Say 3.", "chosen": math.nan if not parquet else None, "rejected": "no"},
        parquet=parquet,
    )
    kept, left_out = read(rows)
    assert [row["chosen"] for row in kept] == ["2"]
    assert [reason for reason, _ in left_out] == ["empty", "empty"]


def test_a_column_of_nan_alone_is_no_column(source):
    schema = schema_of(source({"prompt": "Say 1.", "chosen": "1", "rejected": math.nan}))
    assert schema.rejected is None
    kept, left_out = read(source({"messages": [user("Hi."), assistant(math.nan)]}))
    assert (kept, [reason for reason, _ in left_out]) == ([], ["empty"])


def test_a_system_column_is_the_system_turn_of_any_dialogue(source):
    rows = source(
        {
            "system": "Capitals.",
            "conversations": [
                {"from": "human", "value": "Colour?"},
                {"from": "gpt", "value": "BLUE"},
            ],
        },
        {
            "system": "Capitals.",
            "conversations": [
                {"from": "system", "value": "Capitals."},
                {"from": "human", "value": "Colour?"},
                {"from": "gpt", "value": "BLUE"},
            ],
        },
    )
    kept, _ = read(rows)
    assert [row["prompt"] for row in kept] == [[system("Capitals."), user("Colour?")]] * 2
    pair = [user("Colour?")]
    rows = source(
        {
            "chosen": [*pair, assistant("BLUE")],
            "rejected": [*pair, assistant("blue")],
            "system": "Capitals.",
        },
        parquet=True,
    )
    ((row,), _) = read(rows)
    assert row["prompt"] == [system("Capitals."), user("Colour?")]


def test_history_comes_before_the_question(source):
    row = {"instruction": "And doubled?", "input": "", "output": "2"}
    expected = [user("Think of 1."), assistant("Done."), user("And doubled?")]
    ((row_,), _) = read(source({**row, "history": [["Think of 1.", "Done."]]}))
    assert row_["prompt"] == expected
    ((row_,), _) = read(source({"history": expected[:2], **row, "system": "Count."}, parquet=True))
    assert row_["prompt"] == [system("Count."), *expected]
    ((row_,), _) = read(source({**row, "history": None}))
    assert row_["prompt"] == [user("And doubled?")]


def test_rows_that_need_a_picture_are_left_out(source):
    dialogue = [user("<image>What is this?"), assistant("A cat.")]
    parts = [user([{"type": "image"}, {"type": "text", "text": "What?"}]), assistant("A cat.")]
    rows = source(
        {"messages": dialogue, "images": ["0.jpg"]},
        {"messages": parts, "images": []},
        {
            "messages": [
                user([{"type": "text", "text": "Say "}, {"type": "text", "text": "1."}]),
                assistant("1"),
            ],
            "images": None,
        },
    )
    kept, left_out = read(rows)
    assert [row["prompt"] for row in kept] == [[user("Say 1.")]]
    assert [reason for reason, _ in left_out] == ["unusable", "unusable"]
    assert "'images'" in left_out[0][1]


def test_of_several_rejected_answers_the_first_makes_the_pair_and_that_is_said(source):
    rows = source({"prompt": "Say 0.", "chosen": "0", "rejected": ["no", "never"]})
    ((row,), _) = read(rows)
    assert row["rejected"] == "no"
    assert "of several rejected answers the first" in schema_of(rows).describe()
    kept, left_out = read(source({"prompt": "Say 0.", "chosen": ["0", "1"], "rejected": "no"}))
    assert kept == []
    assert left_out[0] == ("unusable", "column 'chosen' holds several answers")


def test_columns_that_are_not_read_are_listed_and_noted(source, tmp_path):
    rows = source({"prompt": "Say 0.", "chosen": "0", "rejected": "1", "tools": "[]", "id": 3})
    notes: list[str] = []
    loaded = load_source(rows, str(tmp_path / "cache"), notes.append)
    assert loaded.schema.unread == ("tools", "id")
    assert sum("columns not read: tools, id" in note for note in notes) == 1
    fully_read = source({"prompt": "Say 0.", "chosen": "0", "system": "Count."})
    assert schema_of(fully_read).unread == ()


@pytest.mark.parametrize("parquet", [False, True])
def test_pairs_may_begin_late_in_a_file(source, parquet):
    rows = source(
        *(
            {"prompt": f"Say {n}.", "chosen": str(n), "rejected": None if n < 25 else "no"}
            for n in range(200)
        ),
        parquet=parquet,
    )
    schema = schema_of(rows)
    assert schema.phases == {"sft", "reward", "ppo"}
    reading = check_rows(rows, schema)
    assert (reading.usable, reading.dropped.counts["empty"]) == (175, 25)
