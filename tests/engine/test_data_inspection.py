"""What the report on a data set says, by counts made by hand: a token is a byte here."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.config.schema import DataSource, RunConfig
from engine.data.checks import check_rows, refusals
from engine.data.files import DataError
from engine.data.inspection import exported, histogram, inspect, learnt_pieces
from engine.data.schemas import schema_of
from engine.data.templates import install_template

# "\n\nHuman: Hi?\n\nAssistant:" is 24 bytes, " Hello." and EOS 8, " No." and EOS 5.
PAIR = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "No."}
PROMPT, CHOSEN, REJECTED = 24, 8, 5
LONG = {"prompt": "Hi?", "chosen": "Hello.", "rejected": "N" * 60}
IDENTICAL = {"prompt": "Hi?", "chosen": "Same.", "rejected": "Same."}


@pytest.fixture(scope="module")
def tokenizer():
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_alone = Tokenizer(models.BPE(vocab=letters, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone, eos_token="<eos>", pad_token="<pad>"
    )
    install_template(made, "human_assistant")
    return made


@pytest.fixture
def report(tmp_path, tokenizer):
    """Write rows into a file and inspect it, with limits of 40 tokens unless told."""

    def make(rows, limit=40, most_rows=100, suffix="json", **options):
        path = tmp_path / f"rows{len(list(tmp_path.iterdir()))}.{suffix}"
        text = json.dumps(rows) if suffix == "json" else "\n".join(map(json.dumps, rows))
        path.write_text(text, encoding="utf-8")
        config = configuration(tmp_path, limit)
        source = DataSource(path=str(path), **options)
        return inspect(config, source, tokenizer, "{{ messages[0]['content'] }}", most_rows, 2)

    return make


def configuration(tmp_path, limit=40, **data):
    return RunConfig.model_validate(
        {
            "data": {"cache_dir": str(tmp_path / "cache"), **data},
            "sft": {"max_length": limit},
            "reward": {"max_length": limit},
            "ppo": {"max_prompt_length": limit},
        }
    )


def test_answers_that_a_label_calls_bad_are_left_out_of_every_figure(report):
    rows = [
        {"prompt": "Hi?", "completion": "yes" if good else "no " * 20, "label": good}
        for good in (False, True, False)
    ]
    found = report(rows)
    assert found["rows"]["usable"] == found["rows"]["looked_at"] == 1
    assert found["rows"]["dropped"]["unwanted"] == 2
    assert found["lengths"]["chosen"]["greatest"] < 10


def test_pairs_are_counted(report):
    found = report([PAIR, PAIR, LONG, IDENTICAL, {**PAIR, "chosen": " "}])
    assert found["schema"] == "prompt 'prompt', chosen 'chosen', rejected 'rejected'"
    assert found["rows"]["usable"] == 4
    assert found["rows"]["dropped"] == {"empty": 1, "unusable": 0, "unwanted": 0}
    assert "row 5: column 'chosen' is empty" in found["rows"]["first_dropped"]["empty"]
    pairs = found["pairs"]
    assert (pairs["count"], pairs["identical"], pairs["chosen_longer"]) == (4, 1, 2)
    assert pairs["chosen_longer_share"] == 0.5
    assert all(found["steps"][step]["serves"] for step in "123")


def test_lengths_and_limits_are_those_of_the_bytes(report, tokenizer):
    found = report([PAIR, PAIR, LONG, IDENTICAL])
    assert found["lengths"]["prompt"]["greatest"] == PROMPT
    assert found["lengths"]["chosen"] == {"least": 7, "median": 8, "p95": 8, "greatest": CHOSEN}
    assert found["lengths"]["rejected"]["least"] == REJECTED
    assert found["lengths"]["rejected"]["greatest"] == 62
    assert found["lengths"]["histogram"] == [{"up_to": 32, "rows": 4}]
    sft, reward, ppo = (found["limits"][step] for step in "123")
    assert (sft["kept"], sft["truncated"], sft["with_eos"]) == (4, 0, 4)
    assert sft["trained_token_share"] == (3 * 8 + 7) / (4 * 24 + 3 * 8 + 7)
    assert (reward["rows"], reward["kept"], reward["truncated"]) == (4, 3, 1)
    assert (reward["dropped_identical"], reward["with_eos"]) == (1, 2)
    assert (ppo["kept"], ppo["with_eos"]) == (4, None)


def test_what_does_not_fit_is_cut_or_left_out(report):
    found = report([PAIR], limit=30)
    sft = found["limits"]["1"]
    assert (sft["truncated"], sft["truncated_share"], sft["with_eos"]) == (1, 1.0, 0)
    assert sft["trained_token_share"] == 6 / 30
    sft, reward, ppo = (report([PAIR], limit=23)["limits"][step] for step in "123")
    assert (sft["kept"], sft["dropped_long"]) == (0, 1)
    assert (reward["dropped_long"], ppo["dropped_long"]) == (1, 1)


def test_samples_show_what_is_learnt(report):
    found = report([PAIR, LONG])
    first, pair, prompt = found["samples"][:3]
    question = "\n\nHuman: Hi?\n\nAssistant:"
    assert first["text"] == [(question, False), (" Hello.<eos>", True)]
    assert (first["tokens"], first["learnt"]) == (PROMPT + CHOSEN, CHOSEN)
    assert [sample["truncated"] for sample in found["samples"][:5]] == [False] * 4 + [True]
    assert pair["rejected"] == f"{question} No.<eos>"
    assert (prompt["step"], prompt["prompt"]) == (3, question)
    assert [sample["row"] for sample in found["samples"]] == [1, 1, 1, 2, 2, 2]
    assert report([PAIR], limit=23)["samples"][0]["left_out"] == "too long"
    assert report([IDENTICAL])["samples"][1]["left_out"] == "identical"


def test_both_templates_are_rendered(report):
    rendered = report([PAIR])["rendered"]
    assert rendered["used"] == "\n\nHuman: Hi?\n\nAssistant: Hello.<eos>"
    assert rendered["own"] == "Hi?"


def test_step_2_by_dpo_has_its_own_limit_and_no_step_3(tmp_path, tokenizer):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([PAIR]))
    config = configuration(tmp_path)
    config.alignment = "dpo"
    config.dpo.max_length = 30
    found = inspect(config, DataSource(path=str(path)), tokenizer, None, 10, 1)
    assert set(found["limits"]) == {"1", "2"}
    assert found["limits"]["2"]["max_tokens"] == 30
    assert found["limits"]["2"]["truncated"] == 1
    assert "alignment=dpo" in found["steps"]["3"]["reason"]


def test_instructions_serve_step_1_alone(report):
    found = report([{"instruction": "Add.", "input": "1", "output": "1"}] * 3)
    assert found["steps"]["1"]["serves"]
    assert "no rejected answers" in found["steps"]["2"]["reason"]
    assert set(found["limits"]) == {"1"}
    assert found["pairs"] is None
    assert {sample["step"] for sample in found["samples"]} == {1}


def test_every_answer_of_a_dialogue_is_learnt(report):
    turns = [("user", "Hi?"), ("assistant", "Yes?"), ("user", "Tea?"), ("assistant", "No.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    found = report([{"messages": messages}], limit=100)
    learnt = [text for text, is_learnt in found["samples"][0]["text"] if is_learnt]
    assert learnt == [" Yes?<eos>", " No.<eos>"]


def test_text_serves_the_mixture_loss_alone(report):
    found = report([{"text": "abc"}, {"text": "a" * 20}], suffix="jsonl")
    assert not any(found["steps"][step]["serves"] for step in "123")
    assert "mixture loss" in found["steps"]["1"]["reason"]
    assert found["lengths"]["text"]["least"] == 4
    assert found["lengths"]["histogram"][0] == {"up_to": 4, "rows": 1}
    assert found["samples"][0]["text"] == "abc"


def test_rows_looked_at_are_spread_over_the_data(report):
    rows = [{"prompt": "Hi?", "response": "x" * length} for length in range(1, 102)]
    found = report(rows, most_rows=11)
    assert found["rows"]["looked_at"] == 11
    # the ids of " " and of the answer, and EOS
    chosen = found["lengths"]["chosen"]
    assert (chosen["least"], chosen["median"], chosen["greatest"]) == (3, 53, 103)


def test_histogram_counts_each_length_once():
    assert histogram([1, 2, 3, 4, 5, 16, 17]) == [
        {"up_to": 1, "rows": 1},
        {"up_to": 2, "rows": 1},
        {"up_to": 4, "rows": 2},
        {"up_to": 8, "rows": 1},
        {"up_to": 16, "rows": 1},
        {"up_to": 32, "rows": 1},
    ]
    assert histogram([]) == []


def test_pieces_follow_the_labels(tokenizer):
    ids = tokenizer("abcd").input_ids
    labels = [-100, ids[1], ids[2], -100]
    assert learnt_pieces(ids, labels, tokenizer) == [("a", False), ("bc", True), ("d", False)]


@pytest.mark.parametrize("phase", ["sft", "reward", "ppo"])
def test_an_export_holds_the_rows_of_the_step(tmp_path, tokenizer, phase):
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([{**PAIR, "prompt": f"Hi {n}?"} for n in range(21)]))
    config = configuration(tmp_path, sources=[str(path)], split="1,1,2")
    rows = list(exported(config, tokenizer, phase))
    train = [row for row in rows if row["part"] == "train"]
    # one row is held out, the others are split 1:1:2
    assert len(train) == {"sft": 5, "reward": 5, "ppo": 10}[phase]
    assert len(rows) == len(train) + 1
    row = train[0]
    if phase == "sft":
        assert row["learnt"] == [" Hello.<eos>"]
        assert row["text"].endswith("Assistant: Hello.<eos>")
        assert [i for i in row["labels"] if i != -100] == row["input_ids"][-CHOSEN:]
    elif phase == "reward":
        assert row["rejected"].endswith("Assistant: No.<eos>")
        assert row["chosen_ids"][-1] == tokenizer.eos_token_id
    else:
        assert row["prompt"].endswith("?\n\nAssistant:")
    json.dumps(rows)


def test_the_embedded_rows_count_under_the_steps_that_they_name(tokenizer, tmp_path):
    source = DataSource(path="embedded:facts")
    found = inspect(configuration(tmp_path, 200), source, tokenizer, None, 350, 0)
    counts = [found["limits"][step]["rows"] for step in "123"]
    assert sum(counts) == found["rows"]["looked_at"] == 350
    assert found["pairs"]["count"] == counts[1]
    assert found["samples"] == []


# Broken files: what the person is told, by the report and before a run alike.


def told(path, **options):
    """The message of the check before a run, which is also the one of the report."""
    config = RunConfig.model_validate({"data": {"sources": [{"path": str(path), **options}]}})
    (message,) = refusals(config, [1, 2, 3])
    with pytest.raises(DataError) as error:
        check_rows(config.data.sources[0], schema_of(config.data.sources[0]))
    assert str(error.value) == message
    return message


@pytest.mark.parametrize("before", [16, 1616])
def test_bad_json_is_named_by_file_and_line(tmp_path, before):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(PAIR)] * before + ['{"prompt": "Hi?", "chosen": '] * 2))
    message = told(path)
    assert f"{path}: line {before + 1} is not JSON" in message
    assert "one object per line" in message
    path = tmp_path / "a.json"
    path.write_text("[\n" + ",\n".join([json.dumps(PAIR)] * (before - 1) + ['{"x" 1}']) + "\n]")
    message = told(path)
    assert f"{path}: line {before + 1} is not JSON" in message
    assert "list of objects" in message


def test_a_missing_column_is_named_with_those_that_are_there(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "Hi?", "rejected": "No."}]))
    message = told(path)
    assert str(path) in message
    assert "without a column 'chosen' (columns: prompt, rejected)" in message
    assert "columns: {chosen: COLUMN}" in message


def test_answers_that_are_all_empty_are_refused_at_the_first(tmp_path):
    path = tmp_path / "a.jsonl"
    good = {**PAIR, "prompt": ""}
    path.write_text("\n".join(map(json.dumps, [{**PAIR, "chosen": ""}, good, {"prompt": "Hi?"}])))
    message = told(path)
    assert f"2 without an answer, first {path}, line 1: column 'chosen' is empty" in message
    assert f"first {path}, line 2: the prompt is empty" in message
    assert "fill these columns" in message


def test_some_empty_answers_are_no_obstacle(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [PAIR, {"prompt": "Hi?", "rejected": "No."}])))
    source = DataSource(path=str(path))
    reading = check_rows(source, schema_of(source))
    assert (reading.rows, reading.usable, reading.complete) == (2, 1, True)
    assert reading.dropped.first["empty"] == f"{path}, line 2: column 'chosen' is missing"
    assert not check_rows(source, schema_of(source), most_rows=1).complete


def test_a_value_of_the_wrong_type_is_refused_before_the_run(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [PAIR] * 30 + [{**PAIR, "prompt": {"a": 1}}])))
    assert f"{path}, line 31: column 'prompt' holds a dict" in told(path)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_a_wrong_encoding_is_named_by_line_and_byte(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    head, good, bad = "prompt,chosen,rejected\n", "Hi?,Yes.,No.\n", "Où?,Là.,No.\n"
    if suffix == "jsonl":
        head, good = "", json.dumps(PAIR) + "\n"
        bad = json.dumps({**PAIR, "prompt": "Où?"}, ensure_ascii=False) + "\n"
    path.write_bytes((head + good * 3000).encode() + bad.encode("latin-1"))
    line = 3001 + head.count("\n")
    message = told(path)
    assert f"{path}: line {line} is not UTF-8 text (byte 0xf9" in message
    assert "iconv -f ENCODING -t UTF-8" in message


def test_utf_16_is_recognised(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(json.dumps([PAIR]).encode("utf-16"))
    config = RunConfig.model_validate({"data": {"sources": [str(path)]}})
    (message,) = refusals(config, [1])
    assert "line 1 is not UTF-8" in message
    assert "iconv -f UTF-16" in message
