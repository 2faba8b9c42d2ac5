"""The dialogue template: from messages to the token ids of a prompt, and of an answer.

Prompt and answer are tokenised separately and their ids joined, in training and in generation, so
that both agree at the boundary. An answer ends in EOS, appended by id.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from engine.data.files import DataError
from engine.data.special_tokens import special_tokens

Template = Literal["human_assistant", "chat_template"]
Message = dict[str, str]

SETTING = ("tools", "system")
"""Roles of what a dialogue begins with, which is never cut."""

HUMAN_ASSISTANT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '\\n\\nHuman: ' + message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '\\n\\nAssistant: ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ '\\n\\nSystem: ' + message['content'] | trim }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"
)
"""The `human_assistant` template in Jinja, for tokenizers that add no BOS."""


@dataclass(frozen=True)
class FittedPrompt:
    """A prompt within its limit, and how many of its oldest turns were cut."""

    ids: list[int]
    messages: list[Message]
    turns_cut: int


@functools.lru_cache(maxsize=8)
def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer adds BOS before a text."""
    if tokenizer.bos_token_id is None:
        return False
    ids = tokenizer("a").input_ids
    return len(ids) > 1 and ids[0] == tokenizer.bos_token_id


def install_template(tokenizer: PreTrainedTokenizerBase, template: Template) -> None:
    """Store the template in the tokenizer, so that it is saved with each model and chat uses it.

    Raises:
        DataError: `chat_template` asked for, and the tokenizer has none.
    """
    if template == "human_assistant":
        bos = "{{ bos_token }}" if adds_bos(tokenizer) else ""
        tokenizer.chat_template = bos + HUMAN_ASSISTANT_CHAT_TEMPLATE
    elif not tokenizer.chat_template:
        raise DataError(
            f"data.template = chat_template, but the tokenizer of {tokenizer.name_or_path or 'it'} "
            "has none; set data.template=human_assistant"
        )


def render_prompt(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: Template
) -> str:
    """The text of a dialogue up to where the answer begins.

    Raises:
        DataError: the tokenizer's chat template refuses the dialogue.
    """
    if template == "human_assistant":
        marks = {"user": "Human: {}", "assistant": "Assistant: {}" + str(tokenizer.eos_token)}
        turns = [
            "\n\n" + marks.get(turn["role"], "System: {}").replace("{}", turn["content"].strip())
            for turn in messages
        ]
        bos = str(tokenizer.bos_token) if adds_bos(tokenizer) else ""
        return bos + "".join(turns) + "\n\nAssistant:"
    try:
        messages, tools = _with_tools_as_read(messages, tokenizer)
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # Jinja's errors and what templates raise themselves
        roles = ", ".join(turn["role"] for turn in messages)
        raise DataError(
            f"the tokenizer's chat template refuses a dialogue of {roles}: {error}; "
            "set data.template=human_assistant"
        ) from error


def _with_tools_as_read(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Message], list[Any] | None]:
    """Messages and tools as the tokenizer's template reads them: in a system turn if it has none.

    A turn of the role tools holds their JSON.
    """
    if messages[0]["role"] != "tools":
        return messages, None
    tools, rest = messages[0]["content"], messages[1:]
    if "tools" in str(tokenizer.chat_template):
        return rest, json.loads(tools)
    if rest[0]["role"] == "system":
        tools, rest = f"{rest[0]['content']}\n\n{tools}", rest[1:]
    return [{"role": "system", "content": tools}, *rest], None


def encode_prompt(
    messages: list[Message], tokenizer: PreTrainedTokenizerBase, template: Template
) -> list[int]:
    """Token ids of a dialogue (ending in a user turn) up to where the answer begins.

    Equal to the tokenizer's `apply_chat_template(..., add_generation_prompt=True)` once
    `install_template` has stored the template; but special tokens that the messages spell stay
    text; only those of the template are special.
    """
    special = special_tokens(tokenizer)
    if not any(special.spelled(turn["content"]) for turn in messages):
        text = render_prompt(messages, tokenizer, template)
        return tokenizer(text, add_special_tokens=False).input_ids
    hidden = [{**turn, "content": special.hide(turn["content"])} for turn in messages]
    return special.encode(render_prompt(hidden, tokenizer, template))


def encode_answer(text: str, tokenizer: PreTrainedTokenizerBase, template: Template) -> list[int]:
    """Token ids of an answer and EOS; text that spells a special token stays text."""
    # The anchor is what precedes an answer: tokenizers that treat the first word of a text
    # differently (SentencePiece) then see the answer as it follows the prompt.
    anchor, space = ("Assistant:", " ") if template == "human_assistant" else ("\n", "")
    answer = space + text.strip()
    before = _anchor_ids(tokenizer, anchor)
    ids = encode_text(anchor + answer, tokenizer)
    ids = ids[len(before) :] if ids[: len(before)] == before else encode_text(answer, tokenizer)
    return [*ids, tokenizer.eos_token_id]


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of plain text, without BOS or EOS; text that spells a special token stays text."""
    special = special_tokens(tokenizer)
    if not special.spelled(text):
        return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    return special.encode(special.hide(text))


def encode_document(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a text on its own, with the BOS or EOS that the tokenizer adds.

    Text that spells a special token stays text.
    """
    if not special_tokens(tokenizer).spelled(text):
        return tokenizer(text).input_ids
    before, after = _added_around(tokenizer)
    return [*before, *encode_text(text, tokenizer), *after]


@functools.lru_cache(maxsize=8)
def _added_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
    bare = tokenizer("a", add_special_tokens=False).input_ids
    ids = tokenizer("a").input_ids
    start = next(i for i in range(len(ids)) if ids[i : i + len(bare)] == bare)
    return ids[:start], ids[start + len(bare) :]


@functools.lru_cache(maxsize=8)
def _anchor_ids(tokenizer: PreTrainedTokenizerBase, anchor: str) -> list[int]:
    return encode_text(anchor, tokenizer)


def fit_prompt(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    max_tokens: int,
) -> FittedPrompt | None:
    """Encode a dialogue, cutting the oldest whole rounds until it has at most `max_tokens`.

    Turns of tools and system at the start stay. None if the last user turn alone does not fit.
    """
    start = next(
        (i for i, turn in enumerate(messages) if turn["role"] not in SETTING), len(messages)
    )
    system, rest = messages[:start], messages[start:]
    while True:
        ids = encode_prompt(system + rest, tokenizer, template)
        if len(ids) <= max_tokens:
            kept = system + rest
            return FittedPrompt(ids, kept, len(messages) - len(kept))
        later = [i for i, turn in enumerate(rest) if turn["role"] == "user" and i > 0]
        if not later:
            return None
        rest = rest[later[0] :]
