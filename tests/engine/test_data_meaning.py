"""Data that means something else than it says at first sight: what is learnt of it."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from engine.config.schema import DataSource, RunConfig
from engine.data.checks import check_rows, refusals
from engine.data.files import DataError, local_parts, read_rows
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


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"version": 1, "data": [{"prompt": "Say 0.", "chosen": "0"}]}, indent=1),
        json.dumps({"data": [{"prompt": "Say 0.", "chosen": "0"}], "version": 1}),
        json.dumps({"prompt": "Say 0.", "chosen": "0"}, indent=1),
    ],
)
def test_a_document_over_several_lines_or_with_its_rows_below_a_key_is_read(tmp_path, text):
    file = tmp_path / "rows.json"
    file.write_text(text)
    assert [row for _, row in read_rows(file)] == [{"prompt": "Say 0.", "chosen": "0"}]


def test_what_is_broken_in_line_1_is_still_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Say 0.",\n{"prompt": "Say 1."}\n')
    with pytest.raises(DataError, match="line 1 is not JSON"):
        list(read_rows(file))


def test_dialogues_written_as_json_text_are_read_from_csv(tmp_path):
    turns = [user("Say 0."), assistant("0")]
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["messages"])
        writer.writeheader()
        writer.writerow({"messages": json.dumps(turns)})
    ((row,), _) = read(DataSource(path=str(file)))
    assert (row["prompt"], row["chosen"]) == ([user("Say 0.")], "0")


def test_tables_with_tabs_and_lines_of_text_are_read(tmp_path):
    table = tmp_path / "rows.tsv"
    table.write_text("prompt\tchosen\nSay 0, please.\t0\n")
    assert [row for _, row in read_rows(table)] == [{"prompt": "Say 0, please.", "chosen": "0"}]
    text = tmp_path / "book.txt"
    text.write_text("One\u2028line.\nAnother.\n")
    ((first, second), _) = read(DataSource(path=str(text)))
    assert (first, second) == ({"text": "One\u2028line."}, {"text": "Another."})
    (tmp_path / "folder").mkdir()
    text.rename(tmp_path / "folder" / "LICENCE.txt")
    table.rename(tmp_path / "folder" / "rows.tsv")
    assert [file.name for file in local_parts(str(tmp_path / "folder"))["train"]] == ["rows.tsv"]


def test_arrow_files_of_both_formats_are_read(tmp_path):
    table = pyarrow.Table.from_pylist([{"prompt": "Say 0.", "chosen": "0"}])
    for name, writer in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
        with writer(tmp_path / f"{name}.arrow", table.schema) as out:
            out.write_table(table)
        assert [row for _, row in read_rows(tmp_path / f"{name}.arrow")] == table.to_pylist()


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_half_a_character_and_endless_nesting_name_file_and_place(tmp_path, suffix):
    wrap = (lambda row: f"[{row}]") if suffix == "json" else (lambda row: row)
    file = tmp_path / f"rows.{suffix}"
    file.write_text(wrap('{"prompt": "smile \\ud83d\\ude00", "chosen": "0"}'))
    assert next(read_rows(file))[1]["prompt"] == "smile \U0001f600"
    file.write_text(wrap('{"prompt": "smile \\uD83D", "chosen": "0"}'))
    with pytest.raises(DataError, match=r"rows\.json.?: (line|row) 1 holds \\ud83d, half of"):
        list(read_rows(file))
    file.write_text(wrap('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + "}"))
    with pytest.raises(DataError, match=r"(line|row) 1 holds values nested too deeply"):
        list(read_rows(file))


def test_answers_in_columns_that_are_not_read_are_named_before_a_run(source):
    rows = source({"question": "Say 0.", "response_j": "0", "response_k": "no"})
    config = RunConfig.model_validate({"data": {"sources": [rows.path]}})
    (refusal,) = refusals(config, [1])
    assert "columns not read: response_j, response_k" in refusal
    assert "columns: {chosen: COLUMN, rejected: COLUMN}" in refusal
