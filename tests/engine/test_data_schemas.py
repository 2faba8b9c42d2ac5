"""Files and schemas: what is found by itself, what is refused and how the refusal reads."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict

from engine.config.schema import DataSource, RunConfig
from engine.data.checks import refusals
from engine.data.files import DataError, is_local, local_parts, read_rows
from engine.data.rows import UnusableRow, normalise
from engine.data.schemas import schema_of
from engine.data.sources import load_source

QUESTION = [{"role": "user", "content": "Hi?"}]
PAIR = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}
HH_CHOSEN = "\n\nHuman: Hi?\n\nAssistant: Yes?\n\nHuman: Tea?\n\nAssistant: Gladly."
HH_REJECTED = "\n\nHuman: Hi?\n\nAssistant: Yes?\n\nHuman: Tea?\n\nAssistant: No."
THREE_TURNS = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Tea?"},
]


def write_json(path, rows):
    path.write_text(json.dumps(rows), encoding="utf-8")
    return DataSource(path=str(path))


def first_normalised(source):
    schema = schema_of(source)
    file = local_parts(source.path)["train"][0]
    where, row = next(iter(read_rows(file)))
    return normalise(row, schema, where)


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        (PAIR, QUESTION, "Hello.", "No."),
        (
            {
                "prompt": "Hi?",
                "chosen": [*QUESTION, {"role": "assistant", "content": "Hello."}],
                "rejected": [*QUESTION, {"role": "assistant", "content": "No."}],
            },
            QUESTION,
            "Hello.",
            "No.",
        ),
        (
            {"prompt": "Human: Hi? Assistant:", "response": "x", "chosen": " A", "rejected": " B"},
            [{"role": "user", "content": "Human: Hi? Assistant:"}],
            "A",
            "B",
        ),
        ({"chosen": HH_CHOSEN, "rejected": HH_REJECTED}, THREE_TURNS, "Gladly.", "No."),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be kind."},
                    {"from": "human", "value": "Hi?"},
                ],
                "chosen": {"from": "gpt", "value": "Hello."},
                "rejected": {"from": "gpt", "value": "No."},
            },
            [{"role": "system", "content": "Be kind."}, *QUESTION],
            "Hello.",
            "No.",
        ),
        (
            {"instruction": "Add.", "input": "1, 2", "output": "3"},
            [{"role": "user", "content": "Add.\n\n1, 2"}],
            "3",
            None,
        ),
        (
            {"messages": [*THREE_TURNS, {"role": "assistant", "content": "Gladly."}]},
            THREE_TURNS,
            "Gladly.",
            None,
        ),
    ],
)
def test_schemas_are_found_by_themselves(tmp_path, row, prompt, chosen, rejected):
    found = first_normalised(write_json(tmp_path / "a.json", [row]))
    assert (found["prompt"], found["chosen"], found["rejected"]) == (prompt, chosen, rejected)


def test_a_prompt_written_as_dialogue_becomes_turns(tmp_path):
    prompt = "\n\nHuman: Hi?\n\nAssistant: Yes?\n\nHuman: Tea?\n\nAssistant:"
    found = first_normalised(write_json(tmp_path / "a.json", [{**PAIR, "prompt": prompt}]))
    assert found["prompt"] == THREE_TURNS


def test_columns_are_mapped(tmp_path):
    source = write_json(tmp_path / "a.json", [{"q": "Hi?", "good": "Hello.", "bad": "No."}])
    with pytest.raises(DataError, match=r"q, good, bad.*columns: \{prompt"):
        schema_of(source)
    source.columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    assert first_normalised(source)["rejected"] == "No."
    source.columns = {"prompt": "question"}
    with pytest.raises(DataError, match=r"columns.prompt names 'question'.*q, good, bad"):
        schema_of(source)
    source.columns = {"answer": "good"}
    with pytest.raises(DataError, match="maps 'answer'"):
        schema_of(source)


@pytest.mark.parametrize("suffix", ["json", "jsonl", "csv", "parquet", "folder", "splits"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix):
    rows = [{**PAIR, "prompt": f'Question {i}, "really"?\nYes?'} for i in range(700)]
    data, path = Dataset.from_list(rows), tmp_path / f"data.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8-sig")
    elif suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif suffix == "csv":
        data.to_csv(path)
    elif suffix == "parquet":
        data.to_parquet(path)
    elif suffix == "folder":
        data.save_to_disk(path)
    else:
        DatasetDict(train=data, test=data.select([3])).save_to_disk(path)
    loaded = load_source(DataSource(path=str(path)), str(tmp_path / "cache"))
    prompts = [row["prompt"][0]["content"] for row in loaded.train]
    assert prompts == [row["prompt"] for row in rows]
    assert (loaded.eval is not None) == (suffix == "splits")


def test_a_folder_of_train_and_test_files(tmp_path):
    (tmp_path / "train-00000-of-00001.jsonl").write_text(json.dumps(PAIR))
    (tmp_path / "validation.jsonl").write_text(json.dumps({**PAIR, "chosen": "Welcome."}))
    loaded = load_source(DataSource(path=str(tmp_path)), str(tmp_path / "cache"))
    assert loaded.train["chosen"][:] == ["Hello."]
    assert loaded.eval["chosen"][:] == ["Welcome."]


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(PAIR)] * 16 + ["{broken"] + [json.dumps(PAIR)]))
    with pytest.raises(DataError, match=r"a\.jsonl: line 17 is not JSON"):
        load_source(DataSource(path=str(path)), str(tmp_path / "cache"))
    listed = tmp_path / "b.json"
    listed.write_text("[\n" + ",\n".join([json.dumps(PAIR)] * 16 + ["{broken}"]) + "\n]")
    with pytest.raises(DataError, match=r"b\.json: line 18 is not JSON .*row 17"):
        load_source(DataSource(path=str(listed)), str(tmp_path / "cache"))


def test_a_truncated_list_is_an_error(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[" + json.dumps(PAIR) + ",")
    with pytest.raises(DataError, match="not JSON"):
        list(read_rows(path))


def test_a_value_of_the_wrong_type_names_file_row_and_column(tmp_path):
    source = write_json(tmp_path / "a.json", [PAIR, {**PAIR, "chosen": {"role": "assistant"}}])
    assert load_source(source, str(tmp_path / "cache")).dropped == {
        "empty": 1,
        "unusable": 0,
        "unwanted": 0,
    }
    source = write_json(tmp_path / "b.json", [PAIR, {**PAIR, "prompt": {"a": 1}}])
    with pytest.raises(DataError, match=r"b\.json, row 2: column 'prompt' holds a dict"):
        load_source(source, str(tmp_path / "cache"))


def test_rows_without_answers_are_dropped_and_counted(tmp_path):
    rows = [PAIR, {**PAIR, "chosen": "  "}, {**PAIR, "rejected": None}, {**PAIR, "prompt": ""}]
    loaded = load_source(write_json(tmp_path / "a.json", rows), str(tmp_path / "cache"))
    assert len(loaded.train) == 1
    assert loaded.dropped == {"empty": 2, "unusable": 1, "unwanted": 0}


def test_pairs_of_two_different_questions_are_unusable(tmp_path):
    row = {"chosen": HH_CHOSEN, "rejected": HH_REJECTED.replace("Tea", "Coffee")}
    with pytest.raises(UnusableRow) as dropped:
        first_normalised(write_json(tmp_path / "a.json", [row]))
    assert dropped.value.reason == "unusable"


@pytest.mark.parametrize(
    "path", ["/nowhere/a.json", "./nowhere", "~/nowhere/x", "nowhere.parquet", "nowhere.csv"]
)
def test_a_missing_local_path_is_never_looked_up(path):
    assert is_local(path)
    with pytest.raises(DataError, match="no such file or folder"):
        load_source(DataSource(path=path))


def test_a_local_source_opens_no_connection(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    source = write_json(tmp_path / "a.json", [PAIR])
    assert len(load_source(source, str(tmp_path / "cache")).train) == 1


def test_a_hub_name_that_cannot_be_loaded_names_the_way_out(tmp_path, monkeypatch):
    def offline(*_):
        raise ConnectionError("cannot reach the Hub")

    monkeypatch.setattr("datasets.load_dataset_builder", offline)
    with pytest.raises(DataError, match=r"some/set.*cannot reach the Hub.*give a local path"):
        load_source(DataSource(path="some/set"), str(tmp_path))


def test_a_hub_set_keeps_its_own_test_part(tmp_path, monkeypatch):
    train, test = Dataset.from_list([PAIR] * 3), Dataset.from_list([PAIR])
    told = []
    builder = SimpleNamespace(info=SimpleNamespace(download_size=2_000_000))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: builder)
    monkeypatch.setattr("datasets.load_dataset", lambda *_: DatasetDict(train=train, test=test))
    loaded = load_source(DataSource(path="some/set"), str(tmp_path), told.append)
    assert (len(loaded.train), len(loaded.eval)) == (3, 1)
    assert "some/set" in told[0]
    assert "2 MB" in told[0]


def test_a_hub_name_is_not_local():
    assert not is_local("Dahoas/rm-static")
    assert not is_local("embedded:facts")


def test_an_unknown_corpus_is_refused():
    with pytest.raises(DataError, match="embedded:facts"):
        schema_of(DataSource(path="embedded:poems"))


def test_data_without_pairs_closes_steps_2_and_3(tmp_path):
    source = write_json(tmp_path / "a.json", [{"instruction": "Add.", "input": "", "output": "3"}])
    config = RunConfig.model_validate({"data": {"sources": [source.path]}})
    assert refusals(config, [1]) == []
    (reason,) = refusals(config, [1, 2, 3])
    assert "no rejected answers: steps 2 and 3 need pairs" in reason
    assert refusals(config, [3])
    config.models.trained_reward = "/some/model"
    assert refusals(config, [1, 3]) == []


def test_pairs_serve_every_step_and_text_none(tmp_path):
    pairs = write_json(tmp_path / "pairs.json", [PAIR])
    text = write_json(tmp_path / "text.json", [{"text": "Once."}])
    config = RunConfig.model_validate(
        {"data": {"sources": [pairs.path], "unsupervised_sources": [text.path]}}
    )
    assert refusals(config, [1, 2, 3]) == []
    config.data.unsupervised_sources = [pairs]
    assert "no plain text" in refusals(config, [3])[0]
    config.data.sources = [text]
    assert any("step 1 needs" in reason for reason in refusals(config, [1]))


def test_a_share_of_zero_is_refused_for_its_step(tmp_path):
    pairs = write_json(tmp_path / "pairs.json", [PAIR])
    config = RunConfig.model_validate({"data": {"sources": [pairs.path], "split": "1,0,1"}})
    assert refusals(config, [1, 3]) == []
    assert "step 2 a share of 0" in refusals(config, [1, 2])[0]


def test_the_check_before_a_run_needs_no_torch():
    heavy = "torch", "datasets", "transformers", "numpy"
    program = f"import engine.data.checks, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
