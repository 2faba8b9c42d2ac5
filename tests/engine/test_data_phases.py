"""Templates and phases: what is tokenised, what is learnt, who gets which rows."""

import hashlib
import json
import multiprocessing
import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from engine.config.schema import RunConfig
from engine.data import cache
from engine.data.batches import row_lengths
from engine.data.files import DataError
from engine.data.phases import (
    PromptColumns,
    build_phase,
    eval_prompts,
    tokenizer_fingerprint,
    unsupervised_rows,
)
from engine.data.sources import load_source
from engine.data.templates import (
    encode_answer,
    encode_prompt,
    fit_prompt,
    install_template,
)

TEXT = [
    "\n\nHuman: What is the capital of France?\n\nAssistant: Paris, of course. 12 (twelve) times!",
    "System: be kind and answer in short sentences, please; thank you.",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DIALOGUE = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris, of course."},
    {"role": "user", "content": "Thank you; and 12 times?"},
]


def make_tokenizer(bos=False, metaspace=False):
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    special = ["<unk>", "<eos>", "<bos>", "<pad>", "<|im_start|>"]
    if metaspace:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        bpe.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = sorted(set("".join(TEXT)))
    else:
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXT * 3, trainer)
    if bos:
        bpe.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", bpe.token_to_id("<bos>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<eos>",
        bos_token="<bos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def pairs(count):
    return [
        {"prompt": f"Question {i}?", "chosen": f"Good answer {i}.", "rejected": "bad"}
        for i in range(count)
    ]


@pytest.fixture
def configure(tmp_path):
    """A configuration over rows written to a file, with its own cache."""

    def make(rows, name="rows.json", **changes):
        path = tmp_path / name
        path.write_text(json.dumps(rows))
        data = {"sources": [str(path)], "cache_dir": str(tmp_path / "cache")}
        return RunConfig.model_validate({**changes, "data": {**data, **changes.get("data", {})}})

    return make


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("template", ["human_assistant", "chat_template"])
def test_prompt_ids_are_those_of_the_stored_chat_template(bos, metaspace, template):
    tokenizer = make_tokenizer(bos, metaspace)
    tokenizer.chat_template = CHATML
    install_template(tokenizer, template)
    for length in (2, 4):
        ids = encode_prompt(DIALOGUE[:length], tokenizer, template)
        by_tokenizer = tokenizer.apply_chat_template(
            DIALOGUE[:length], add_generation_prompt=True, return_dict=False
        )
        assert ids == by_tokenizer
    expects_bos = bos and template == "human_assistant"
    assert ids.count(tokenizer.bos_token_id) == expects_bos
    assert (ids[0] == tokenizer.bos_token_id) == expects_bos


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("template", ["human_assistant", "chat_template"])
@pytest.mark.parametrize("answer", ["Paris", "12 times", "(twelve)", "an answer\n\nin two parts."])
def test_prompt_and_answer_meet_where_the_whole_text_would_split(metaspace, template, answer):
    tokenizer = make_tokenizer(metaspace=metaspace)
    tokenizer.chat_template = CHATML
    install_template(tokenizer, template)
    prompt = DIALOGUE[:2]
    joined = encode_prompt(prompt, tokenizer, template) + encode_answer(answer, tokenizer, template)
    whole = tokenizer.apply_chat_template(
        [*prompt, {"role": "assistant", "content": answer}], return_dict=False
    )
    assert joined == whole[: len(joined)]
    assert joined[-1] == tokenizer.eos_token_id


def test_eos_is_put_by_id_never_read_from_text(tokenizer):
    ids = encode_answer("the token <eos> ends", tokenizer, "human_assistant")
    assert ids.count(tokenizer.eos_token_id) == 1
    assert ids[-1] == tokenizer.eos_token_id


def test_a_missing_chat_template_is_refused():
    bare = make_tokenizer()
    with pytest.raises(DataError, match=r"data\.template=human_assistant"):
        install_template(bare, "chat_template")


def test_a_template_that_refuses_a_role_names_the_way_out():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system turns') }}"
    with pytest.raises(DataError, match=r"no system turns.*human_assistant"):
        encode_prompt(DIALOGUE, tokenizer, "chat_template")


def test_the_oldest_whole_rounds_are_cut(tokenizer):
    whole = encode_prompt(DIALOGUE, tokenizer, "human_assistant")
    kept = fit_prompt(DIALOGUE, tokenizer, "human_assistant", len(whole))
    assert kept.ids == whole
    assert kept.turns_cut == 0
    cut = fit_prompt(DIALOGUE, tokenizer, "human_assistant", len(whole) - 1)
    assert cut.messages == [DIALOGUE[0], DIALOGUE[3]]
    assert cut.turns_cut == 2
    assert fit_prompt(DIALOGUE, tokenizer, "human_assistant", 5) is None


def decoded_labels(row, tokenizer):
    return tokenizer.decode([label for label in row["labels"] if label != -100])


def test_sft_learns_the_answer_and_eos_alone(configure, tokenizer):
    data = build_phase(configure(pairs(40)), tokenizer, "sft")
    row = data.train[0]
    assert decoded_labels(row, tokenizer).startswith(" Good answer")
    assert row["labels"][-1] == row["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(row["input_ids"]).startswith("\n\nHuman: Question")
    shares = [sum(x != -100 for x in r["labels"]) / len(r["labels"]) for r in data.train]
    assert min(shares) <= data.counts["trained_token_share"] <= max(shares)


def test_loss_on_the_prompt_where_asked(configure, tokenizer):
    config = configure(pairs(40), sft={"loss_on_prompt": True})
    data = build_phase(config, tokenizer, "sft")
    assert data.train[0]["labels"] == data.train[0]["input_ids"]
    assert data.counts["trained_token_share"] == 1


@pytest.mark.parametrize("template", ["human_assistant", "chat_template"])
def test_all_answers_of_a_dialogue_are_learnt(configure, template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML
    messages = [*DIALOGUE, {"role": "assistant", "content": "Yes, 12 times."}]
    config = configure([{"messages": messages}] * 3, data={"template": template})
    row = build_phase(config, tokenizer, "sft").train[0]
    learnt = decoded_labels(row, tokenizer)
    assert learnt.replace(" ", "") == "Paris,ofcourse.<eos>Yes,12times.<eos>"


def test_earlier_answers_of_a_preference_dialogue_are_not_learnt(configure, tokenizer):
    row = {"prompt": DIALOGUE, "chosen": "Yes.", "rejected": "No."}
    data = build_phase(configure([row] * 20), tokenizer, "sft")
    assert decoded_labels(data.train[0], tokenizer) == " Yes.<eos>"


def test_pairs_share_their_prompt_and_differ_in_the_answer(configure, tokenizer):
    row = build_phase(configure(pairs(40)), tokenizer, "reward").train[0]
    chosen, rejected = (tokenizer.decode(row[name]) for name in ("chosen_ids", "rejected_ids"))
    assert chosen.split("Assistant:")[0] == rejected.split("Assistant:")[0]
    assert chosen.endswith(".<eos>")
    assert rejected.endswith(" bad<eos>")
    assert row["kind"] is None


def test_pairs_equal_after_truncation_are_dropped_and_counted(configure, tokenizer):
    same = {"prompt": "Q?", "chosen": "a " * 60 + "good", "rejected": "a " * 60 + "bad"}
    config = configure([same] * 20 + pairs(20), reward={"max_length": 40})
    data = build_phase(config, tokenizer, "reward")
    counts = data.counts
    assert counts["dropped_identical"] > 0
    # 2 of 40 rows are held out; four tenths of the others are the phase's.
    assert counts["rows"] + counts["dropped_identical"] == 15
    assert len(data.train) == counts["rows"]
    assert all(row["chosen_ids"] != row["rejected_ids"] for row in data.train)
    assert max(len(row["chosen_ids"]) for row in data.train) <= 40


def test_long_rows_lose_turns_then_the_end_and_are_counted(configure, tokenizer):
    long_answer = {"prompt": DIALOGUE, "chosen": "word " * 200, "rejected": "No."}
    config = configure([long_answer] * 20, sft={"max_length": 60}, ppo={"max_prompt_length": 5})
    data = build_phase(config, tokenizer, "sft")
    assert data.counts["truncated"] == data.counts["rows"]
    row = data.train[0]
    assert len(row["input_ids"]) == 60
    assert row["input_ids"][-1] != tokenizer.eos_token_id
    assert "Paris" not in tokenizer.decode(row["input_ids"])
    with pytest.raises(DataError, match=r"no rows for step 3 \(\d+ dropped_long"):
        build_phase(config, tokenizer, "ppo")


def questions_of(dataset, column, tokenizer):
    return {tokenizer.decode(ids).split("?")[0] for ids in dataset[column][:]}


def test_phases_and_held_out_rows_do_not_overlap(configure, tokenizer):
    config = configure(pairs(200))
    sft, reward, ppo = (build_phase(config, tokenizer, p) for p in ("sft", "reward", "ppo"))
    trained = [
        questions_of(sft.train, "input_ids", tokenizer),
        questions_of(reward.train, "chosen_ids", tokenizer),
        questions_of(ppo.train, "prompt_ids", tokenizer),
    ]
    held_out = questions_of(ppo.eval, "prompt_ids", tokenizer)
    assert [len(part) for part in trained] == [38, 76, 76]
    assert len(set.union(*trained, held_out)) == 200
    assert len(held_out) == 10
    assert held_out == questions_of(sft.eval, "input_ids", tokenizer)
    assert held_out == questions_of(reward.eval, "chosen_ids", tokenizer)


def test_another_seed_gives_another_split(configure, tokenizer):
    rows = pairs(100)
    one = build_phase(configure(rows), tokenizer, "sft").train
    two = build_phase(configure(rows, seed=7), tokenizer, "sft").train
    assert questions_of(one, "input_ids", tokenizer) != questions_of(two, "input_ids", tokenizer)


def _hash_rows(config, queue):
    tokenizer = make_tokenizer()
    queue.put(build_phase(config, tokenizer, "ppo").train["prompt_ids"][:])


@pytest.mark.slow
def test_the_split_is_the_same_in_another_process(configure, tokenizer, tmp_path):
    config = configure(pairs(60))
    here = build_phase(config, tokenizer, "ppo").train["prompt_ids"][:]
    elsewhere = config.model_copy(deep=True)
    elsewhere.data.cache_dir = str(tmp_path / "other")
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    child = context.Process(target=_hash_rows, args=(elsewhere, queue))
    os.environ["PYTHONHASHSEED"] = "77"
    try:
        child.start()
        assert queue.get(timeout=120) == here
    finally:
        del os.environ["PYTHONHASHSEED"]
        child.join()


def test_a_source_with_its_own_test_part_trains_on_all_of_train(tmp_path, tokenizer):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.json").write_text(json.dumps(pairs(20)))
    test = [{"prompt": f"Test {i}?", "chosen": "A", "rejected": "B"} for i in range(9)]
    (folder / "test.json").write_text(json.dumps(test))
    config = RunConfig.model_validate(
        {"data": {"sources": [str(folder)], "cache_dir": str(tmp_path / "c"), "eval_rows": 5}}
    )
    trained = [build_phase(config, tokenizer, p).counts["rows"] for p in ("sft", "reward", "ppo")]
    assert sum(trained) == 20
    data = build_phase(config, tokenizer, "ppo")
    assert len(data.eval) == data.counts["eval_rows"] == 5
    assert all("Test" in tokenizer.decode(ids) for ids in data.eval["prompt_ids"][:])


def test_sources_are_blended_and_sft_only_sources_join_whole(configure, tokenizer, tmp_path):
    instructions = [{"instruction": f"Do {i}?", "output": "Done."} for i in range(50)]
    (tmp_path / "instructions.json").write_text(json.dumps(instructions))
    config = configure(pairs(50))
    config.data.sources = [*config.data.sources, {"path": str(tmp_path / "instructions.json")}]
    sft, reward, ppo = (build_phase(config, tokenizer, p) for p in ("sft", "reward", "ppo"))
    assert "Do" in " ".join(questions_of(ppo.train, "prompt_ids", tokenizer))
    assert "Do" not in " ".join(questions_of(reward.train, "chosen_ids", tokenizer))
    from_pairs = round(48 * 0.2), round(48 * 0.6) - round(48 * 0.2), 48 - round(48 * 0.6)
    assert reward.counts["rows"] == from_pairs[1]
    assert sft.counts["rows"] + ppo.counts["rows"] == from_pairs[0] + from_pairs[2] + 48

    config = configure(pairs(50))
    config.data.sft_only_sources = [str(tmp_path / "instructions.json")]
    sft = build_phase(config, tokenizer, "sft")
    learnt = [q for q in questions_of(sft.train, "input_ids", tokenizer) if "Do" in q]
    assert len(learnt) == 50


def test_without_pairs_sft_gets_all_rows(configure, tokenizer):
    rows = [{"instruction": f"Do {i}?", "output": "Done."} for i in range(40)]
    assert build_phase(configure(rows), tokenizer, "sft").counts["rows"] == 38
    with pytest.raises(DataError, match="no rows for step 2"):
        build_phase(configure(rows), tokenizer, "reward")


def test_rows_that_name_their_phases_serve_those(configure, tokenizer):
    rows = [{**row, "phases": ["reward", "ppo"]} for row in pairs(40)]
    rows += [{"prompt": f"Only {i}?", "chosen": "Yes.", "phases": ["sft"]} for i in range(20)]
    config = configure(rows)
    sft = build_phase(config, tokenizer, "sft")
    assert all("Only" in q for q in questions_of(sft.train, "input_ids", tokenizer))
    reward, ppo = (build_phase(config, tokenizer, p) for p in ("reward", "ppo"))
    assert reward.counts["rows"] == ppo.counts["rows"] >= 37


def test_tokenised_once_and_read_from_the_cache_after(configure, tokenizer, monkeypatch):
    config = configure(pairs(40))
    notes = []
    first = build_phase(config, tokenizer, "sft", notes.append)
    assert "tokenising 0 %" in notes
    notes.clear()
    # What padding leaves in the tokenizer is no reason to tokenise again.
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    again = build_phase(config, tokenizer, "sft", notes.append)
    assert notes == []
    assert again.train[:] == first.train[:]
    assert again.counts == first.counts


def test_row_lengths_are_of_the_longest_column(configure, tokenizer):
    data = build_phase(configure(pairs(40)), tokenizer, "reward")
    lengths = row_lengths(data.train, "chosen_ids", "rejected_ids")
    expected = [max(len(r["chosen_ids"]), len(r["rejected_ids"])) for r in data.train]
    assert lengths.tolist() == expected
    chosen = row_lengths(data.train.select([3, 1]), "chosen_ids")
    assert chosen.tolist() == [len(data.train[i]["chosen_ids"]) for i in (3, 1)]
    assert row_lengths(data.train.select([]), "chosen_ids").tolist() == []


def test_changed_content_is_tokenised_again(configure, tokenizer):
    before = build_phase(configure(pairs(40)), tokenizer, "sft").train["input_ids"][:]
    changed = [{**row, "chosen": "Another."} for row in pairs(40)]
    after = build_phase(configure(changed), tokenizer, "sft").train["input_ids"][:]
    assert before != after


@pytest.fixture
def hashed(monkeypatch):
    """Bytes that the cache has hashed so far, in a list of one; all files are a minute old."""
    total = [0]
    blake2b, now = hashlib.blake2b, time.time

    class Counted:
        def __init__(self, data=b"", digest_size=12):
            self.digest = blake2b(data, digest_size=digest_size)
            total[0] += len(data)

        def update(self, data):
            total[0] += len(data)
            self.digest.update(data)

        def hexdigest(self):
            return self.digest.hexdigest()

    monkeypatch.setattr(cache, "hashlib", SimpleNamespace(blake2b=Counted))
    monkeypatch.setattr(time, "time", lambda: now() + 60)
    return total


def chosen_answers(config):
    source = load_source(config.data.sources[0], config.data.cache_dir)
    return source.train["chosen"][:]


def test_a_large_file_is_hashed_whole_once(configure, hashed):
    config = configure([{**row, "chosen": "word " * 500_000} for row in pairs(4)])
    chosen_answers(config)
    before = hashed[0]
    assert before > 10_000_000
    chosen_answers(config)
    assert hashed[0] - before < 2_000_000


@pytest.mark.parametrize("keep_time", [False, True])
def test_an_edit_that_keeps_the_size_is_noticed(configure, hashed, keep_time):
    config = configure([{**row, "rejected": "word " * 20_000} for row in pairs(40)])
    path = Path(config.data.sources[0].path)
    before = path.stat()
    for number in (0, 13, 39):
        answer = f"Good answer {number}."
        assert chosen_answers(config)[number] == answer
        text = path.read_text().replace(answer, answer.upper())
        path.write_text(text)
        if keep_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_size == before.st_size
        assert chosen_answers(config)[number] == answer.upper()


def test_another_tokenizer_has_another_fingerprint(tokenizer):
    prints = {
        tokenizer_fingerprint(made)
        for made in (make_tokenizer(), make_tokenizer(bos=True), make_tokenizer(metaspace=True))
    }
    assert len(prints) == 3
    assert tokenizer_fingerprint(make_tokenizer()) in prints


def test_the_cache_is_the_users_own(tmp_path):
    root = cache.cache_root(str(tmp_path / "mine"))
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_failed_build_leaves_nothing_behind(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise DataError("no")

    with pytest.raises(DataError):
        cache.build_once(tmp_path / "built", fail)
    assert list(tmp_path.iterdir()) == []


def test_two_builders_end_with_one_folder(tmp_path):
    def build_while_another_finishes(folder):
        (folder / "x").write_text("mine")
        (tmp_path / "built").mkdir()
        (tmp_path / "built" / "x").write_text("theirs")

    cache.build_once(tmp_path / "built", build_while_another_finishes)
    assert [path.name for path in tmp_path.iterdir()] == ["built"]


def test_a_builder_whose_files_another_one_cleared_away_takes_what_that_one_built(tmp_path):
    def build_while_another_finishes(folder):
        (tmp_path / "built").mkdir()
        raise FileNotFoundError("a part of it")

    assert cache.build_once(tmp_path / "built", build_while_another_finishes).is_dir()


def test_parts_are_kept_for_another_attempt_unless_that_would_fail_too(tmp_path):
    target = tmp_path / "built"
    old, fresh = tmp_path / ".old.parts", tmp_path / ".fresh.parts"
    for folder, days in ((old, 8), (fresh, 6)):
        folder.mkdir()
        (folder / "part").write_text("x")
        os.utime(folder, (time.time() - days * 86400,) * 2)

    def attempt(error):
        with cache.work_folder(target) as work:
            work.mkdir(exist_ok=True)
            (work / "part").write_text("x")
            raise error

    for error, kept in ((KeyboardInterrupt, True), (OSError, True), (DataError, False)):
        with pytest.raises(error):
            attempt(error)
        assert (tmp_path / ".built.parts" / "part").exists() == kept
    assert not old.exists()
    assert fresh.exists()
    with cache.work_folder(target) as work:
        work.mkdir()
    assert not work.exists()


def test_eval_prompts_stand_beside_the_eval_rows_of_ppo(configure, tokenizer):
    config = configure([{**row, "references": [row["chosen"]]} for row in pairs(200)])
    prompts = eval_prompts(config, tokenizer)
    rows = build_phase(config, tokenizer, "ppo").eval
    assert [p["prompt_ids"] for p in prompts] == rows["prompt_ids"][:]
    assert [p["row"] for p in prompts] == rows["row"][:]
    assert prompts[0]["references"] == [prompts[0]["chosen"]]
    assert prompts[0]["preferred_style"] is None
    assert prompts[0]["rejected"] == "bad"


def test_unsupervised_text_is_packed_into_whole_blocks(configure, tokenizer, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"text number {i}"}) for i in range(50)))
    config = configure(pairs(4), data={"unsupervised_sources": [str(texts)]})
    rows = unsupervised_rows(config, tokenizer, 16)
    assert {len(ids) for ids in rows["input_ids"][:]} == {16}
    joined = tokenizer.decode([i for ids in rows["input_ids"][:] for i in ids])
    assert joined.startswith("text number 0<eos>text number 1<eos>")
    with pytest.raises(DataError, match="less than one block of 9999"):
        unsupervised_rows(config, tokenizer, 9999)
    config.data.unsupervised_sources = config.data.sources
    with pytest.raises(DataError, match="no plain text"):
        unsupervised_rows(config, tokenizer, 16)


def test_further_columns_of_each_prompt_are_those_of_its_row(configure, tokenizer):
    rows = [
        {
            "question": f"How much is {n} and {n}?" + " word" * (60 if n % 7 == 0 else 0),
            "answer": f"It is {2 * n}.",
            "solution": 2 * n,
            "tags": ["sum", {"of": n}],
        }
        for n in range(100)
    ]
    models = {"trained_reward": "elsewhere"}
    config = configure(rows, models=models, ppo={"max_prompt_length": 200})
    data, columns = build_phase(config, tokenizer, "ppo"), PromptColumns(config)
    assert data.counts["dropped_long"] > 0  # so that places in the data are not consecutive
    assert len(data.train) > 20
    for row in data.train:
        found = columns.of(row["row"])
        n = found["solution"] // 2
        assert found.pop("prompt") == rows[n]["question"]
        assert found == {name: value for name, value in rows[n].items() if name != "question"}
        assert f"{n} and {n}?" in tokenizer.decode(row["prompt_ids"])


def test_dialogues_are_given_as_messages_and_pairs_are_not_given(configure, tokenizer):
    config = configure([{**pair, "source": "web"} for pair in pairs(50)])
    data, columns = build_phase(config, tokenizer, "ppo"), PromptColumns(config)
    found = columns.of(data.train[0]["row"])
    assert set(found) == {"prompt", "source"}
    dialogue = configure([{"prompt": DIALOGUE, "chosen": "yes", "rejected": "no"}] * 30)
    build_phase(dialogue, tokenizer, "ppo")
    found = PromptColumns(dialogue).of(0)
    assert [turn["role"] for turn in found["prompt"]] == [turn["role"] for turn in DIALOGUE]


TOOLS = '[{"name": "add", "about": "a sum, not <eos>"}]'
WITH_TOOLS = CHATML.replace("{% for", "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for", 1)


@pytest.mark.parametrize(
    ("own", "template", "expected"),
    [
        (
            CHATML,
            "human_assistant",
            "\n\nSystem: {}\n\nSystem: be kind\n\nHuman: Hi?\n\nAssistant:",
        ),
        (
            CHATML,
            "chat_template",
            "<|im_start|>system\nbe kind\n\n{}<eos>\n<|im_start|>user\nHi?<eos>\n"
            "<|im_start|>assistant\n",
        ),
        (
            WITH_TOOLS,
            "chat_template",
            "{}\n<|im_start|>system\nbe kind<eos>\n<|im_start|>user\nHi?<eos>\n"
            "<|im_start|>assistant\n",
        ),
    ],
)
def test_tools_are_read_as_the_template_has_them(own, template, expected):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = own
    install_template(tokenizer, template)
    messages = [
        {"role": "tools", "content": TOOLS},
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "Hi?"},
    ]
    ids = encode_prompt(messages, tokenizer, template)
    assert tokenizer.decode(ids) == expected.replace("{}", TOOLS)
    # the special token that the tools spell is text
    assert ids.count(tokenizer.eos_token_id) == expected.count("<eos>")
    older = [*messages, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "So"}]
    fitted = fit_prompt(older, tokenizer, template, len(ids))
    assert [turn["role"] for turn in fitted.messages] == ["tools", "system", "user"]
