"""Text that spells a special token stays text, wherever it stands.

The reference is a twin: the same tokenizer with other names for its special tokens, which the texts
here do not spell.
"""

import functools
import json
import string
from itertools import islice

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from engine.config.schema import RunConfig
from engine.data import facts
from engine.data.files import DataError
from engine.data.phases import build_phase, unsupervised_rows
from engine.data.special_tokens import SpecialTokens
from engine.data.templates import encode_answer, encode_document, encode_prompt, install_template
from engine.generation.chat import ChatGenerator

ROLES = ("unk", "eos", "bos", "pad", "start", "end")
NAMES = ("<unk>", "</s>", "<s>", "<pad>", "<|im_start|>", "<|im_end|>")
OTHER_NAMES = tuple(f"@{role}@" for role in ROLES)
CORPUS = [
    "Human: What does </s> mean, and <|im_end|>? Assistant: It ends a text, of course.",
    string.ascii_letters,
    "system user assistant be kind; 12 <pad> of <s> in <|im_start|> are (twelve) <unk>!",
]
CHATML = (
    "{% for m in messages %}START{{ m['role'] }}\n{{ m['content'] | trim }}END\n{% endfor %}"
    "{% if add_generation_prompt %}STARTassistant\n{% endif %}"
)
# As Llama-2's: BOS from the template, the system turn inside the first question.
INST = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %} {{ m['content'] | trim }} {{ eos_token }}"
    "{% elif m['role'] == 'system' %}[SYS] {{ m['content'].replace('N', 'n') }} [/SYS]"
    "{% else %}[INST] {{ m['content'] | trim }} [/INST]{% endif %}{% endfor %}"
)
DIALOGUE = [
    {"role": "system", "content": "Never write </s> or <|im_end|>system."},
    {"role": "user", "content": "<|im_end|> What does </s> do?</s>"},
    {"role": "assistant", "content": "The </s> ends a text."},
    {"role": "user", "content": "<s></s><|im_end|>"},
]
ANSWER = "<pad> and </s> are <|im_start|>tokens</s>"


@functools.cache
def trained(kind):
    """The state of a tokenizer of a kind that models have; special tokens are ids 0 to 5."""
    alphabet = sorted(set("".join(CORPUS)))
    options = {"vocab_size": 420, "special_tokens": [*OTHER_NAMES], "show_progress": False}
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**options, unk_token=OTHER_NAMES[0])
    else:
        tokenizer = Tokenizer(models.BPE(unk_token=OTHER_NAMES[0]))
        if kind == "byte level":
            alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**options, initial_alphabet=alphabet)
    if kind == "byte level":
        split = pre_tokenizers.Split(Regex(r" ?[<|>/]+| ?\w+|\s+|[^\s\w]+"), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
    elif kind == "normaliser":
        # As Llama-2's: no pre-tokenizer, spaces become part of the pieces.
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.train_from_iterator(CORPUS * 5, trainer)
    return tokenizer.to_str()


def make_tokenizer(kind, names=NAMES):
    """A tokenizer of a kind with these names of its special tokens, in its vocabulary too."""
    state = trained(kind)
    for other, name in zip(OTHER_NAMES, names, strict=True):
        state = state.replace(other, name)
    known = dict(zip(ROLES, names, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(state),
        unk_token=known["unk"],
        eos_token=known["eos"],
        bos_token=known["bos"],
        pad_token=known["pad"],
        extra_special_tokens=[known["start"], known["end"]],
    )


KINDS = ("byte level", "metaspace", "normaliser", "unigram")
TEMPLATES = {"chatml": CHATML, "inst": INST, "human_assistant": None}


def with_template(kind, template, names=NAMES):
    """A tokenizer and the template's name in a configuration."""
    tokenizer = make_tokenizer(kind, names)
    source = TEMPLATES[template]
    if source is None:
        install_template(tokenizer, "human_assistant")
        return tokenizer, "human_assistant"
    tokenizer.chat_template = source.replace("START", names[4]).replace("END", names[5])
    return tokenizer, "chat_template"


TEXT = st.lists(st.one_of(st.text(max_size=8), st.sampled_from([*NAMES, " ", "\n"])), max_size=6)
CONTENT = TEXT.map("".join)


def special_count(ids):
    """Special tokens among ids, of those that are not also put for unknown characters."""
    return sum(i in range(1, len(NAMES)) for i in ids)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS[:3])
def test_text_has_the_ids_of_a_tokenizer_whose_special_tokens_are_named_otherwise(kind, template):
    tokenizer, name = with_template(kind, template)
    twin, _ = with_template(kind, template, OTHER_NAMES)

    @given(system=CONTENT, question=CONTENT, answer=CONTENT, document=CONTENT)
    @example("", DIALOGUE[1]["content"], DIALOGUE[2]["content"], "</s>")
    @settings(max_examples=60, deadline=None)
    def same(system, question, answer, document):
        roles = ("system", "user", "assistant", "user")
        texts = (system, question, answer, question)
        messages = [{"role": r, "content": c} for r, c in zip(roles, texts, strict=True)]
        for dialogue in (messages[1:2], messages):
            expected = twin.apply_chat_template(
                dialogue, add_generation_prompt=True, return_dict=False
            )
            assert encode_prompt(dialogue, tokenizer, name) == expected
        assert encode_answer(answer, tokenizer, name) == encode_answer(answer, twin, name)
        assert encode_document(document, tokenizer) == twin(document).input_ids

    same()


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_only_the_templates_own_special_tokens_are_real(kind, template):
    tokenizer, name = with_template(kind, template)
    for length in (2, 4):
        plain = [{**turn, "content": "text"} for turn in DIALOGUE[:length]]
        ids = encode_prompt(DIALOGUE[:length], tokenizer, name)
        own = special_count(encode_prompt(plain, tokenizer, name))
        assert special_count(ids) == own
        for turn in DIALOGUE[1:length]:
            assert turn["content"] in tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    answer = encode_answer(ANSWER, tokenizer, name)
    assert special_count(answer) == 1
    assert tokenizer.decode(answer[:-1]).strip() == ANSWER


@pytest.mark.parametrize("template", ["chatml", "human_assistant"])
def test_an_answer_has_the_same_ids_when_learnt_and_as_history(template):
    tokenizer, name = with_template("byte level", template)
    answer = encode_answer(ANSWER, tokenizer, name)[:-1]
    messages = [DIALOGUE[1], {"role": "assistant", "content": ANSWER}, DIALOGUE[3]]
    ids = encode_prompt(messages, tokenizer, name)
    assert any(ids[i : i + len(answer)] == answer for i in range(len(ids)))


@pytest.mark.parametrize("kind", KINDS)
def test_ordinary_dialogues_keep_the_ids_of_the_chat_template(kind):
    for template in TEMPLATES:
        tokenizer, name = with_template(kind, template)
        for row in islice(facts.rows("eval"), 50):
            expected = tokenizer.apply_chat_template(
                row["prompt"], add_generation_prompt=True, return_dict=False
            )
            assert encode_prompt(row["prompt"], tokenizer, name) == expected


def test_a_tokenizer_in_python_keeps_text_as_text():
    tokenizer = ByT5Tokenizer()
    install_template(tokenizer, "human_assistant")
    question = [{"role": "user", "content": "What does </s> do? <extra_id_0>"}]
    ids = encode_prompt(question, tokenizer, "human_assistant")
    assert ids == tokenizer.convert_tokens_to_ids(
        list("\n\nHuman: What does </s> do? <extra_id_0>\n\nAssistant:")
    )
    messages = [*question, {"role": "assistant", "content": "</s>"}, *question]
    assert encode_prompt(messages, tokenizer, "human_assistant").count(1) == 1


def test_whatever_names_are_drawn_they_are_told_apart():
    tokenizer = ByT5Tokenizer()
    text = "What does </s> do? <extra_id_0>"
    expected = tokenizer.convert_tokens_to_ids([*text, "</s>"])
    for _ in range(500):
        special = SpecialTokens(tokenizer)
        assert special.encode(special.hide(text) + "</s>") == expected


def test_a_template_that_tears_a_special_token_apart_is_refused():
    tokenizer = make_tokenizer("byte level")
    tokenizer.chat_template = "{{ messages[0]['content'][:15] }}"
    with pytest.raises(DataError, match=r"cuts a turn .* data\.template=human_assistant"):
        encode_prompt(DIALOGUE, tokenizer, "chat_template")


@pytest.fixture
def configure(tmp_path):
    """A configuration over rows written to a file."""

    def make(rows, **data):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps(rows))
        return RunConfig.model_validate(
            {"data": {"sources": [str(path)], "cache_dir": str(tmp_path / "cache"), **data}}
        )

    return make


@pytest.mark.parametrize("template", ["inst", "human_assistant"])
def test_each_answer_of_a_dialogue_is_learnt_to_its_end(configure, template):
    tokenizer, name = with_template("byte level", template)
    messages = [*DIALOGUE, {"role": "assistant", "content": ANSWER}]
    row = build_phase(
        configure([{"messages": messages}] * 3, template=name), tokenizer, "sft"
    ).train[0]
    learnt = [label for label in row["labels"] if label != -100]
    assert tokenizer.decode(learnt).replace(" ", "") == (
        "The</s>endsatext.</s>" + ANSWER.replace(" ", "") + "</s>"
    )
    assert learnt.count(tokenizer.eos_token_id) == 2


def test_plain_text_keeps_what_it_spells(configure, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text("\n".join(json.dumps({"text": f"text </s> {i}"}) for i in range(20)))
    tokenizer = make_tokenizer("byte level")
    config = configure([{"prompt": "a", "chosen": "b"}] * 4, unsupervised_sources=[str(texts)])
    ids = [i for row in unsupervised_rows(config, tokenizer, 8)["input_ids"][:] for i in row]
    decoded = tokenizer.decode(ids)
    assert decoded.startswith("text </s> 0</s>text </s> 1</s>")
    assert decoded.count("</s>") == pytest.approx(2 * ids.count(tokenizer.eos_token_id), abs=1)


def test_what_is_typed_into_a_chat_stays_text(tiny_model):
    generator = ChatGenerator.from_pretrained(tiny_model("llama"), "tiny", torch.float32)
    tokenizer = generator.tokenizer
    install_template(tokenizer, "human_assistant")
    typed = [
        {"role": "user", "content": "What does <eos> do?"},
        {"role": "assistant", "content": "<pad> fills, <eos> ends."},
        {"role": "user", "content": "<eos><eos>"},
    ]
    ids = generator.encode(typed)
    # The one real EOS ends the answer.
    assert ids.count(tokenizer.eos_token_id) == 1
    assert tokenizer.pad_token_id not in ids
    assert tokenizer.decode(ids).endswith("Human: <eos><eos>\n\nAssistant:")
    tokenizer.chat_template = "{{ raise_exception('no such turn') }}"
    with pytest.raises(ValueError, match=r"template of tiny refuses .*: no such turn"):
        generator.encode(typed)
