"""The chat generator on a tiny random model: the kept cache, the ends of answers, the text."""

from __future__ import annotations

from itertools import cycle

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedTokenizerFast,
)

from engine.generation.chat import (
    AnswerText,
    ChatGenerator,
    ChatJudge,
    divergence,
    next_turn,
)
from engine.generation.decode import DecodeSession

GREEDY = {"max_new_tokens": 12, "temperature": 0.0}
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that characters beyond ASCII take several."""
    special = ["<eos>", "<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )


def tiny_model(family: str = "llama", seed: int = 0, context: int = 512):
    """Random weights, large enough that answers vary."""
    size = len(byte_tokenizer())
    shape = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": size}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    configs = {
        "llama": lambda: LlamaConfig(
            **shape,
            **ends,
            intermediate_size=64,
            num_hidden_layers=2,
            num_key_value_heads=2,
            max_position_embeddings=context,
            initializer_range=0.3,
        ),
        "opt": lambda: OPTConfig(
            **shape,
            **ends,
            ffn_dim=64,
            num_hidden_layers=2,
            word_embed_proj_dim=32,
            max_position_embeddings=context,
            init_std=0.3,
        ),
        "gpt2": lambda: GPT2Config(
            vocab_size=size,
            **ends,
            n_embd=32,
            n_head=4,
            n_layer=2,
            n_positions=context,
            initializer_range=0.3,
        ),
        "gpt_neox": lambda: GPTNeoXConfig(
            **shape,
            **ends,
            intermediate_size=64,
            num_hidden_layers=2,
            max_position_embeddings=context,
            initializer_range=0.3,
        ),
        "bloom": lambda: BloomConfig(
            vocab_size=size,
            **ends,
            hidden_size=32,
            n_head=4,
            n_layer=2,
            initializer_range=0.3,
        ),
    }
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(configs[family]()).eval()


def talk(generator: ChatGenerator, messages: list[dict[str, str]], **settings) -> str:
    """One whole answer."""
    return "".join(generator.stream(messages, **{**GREEDY, **settings}))


def user(text: str) -> dict[str, str]:
    """A question."""
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    """An answer."""
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gpt_neox", "bloom"])
def test_kept_cache_answers_as_a_fresh_one(family: str) -> None:
    model, tokenizer = tiny_model(family), byte_tokenizer()
    kept = ChatGenerator(model, tokenizer, "kept")
    messages: list[dict[str, str]] = []
    for question in ("One?", "And two?", "Three, then?"):
        messages.append(user(question))
        answer = talk(kept, messages)
        assert answer == talk(ChatGenerator(model, tokenizer, "fresh"), messages)
        messages.append(assistant(answer))
    assert 0 < kept.usage.kept_tokens < kept.usage.prompt_tokens
    # Undo two rounds, another question, then a conversation without its first round.
    for changed in ([*messages[:2], user("No, this!")], [*messages[2:], user("And?")]):
        assert talk(kept, changed) == talk(ChatGenerator(model, tokenizer, "fresh"), changed)


def test_only_what_follows_the_kept_answer_is_computed() -> None:
    generator = ChatGenerator(tiny_model(), byte_tokenizer(), "tiny")
    first = [user("Hello?")]
    computed: list[int] = []
    step = generator.session.decoder.step

    def counted(input_ids, *rest):
        computed.append(input_ids.shape[1])
        return step(input_ids, *rest)

    generator.session.decoder.step = counted
    answer = talk(generator, first)
    prompt = computed[0]
    computed.clear()
    talk(generator, [*first, assistant(answer), user("More?")])
    # The last generated token was never fed, and spaces around an answer are not kept.
    rendered = generator.count([*first, assistant(answer), user("More?")])
    assert computed[0] <= rendered - prompt
    talk(generator, [*first, assistant(answer), user("More?")])
    assert generator.usage.kept_tokens == generator.usage.prompt_tokens - 1


def test_a_broken_off_answer_leaves_the_cache_sound() -> None:
    model, tokenizer = tiny_model(), byte_tokenizer()
    generator = ChatGenerator(model, tokenizer, "tiny")
    stream = generator.stream([user("Hello?")], **GREEDY)
    for _ in range(3):
        next(stream)
    stream.close()
    with pytest.MonkeyPatch.context() as patch:
        layer = generator.session.decoder.layers[1]
        patch.setattr(layer, "attention", lambda *args, **kwargs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            talk(generator, [user("Hello? Again")])
    fresh = ChatGenerator(model, tokenizer, "fresh")
    assert talk(generator, [user("Hello?")]) == talk(fresh, [user("Hello?")])


class Speaker:
    """A decoder that says a text, over and over."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
        self.device = torch.device("cpu")
        self.size = len(tokenizer)
        self.tokens = cycle(tokenizer(text, add_special_tokens=False).input_ids)

    def step(self, input_ids, positions, attention_mask, cache) -> torch.Tensor:
        cache.advance(input_ids.shape[1])
        return torch.nn.functional.one_hot(torch.tensor([next(self.tokens)]), self.size).float()


def force(generator: ChatGenerator, text: str) -> None:
    """Make the model say a text."""
    generator.session = DecodeSession(Speaker(generator.tokenizer, text))


@pytest.mark.parametrize(
    ("said", "shown", "finish"),
    [
        (" Paris.<eos>more", "Paris.", "stop"),
        (" Paris.\n\nHuman: and", "Paris.", "stop"),
        ("Human: what", "", "stop"),
        (" I am Hum", "I am Hum", "length"),
        (" Grüße, 世界 \n<eos>", "Grüße, 世界", "stop"),
        ("a \n b<eos>", "a \n b", "stop"),
    ],
)
def test_answers_end_before_eos_and_the_next_turn(said: str, shown: str, finish: str) -> None:
    generator = ChatGenerator(tiny_model(), byte_tokenizer(), "tiny")
    force(generator, said)
    limit = len(generator.tokenizer(said, add_special_tokens=False).input_ids)
    assert talk(generator, [user("?")], max_new_tokens=limit) == shown
    assert generator.usage.finish == finish


def test_pieces_never_take_back_what_was_shown() -> None:
    tokenizer = byte_tokenizer()
    text = AnswerText(tokenizer, "Human:")
    said = "Hu Hum Humor: 世界\n\nHuman: x"
    shown = ""
    for token in tokenizer(said, add_special_tokens=False).input_ids:
        shown += text.push(token)
        assert "Hu Hum Humor: 世界".startswith(shown)
        if text.ended:
            break
    assert shown + text.rest() == "Hu Hum Humor: 世界"


@pytest.mark.parametrize("bos", [None, "<|im_start|>"])
def test_chatml_ends_at_its_special_tokens(bos: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = bos
    tokenizer.chat_template = CHATML
    ids, mark = next_turn(tokenizer)
    assert mark == ""
    wanted = tokenizer.convert_tokens_to_ids(["<eos>", "<|im_start|>", "<|im_end|>"])
    assert ids == set(wanted)
    generator = ChatGenerator(tiny_model(), tokenizer, "tiny")
    force(generator, "user Human: fine<|im_end|>\n")
    assert talk(generator, [user("?")], max_new_tokens=50) == "user Human: fine"


def test_sampling_settings_reach_the_choice() -> None:
    generator = ChatGenerator(tiny_model(), byte_tokenizer(), "tiny")
    question = [user("Tell me")]
    hot = {"temperature": 1.5, "max_new_tokens": 30}
    one = talk(generator, question, seed=1, **hot)
    assert one == talk(generator, question, seed=1, **hot)
    assert one != talk(generator, question, seed=2, **hot)
    assert talk(generator, question, seed=2, top_k=1, **hot) == talk(
        generator, question, max_new_tokens=30
    )
    plain = generator.encode(question)
    talk(generator, question, max_new_tokens=40, repetition_penalty=1000.0)
    answer = generator.session.tokens[len(plain) :]
    assert len(set(answer)) == len(answer)


def test_no_token_beyond_the_context() -> None:
    generator = ChatGenerator(tiny_model(context=64), byte_tokenizer(), "tiny")
    room = 64 - generator.count([user("?")])
    talk(generator, [user("?")], max_new_tokens=1000)
    assert generator.usage.new_tokens <= room
    with pytest.raises(ValueError, match="context of tiny holds 64"):
        talk(generator, [user("?" * 100)])


def test_a_template_without_system_turns_says_so() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}"
        "{{ raise_exception('no system role') }}{% endif %}{{ m['content'] }}{% endfor %}"
    )
    generator = ChatGenerator(tiny_model(), tokenizer, "tiny")
    with pytest.raises(ValueError, match="no system role"):
        generator.count([{"role": "system", "content": "s"}, user("?")])


def test_divergence_is_zero_to_itself_and_grows_with_the_difference() -> None:
    tokenizer = byte_tokenizer()
    one = ChatGenerator(tiny_model(seed=0), tokenizer, "one")
    other = ChatGenerator(tiny_model(seed=1), tokenizer, "other")
    messages = [user("Hello?"), assistant("An answer.")]
    assert divergence(one, one, messages) == pytest.approx(0.0, abs=1e-6)
    assert divergence(one, other, messages) > 0.1
    with_own_template = byte_tokenizer()
    with_own_template.chat_template = CHATML
    with pytest.raises(ValueError, match="do not share"):
        divergence(one, ChatGenerator(tiny_model(), with_own_template, "chatml"), messages)


@pytest.mark.parametrize("template", [None, CHATML])
def test_the_judge_scores_at_the_end_of_the_answer(tmp_path, template: str | None) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tiny_model().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    judge = ChatJudge.from_pretrained(str(tmp_path), torch.float32)
    seen = []
    scores = judge.model.scores
    judge.model.scores = lambda ids, mask: seen.append(ids[0].tolist()) or scores(ids, mask)
    good = judge.score([user("Hello?"), assistant("Good.")])
    bad = judge.score([user("Hello?"), assistant("Bad.")])
    assert good != bad
    text = tokenizer.decode(seen[0])
    assert text.endswith("Good.<eos>")
    assert text.count("Hello?") == text.count("Good.") == 1


def test_a_saved_model_answers_as_before(tmp_path) -> None:
    model, tokenizer = tiny_model(), byte_tokenizer()
    tokenizer.chat_template = CHATML
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = ChatGenerator.from_pretrained(str(tmp_path), "loaded", torch.float32)
    before = ChatGenerator(model, tokenizer, "before")
    assert talk(loaded, [user("Hi")]) == talk(before, [user("Hi")])


def test_the_original_pickle_loads(tmp_path) -> None:
    model, tokenizer = tiny_model("opt"), byte_tokenizer()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = ChatGenerator.from_pretrained(
        str(tmp_path), "original", torch.float32, tokenizer=str(tmp_path / "tokenizer")
    )
    before = ChatGenerator(model, tokenizer, "before")
    assert talk(loaded, [user("Hi")]) == talk(before, [user("Hi")])
