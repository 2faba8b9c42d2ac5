"""The data sets of DeepSpeed-Chat by name: hand-written rows of their columns, copies, the Hub."""

import json
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict

from engine.config.schema import DataSource, RunConfig
from engine.data.catalogue import DATA_SETS, entry_for
from engine.data.checks import refusals
from engine.data.files import DataError, is_local
from engine.data.rows import normalise
from engine.data.schemas import Cells, schema_from, schema_of
from engine.data.sources import load_source

HH_PROMPT = "\n\nHuman: Hi?\n\nAssistant: Yes?\n\nHuman: Tea?\n\nAssistant:"
HH_TURNS = ["user: Hi?", "assistant: Yes?", "user: Tea?"]
HH_ROW = {"prompt": HH_PROMPT, "response": " Gladly.", "chosen": " Gladly.", "rejected": " No."}
HH_READ = (HH_TURNS, "Gladly.", "No.")
PASSAGES = {
    "query_id": "7",
    "query": "首都?",
    "positive_passages": [{"docid": "1", "title": "T", "text": "Paris."}, {"text": "other"}],
    "negative_passages": [{"docid": "2", "title": "U", "text": "Rome."}],
}
MKQA = {
    "query": "capital?",
    "queries": {"zh_cn": "首都?", "ja": "首都は?", "en": "capital?"},
    "answers": {
        "zh_cn": [{"type": 1, "entity": "Q90", "text": "巴黎", "aliases": ["x"]}],
        "ja": [{"type": 1, "entity": "Q90", "text": "パリ", "aliases": []}],
    },
}

# name: a row with the columns of the set, and the prompt's turns, chosen and rejected it means
ROWS = {
    "Dahoas/rm-static": (HH_ROW, HH_READ),
    "Dahoas/full-hh-rlhf": (HH_ROW, HH_READ),
    "Dahoas/synthetic-instruct-gptj-pairwise": (
        {"prompt": "Say Human: hi.", "chosen": "Hello.", "rejected": "No."},
        (["user: Say Human: hi."], "Hello.", "No."),
    ),
    "yitingxie/rlhf-reward-datasets": (
        {
            "prompt": "\n\nHuman: Hi?\n\nAssistant: Yes?\n\nHuman: Tea?\n\n",
            "chosen": "Assistant: Gladly.",
            "rejected": "Assistant: No.",
        },
        HH_READ,
    ),
    "openai/webgpt_comparisons": (
        {
            "question": {"dataset": "eli5", "id": "1", "full_text": "Why is it so?"},
            "answer_0": "Because [1].",
            "score_0": -0.5,
            "answer_1": "Light bends [1, 2] (a little).[3] So.",
            "score_1": 0.5,
        },
        (["user: Why is it so?"], "Light bends (a little). So.", "Because."),
    ),
    "stanfordnlp/SHP": (
        {"history": "How?", "human_ref_A": "Badly.", "human_ref_B": "Well.", "labels": 0},
        (["user: How?"], "Well.", "Badly."),
    ),
    "pvduy/sharegpt_alpaca_oa_vicuna_format": (
        {"prompt": "Be kind. USER: Hi? ASSISTANT: Yes? USER: Tea? ASSISTANT:", "label": "Gladly."},
        (["system: Be kind.", *HH_TURNS], "Gladly.", None),
    ),
    "local/jsonfile": (
        {"prompt": "Human: I have a question. Assistant:", "chosen": "Good.", "rejected": "Bad."},
        (["user: I have a question."], "Good.", "Bad."),
    ),
    "wangrui6/Zhihu-KOL": (
        {"INSTRUCTION": "怎么说?", "RESPONSE": "好。", "SOURCE": "Zhihu", "METADATA": "{}"},
        (["user: 怎么说?"], "好。", None),
    ),
    "Cohere/miracl-zh-queries-22-12": (PASSAGES, (["user: 首都?"], "Paris.", "Rome.")),
    "Hello-SimpleAI/HC3-Chinese": (
        {"question": "首都?", "human_answers": ["巴黎。", "x"], "chatgpt_answers": ["y"]},
        (["user: 首都?"], "巴黎。", None),
    ),
    "mkqa-Chinese": (MKQA, (["user: 首都?"], "巴黎", None)),
    "mkqa-Japanese": (MKQA, (["user: 首都は?"], "パリ", None)),
    "Cohere/miracl-ja-queries-22-12": (PASSAGES, (["user: 首都?"], "Paris.", "Rome.")),
    "lmqg/qg_jaquad": (
        {"question": "どこ?", "answer": "東京", "sentence": "東京です。", "paragraph": "長い。"},
        (["user: どこ?"], "東京です。", None),
    ),
    "lmqg/qag_jaquad": (
        {"questions": ["どこ?", "誰?"], "answers": ["東京", "私"], "paragraph": "東京です。"},
        (["user: どこ?"], "東京です。", None),
    ),
}


def read(name, row, **source):
    schema = schema_from(Cells.of([row]), DataSource(path=name, **source))
    found = normalise(row, schema, "a row")
    turns = [f"{turn['role']}: {turn['content']}" for turn in found["prompt"]]
    return turns, found["chosen"], found["rejected"]


def write_json(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_the_table_holds_the_sixteen_of_the_original():
    assert len(DATA_SETS) == 16
    assert {entry.name for entry in DATA_SETS} == set(ROWS)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_of_each_data_set_is_read_as_meant(name):
    row, meant = ROWS[name]
    assert read(name, row) == meant
    assert entry_for(name).steps == ((1, 2, 3) if meant[2] else (1,))


def test_the_better_answer_depends_on_the_row():
    row, (turns, better, worse) = ROWS["stanfordnlp/SHP"]
    assert read("stanfordnlp/SHP", {**row, "labels": 1}) == (turns, worse, better)
    row, (turns, better, worse) = ROWS["openai/webgpt_comparisons"]
    tie = {**row, "score_0": 0.0, "score_1": 0.0}
    assert read("openai/webgpt_comparisons", tie) == (turns, worse, better)


def test_a_row_that_lacks_an_answer_is_dropped(tmp_path):
    lacking = {**PASSAGES, "negative_passages": []}
    file = write_json(tmp_path / "Cohere/miracl-ja-queries-22-12/train.json", [PASSAGES, lacking])
    loaded = load_source(DataSource(path=str(file.parent)), str(tmp_path / "cache"))
    assert len(loaded.train) == 1
    assert loaded.dropped == {"empty": 1, "unusable": 0, "unwanted": 0}
    assert "row 2" in loaded.first_dropped["empty"]


def test_the_users_own_mapping_wins():
    row = {"prompt": "Human: Hi?", "chosen": "A", "rejected": "B", "mine": "Hello?"}
    mapping = {"prompt": "mine", "chosen": "chosen", "rejected": "rejected"}
    assert read("local/jsonfile", row, columns=mapping) == (["user: Hello?"], "A", "B")


def test_other_columns_under_a_known_name_are_found_by_themselves():
    row = {"prompt": "Hi?", "chosen": "A", "rejected": "B"}
    assert read("/data/stanfordnlp/SHP/mine.json", row) == (["user: Hi?"], "A", "B")


@pytest.mark.parametrize("nothing", [{}, {"rejected": None}])
def test_answers_of_ones_own_without_rejected_ones_serve_step_1(nothing):
    row = {"prompt": "Human: Hi? Assistant:", "chosen": "A", **nothing}
    assert read("local/jsonfile", row) == (["user: Hi?"], "A", None)
    assert schema_from(Cells.of([row]), DataSource(path="local/jsonfile")).phases == {"sft", "ppo"}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/Dahoas/rm-static", "Dahoas/rm-static"),
        ("./copies/Dahoas/rm-static/data", "Dahoas/rm-static"),
        ("stanfordnlp/SHP-2", None),
        ("my-Dahoas/rm-static", None),
        ("embedded:facts", None),
    ],
)
def test_a_path_that_holds_the_name_means_the_data_set(path, name):
    found = entry_for(path)
    assert (found and found.name) == name


def test_a_saved_copy_is_read_by_the_mapping_of_its_name(tmp_path):
    row, (_, chosen, rejected) = ROWS["openai/webgpt_comparisons"]
    folder = tmp_path / "openai" / "webgpt_comparisons"
    DatasetDict(train=Dataset.from_list([row] * 3)).save_to_disk(folder)
    loaded = load_source(DataSource(path=str(folder)), str(tmp_path / "cache"))
    assert loaded.train["chosen"][:] == [chosen] * 3
    assert loaded.train["rejected"][:] == [rejected] * 3


def test_the_same_file_under_another_name_is_read_afresh(tmp_path):
    row = {"prompt": "Human: Hi? Assistant:", "chosen": "A", "rejected": "B"}
    named = write_json(tmp_path / "Dahoas/full-hh-rlhf/train.json", [row])
    plain = write_json(tmp_path / "mine.json", [row])
    prompts = [
        load_source(DataSource(path=str(path)), str(tmp_path / "cache")).train["prompt"][0]
        for path in (named, plain)
    ]
    assert [prompt[0]["content"] for prompt in prompts] == ["Hi? Assistant:", row["prompt"]]


def test_local_jsonfile_means_two_files_of_the_folder_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = DataSource(path="local/jsonfile")
    assert is_local(source.path)
    row, (_, chosen, _) = ROWS["local/jsonfile"]
    write_json(tmp_path / "data/train.json", [row, row])
    with pytest.raises(DataError, match=r"missing: data.eval\.json; put them there"):
        schema_of(source)
    write_json(tmp_path / "data/eval.json", [{**row, "chosen": "Fine."}])
    write_json(tmp_path / "data/train-old.json", [row])
    assert schema_of(source).phases == {"sft", "reward", "ppo"}
    absolute = DataSource(path=str(tmp_path / "local/jsonfile"))
    for named in (source, absolute):
        loaded = load_source(named, str(tmp_path / "cache"))
        assert loaded.train["chosen"][:] == [chosen] * 2
        assert loaded.eval["chosen"][:] == ["Fine."]


def test_a_known_set_of_single_answers_is_refused_for_step_2_without_the_network():
    config = RunConfig.model_validate({"data": {"sources": ["wangrui6/Zhihu-KOL"]}})
    assert refusals(config, [1]) == []
    assert "need pairs" in refusals(config, [1, 2])[0]
    config.data.sources = [DataSource(path="Dahoas/rm-static")]
    assert refusals(config, [1, 2, 3]) == []


def test_a_known_set_on_the_hub_by_its_own_id_and_held_out_part(tmp_path, monkeypatch):
    asked = []
    row, (_, chosen, _) = ROWS["stanfordnlp/SHP"]
    parts = DatasetDict(
        train=Dataset.from_list([row] * 3),
        test=Dataset.from_list([row]),
        validation=Dataset.from_list([row] * 2),
    )
    builder = SimpleNamespace(info=SimpleNamespace(download_size=None))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_: builder)
    monkeypatch.setattr("datasets.load_dataset", lambda *names: asked.append(names) or parts)
    loaded = load_source(DataSource(path="stanfordnlp/SHP"), str(tmp_path))
    assert (len(loaded.train), len(loaded.eval)) == (3, 2)
    assert loaded.train["chosen"][0] == chosen
    parts = DatasetDict(train=Dataset.from_list([MKQA]))
    load_source(DataSource(path="mkqa-Japanese"), str(tmp_path))
    assert asked[-1][0] == "apple/mkqa"


def test_a_set_that_needs_a_script_names_the_way_to_its_files(tmp_path, monkeypatch):
    def refuse(*_):
        raise RuntimeError("Dataset scripts are no longer supported, but found mkqa.py")

    monkeypatch.setattr("datasets.load_dataset_builder", refuse)
    with pytest.raises(
        DataError, match=r"hf download apple/mkqa .*refs/convert/parquet .*mkqa-Chinese"
    ):
        load_source(DataSource(path="mkqa-Chinese"), str(tmp_path))
