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
from engine.data import schemas
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
    """The rows whose answers are learnt, and those left out by reason."""
    schema = schema_of(source)
    kept, left_out = [], []
    for where, row in read_rows(Path(source.path)):
        try:
            found = normalise(row, schema, where)
        except UnusableRow as unusable:
            left_out.append((unusable.reason, unusable.detail))
            continue
        if found.get("label") is False:
            left_out.append(("label", found["chosen"]))
        else:
            kept.append(found)
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
    ("marks", "good"),
    [
        ({"label": False}, {"label": True}),
        ({"label": "False"}, {"label": "True"}),
        ({"kto_tag": "false"}, {"kto_tag": "true"}),
        ({"kto_tag": 0}, {"kto_tag": 1}),
        ({"train": False}, {"train": True}),
        ({"training": "0"}, {"training": "1"}),
        ({"weight": 0.0}, {"weight": 1.0}),
        ({"loss_weight": "0"}, {"loss_weight": "0.5"}),
    ],
)
def test_rows_marked_as_bad_are_not_learnt_and_counted(source, marks, good):
    rows = source(
        {"messages": [user("Is 0 even?"), assistant("No.")], **marks},
        {"messages": [user("Is 2 even?"), assistant("Yes.")], **good},
    )
    kept, left_out = read(rows)
    assert [row["chosen"] for row in kept] == ["Yes."]
    assert len(left_out) == 1
    dropped = check_rows(rows, schema_of(rows)).dropped
    assert dropped.counts["unwanted"] == 1
    assert next(iter(marks)) in dropped.first["unwanted"]


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


@pytest.mark.parametrize("parquet", [False, True])
def test_a_column_of_nan_alone_is_no_column(source, parquet):
    rows = source({"prompt": "Say 1.", "chosen": "1", "rejected": math.nan}, parquet=parquet)
    assert schema_of(rows).rejected is None
    assert [row["chosen"] for row in read(rows)[0]] == ["1"]
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


def test_each_of_several_rejected_answers_makes_a_pair(source):
    rows = source(
        {"prompt": "Say 0.", "chosen": "0", "rejected": ["no", "never", None]},
        {"prompt": "Say 1.", "chosen": "1", "rejected": ["no"]},
        {"prompt": "Say 2.", "chosen": "2", "rejected": [math.nan, ""]},
    )
    kept, left_out = read(rows)
    assert [(row["rejected"], row["more_rejected"]) for row in kept] == [
        ("no", ["never"]),
        ("no", None),
    ]
    assert left_out == [("empty", "column 'rejected' is empty")]
    assert "each of several rejected answers makes a pair" in schema_of(rows).describe()
    kept, left_out = read(source({"prompt": "Say 0.", "chosen": ["0", "1"], "rejected": "no"}))
    assert kept == []
    assert left_out[0] == ("unusable", "column 'chosen' holds several answers")


def test_marks_are_obeyed_beside_pairs_and_a_label_there_is_listed(source):
    pair = {"prompt": "Say 0.", "chosen": "0", "rejected": "1", "label": True}
    rows = source({**pair, "train": False}, {**pair, "train": True}, {**pair, "label": False})
    kept, left_out = read(rows)
    assert (len(kept), [reason for reason, _ in left_out]) == (2, ["unwanted"])
    assert schema_of(rows).unread == ("label",)


def test_weights_between_0_and_1_are_said_to_count_as_1(source):
    turns = [user("Say 0."), assistant("0", weight=0.5)]
    assert schema_of(source({"messages": turns, "loss_weight": 1})).unread == (
        "messages.weight (all but 0 count as 1)",
    )


def test_columns_and_keys_that_are_not_read_are_listed_and_noted(source, tmp_path):
    rows = source({"prompt": "Say 0.", "chosen": "0", "rejected": "1", "url": "x", "id": 3})
    notes: list[str] = []
    loaded = load_source(rows, str(tmp_path / "cache"), notes.append)
    assert loaded.schema.unread == ("url", "id")
    assert sum("columns not read: url, id" in note for note in notes) == 1
    fully_read = source({"prompt": "Say 0.", "chosen": "0", "system": "Count."})
    assert schema_of(fully_read).unread == ()
    turns = [user("Say 0.", name="Ann"), assistant("0", reasoning_content="Think.")]
    dialogues = source({"messages": turns, "images": [], "history": "Long ago."}, parquet=True)
    assert schema_of(dialogues).unread == (
        "images",
        "history",
        "messages.name",
        "messages.reasoning_content",
    )


def test_a_system_prompt_by_its_other_name_is_the_system_turn(source):
    row = {"system_prompt": "Capitals.", "question": "Colour?", "response": "BLUE"}
    ((found,), _) = read(source(row))
    assert found["prompt"] == [system("Capitals."), user("Colour?")]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": "int"}}}]


@pytest.mark.parametrize("cell", [TOOLS, json.dumps(TOOLS)])
def test_tools_come_before_the_dialogue(source, cell):
    turns = [user("Add 1 and 1."), assistant("I need no tool: 2.")]
    rows = source({"messages": turns, "tools": cell}, {"messages": turns, "tools": None})
    (first, second), _ = read(rows)
    tools, question = first["prompt"]
    assert (tools["role"], json.loads(tools["content"])) == ("tools", TOOLS)
    assert question == user("Add 1 and 1.")
    assert second["prompt"] == [question]
    assert schema_of(rows).unread == ()


def test_empty_fields_that_parquet_adds_to_tools_are_no_part_of_them(source):
    one = {"name": "add", "args": {"a": "int"}}
    other = {"name": "say", "args": {"text": "str"}}
    rows = source(
        {"messages": [user("Hi."), assistant("Yes?")], "tools": [one, other]}, parquet=True
    )
    ((row,), _) = read(rows)
    assert json.loads(row["prompt"][0]["content"]) == [one, other]


@pytest.mark.parametrize(
    ("turn", "reason"),
    [
        ({"role": "tool", "content": "2"}, "a turn of the role 'tool' in column 'messages'; read"),
        (assistant("Let me see.", tool_calls=[{"id": 1}]), "has 'tool_calls'"),
        ({"from": "function_call", "value": "{}"}, "a turn of the role 'function_call'"),
    ],
)
def test_calls_of_tools_are_left_out_with_the_reason(source, turn, reason):
    turns = [user("Add 1 and 1."), turn, user("So?"), assistant("2")]
    kept, left_out = read(
        source({"messages": turns}, {"messages": [user("Hi."), assistant("Yes?")]})
    )
    assert len(kept) == 1
    assert left_out[0][0] == "unusable"
    assert reason in left_out[0][1]


def test_messages_as_text_that_cannot_be_read_are_no_answer(source):
    # as pandas writes an array of messages: without commas
    printed = "[{'role': 'user', 'content': 'Say 0.'}\n {'role': 'assistant', 'content': '0'}]"
    code = '[{"a": 1}, {"b": 2}]'
    rows = source(
        {"prompt": "Say 0.", "chosen": printed, "rejected": printed},
        {"prompt": "Write JSON.", "chosen": code, "rejected": "[1, 2"},
    )
    kept, left_out = read(rows)
    assert [(row["chosen"], row["rejected"]) for row in kept] == [(code, "[1, 2")]
    assert left_out[0][0] == "unusable"
    assert "holds messages as text" in left_out[0][1]


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ('[{"role": "user", "content": "\\ud83d"}]', "half of a character"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
)
def test_broken_text_inside_a_cell_names_file_and_line(tmp_path, cell, problem):
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["messages"])
        writer.writeheader()
        writer.writerows([{"messages": json.dumps([user("Say 0."), assistant("0")])}] * 2)
        writer.writerow({"messages": cell})
    rows = DataSource(path=str(file))
    with pytest.raises(DataError, match=rf"rows.csv, line 4: column 'messages' holds .*{problem}"):
        check_rows(rows, schema_of(rows))


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


@pytest.fixture
def few_rows_looked_at(monkeypatch):
    monkeypatch.setattr(schemas, "ROWS_LOOKED_AT", 10)
    monkeypatch.setattr(schemas, "_LEAST_ROWS_OF_A_FILE", 2)


@pytest.mark.usefixtures("few_rows_looked_at")
def test_a_schema_from_the_first_rows_says_so_and_does_not_outlive_later_ones(source, tmp_path):
    answers = [{"prompt": f"Say {n}.", "chosen": str(n)} for n in range(12)]
    rows = source(*answers)
    assert "found from the first 10 rows" in schema_of(rows).describe()
    assert len(load_source(rows, str(tmp_path / "cache")).train) == 12
    late = source(*answers, {**answers[0], "rejected": "no"})
    with pytest.raises(DataError, match=r"all rows together have rejected 'rejected'; move a row"):
        load_source(late, str(tmp_path / "cache"))
    unwanted = source(*answers, {**answers[0], "label": False})
    with pytest.raises(DataError, match="label 'label'"):
        load_source(unwanted, str(tmp_path / "cache"))


@pytest.mark.usefixtures("few_rows_looked_at")
def test_every_file_of_a_folder_has_its_part_in_the_schema(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for name, row in (("a", {"prompt": "Say.", "chosen": "0"}), ("b", {"rejected": "1"})):
        rows = [{"prompt": "Say.", "chosen": "0", **row}] * 30
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_source(DataSource(path=str(folder)), str(tmp_path / "cache"))
    assert loaded.schema.rejected == "rejected"
    assert [(Path(each["file"]).name, each["rows"], each["usable"]) for each in loaded.files] == [
        ("a.jsonl", 30, 0),
        ("b.jsonl", 30, 30),
    ]


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
