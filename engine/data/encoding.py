"""From one row to token ids and labels, as each phase sees it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from datasets import Features, List, Value
from transformers import PreTrainedTokenizerBase

from engine.config.schema import RunConfig
from engine.data.files import Row
from engine.data.schemas import Phase
from engine.data.templates import (
    SETTING,
    FittedPrompt,
    Message,
    Template,
    encode_answer,
    encode_document,
    encode_prompt,
    fit_prompt,
)

Use = Phase | Literal["text"]
"""What rows are tokenised for: a phase, or plain text for the loss beside PPO's."""

_IDS = List(Value("int32"))
FEATURES = {
    "sft": Features({"input_ids": _IDS, "labels": _IDS}),
    "reward": Features(
        {
            "chosen_ids": _IDS,
            "rejected_ids": _IDS,
            "prompt_length": Value("int32"),
            "kind": Value("string"),
        }
    ),
    "ppo": Features({"prompt_ids": _IDS, "row": Value("int32")}),
    "text": Features({"input_ids": _IDS}),
}
IGNORED = -100


def _fit(
    row: Row,
    answer_length: int,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    tally: Counter[str],
) -> FittedPrompt | None:
    """The prompt with room for its answer, else only its last turn, and the answer is cut."""
    messages: list[Message] = row["prompt"]
    fitted = fit_prompt(messages, tokenizer, template, max_length - answer_length)
    if fitted is None:
        setting = list(itertools.takewhile(lambda turn: turn["role"] in SETTING, messages))
        fitted = fit_prompt([*setting, messages[-1]], tokenizer, template, max_length - 1)
    if fitted is None:
        tally["dropped_long"] += 1
    elif len(fitted.messages) < len(messages) or len(fitted.ids) + answer_length > max_length:
        tally["truncated"] += 1
    return fitted


def _sft_row(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> list[Row]:
    template, max_length = config.data.template, config.sft.max_length
    if row["chosen"] is None or row["label"] is False:
        return []
    answer = encode_answer(row["chosen"], tokenizer, template)
    fitted = _fit(row, len(answer), max_length, tokenizer, template, tally)
    if fitted is None:
        return []
    ids = (fitted.ids + answer)[:max_length]
    labels = [IGNORED] * len(fitted.ids) + ids[len(fitted.ids) :]
    if config.sft.loss_on_prompt:
        labels = list(ids)
    elif row["learnt_turns"]:
        for start, end in _earlier_answers(fitted, row["learnt_turns"], tokenizer, template):
            labels[start:end] = ids[start:end]
    tally["tokens"] += len(ids)
    tally["trained_tokens"] += sum(label != IGNORED for label in labels)
    return [{"input_ids": ids, "labels": labels}]


def _earlier_answers(
    prompt: FittedPrompt,
    learnt_turns: list[bool],
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
) -> Iterator[tuple[int, int]]:
    """Where the turns that are learnt are in the prompt's ids, each with its EOS."""
    # Older rounds are cut before the last ones, so that turns keep their places from the end.
    kept = learnt_turns[len(learnt_turns) - len(prompt.messages) :]
    for index, (turn, is_learnt) in enumerate(zip(prompt.messages, kept, strict=True)):
        if turn["role"] != "assistant" or not is_learnt:
            continue
        before = encode_prompt(prompt.messages[:index], tokenizer, template)
        # Some chat templates rewrite older turns (drop their reasoning); those are not trained on.
        start = len(before)
        if prompt.ids[:start] == before and tokenizer.eos_token_id in prompt.ids[start:]:
            yield start, prompt.ids.index(tokenizer.eos_token_id, start) + 1


def _reward_rows(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> list[Row]:
    """A pair for each rejected answer."""
    if row["chosen"] is None or row["rejected"] is None:
        return []
    rejected = [row["rejected"], *(row["more_rejected"] or ())]
    pairs = (_pair({**row, "rejected": each}, config, tokenizer, tally) for each in rejected)
    return [pair for pair in pairs if pair is not None]


def _pair(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> Row | None:
    template, max_length = config.data.template, _pair_length(config)
    chosen = encode_answer(row["chosen"], tokenizer, template)
    rejected = encode_answer(row["rejected"], tokenizer, template)
    longest = max(len(chosen), len(rejected))
    fitted = _fit(row, longest, max_length, tokenizer, template, tally)
    if fitted is None:
        return None
    chosen_ids, rejected_ids = ((fitted.ids + ids)[:max_length] for ids in (chosen, rejected))
    if chosen_ids == rejected_ids:
        tally["dropped_identical"] += 1
        return None
    return {
        "chosen_ids": chosen_ids,
        "rejected_ids": rejected_ids,
        "prompt_length": len(fitted.ids),
        "kind": row["kind"],
    }


def max_tokens(config: RunConfig, phase: Phase) -> int:
    """Limit on the tokens of a row: of the prompt in step 3, else of prompt and answer together."""
    if phase == "ppo":
        return config.ppo.max_prompt_length
    return config.sft.max_length if phase == "sft" else _pair_length(config)


def _pair_length(config: RunConfig) -> int:
    """Most tokens of an answer with its prompt in step 2."""
    return config.pair_options.max_length


def _ppo_row(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> list[Row]:
    limit = config.ppo.max_prompt_length
    fitted = fit_prompt(row["prompt"], tokenizer, config.data.template, limit)
    if fitted is None:
        tally["dropped_long"] += 1
        return []
    tally["truncated"] += fitted.turns_cut > 0
    return [{"prompt_ids": fitted.ids}]


def _text_row(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> list[Row]:
    return [{"input_ids": [*encode_document(row["text"], tokenizer), tokenizer.eos_token_id]}]


_ENCODERS = {"sft": _sft_row, "reward": _reward_rows, "ppo": _ppo_row, "text": _text_row}


def encode_row(
    row: Row,
    use: Use,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    tally: Counter[str],
) -> list[Row]:
    """What a phase gets of one normalised row (columns as in `FEATURES`), if anything.

    `tally` counts what was cut or left out, under the names of `PhaseData.counts`, and of phase
    sft the `tokens` and `trained_tokens`.
    """
    return _ENCODERS[use](row, config, tokenizer, tally)
