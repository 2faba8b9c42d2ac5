"""What a data set is and what each step would see of it: counts, lengths, masks, decoded rows."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TypedDict

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from engine.config.schema import DataSource, RunConfig
from engine.config.steps import pipeline
from engine.data.encoding import IGNORED, encode_row, max_tokens
from engine.data.files import Row
from engine.data.phases import build_phase
from engine.data.rows import Reason
from engine.data.schemas import PHASES, Phase
from engine.data.sources import Note, load_source
from engine.data.templates import encode_answer, encode_document, encode_prompt, render_prompt

_ANSWER_IDS = ("input_ids", "chosen_ids", "rejected_ids")

Piece = tuple[str, bool]
"""Decoded text, and whether its tokens are trained on."""


class RowCounts(TypedDict):
    """Rows of a source; `first_dropped` says where the first of each reason is."""

    usable: int
    held_out: int | None
    dropped: dict[Reason, int]
    first_dropped: dict[Reason, str]
    looked_at: int


class Serving(TypedDict):
    """Whether a source serves a step, and if not why."""

    serves: bool
    reason: str | None


class Eos(TypedDict):
    """The token that ends an answer."""

    token: str
    id: int


class Spread(TypedDict):
    """Lengths in tokens."""

    least: int
    median: int
    p95: int
    greatest: int


class Bin(TypedDict):
    """Rows of a histogram's bin, by the greatest length in it."""

    up_to: int
    rows: int


class Lengths(TypedDict, total=False):
    """Tokens before anything is cut: of text, or of prompt and answers; None without such rows."""

    text: Spread | None
    prompt: Spread | None
    chosen: Spread | None
    rejected: Spread | None
    prompt_and_chosen: Spread | None
    histogram: list[Bin]


class PairCounts(TypedDict):
    """Pairs for step 2: how many are identical, in how many chosen has more tokens."""

    count: int
    identical: int
    chosen_longer: int
    chosen_longer_share: float


class StepLimits(TypedDict):
    """What a step's limit in tokens does to the rows that serve it."""

    max_tokens: int
    rows: int
    kept: int
    truncated: int
    dropped_long: int
    dropped_identical: int
    truncated_share: float | None
    with_eos: int | None
    trained_token_share: float | None


class Sample(TypedDict, total=False):
    """A row as a step sees it; of plain text only `row` and `text`."""

    row: int
    step: int
    left_out: str
    truncated: bool
    tokens: int
    learnt: int
    text: str | list[Piece]
    prompt: str
    prompt_tokens: int
    chosen: str
    chosen_tokens: int
    rejected: str
    rejected_tokens: int


class Inspection(TypedDict, total=False):
    """All about one data set. Plain text has none of `pairs`, `limits` and `rendered`."""

    source: str
    schema: str
    columns_not_read: list[str]
    rows: RowCounts
    steps: dict[str, Serving]
    alignment: str
    template: str
    eos: Eos
    lengths: Lengths
    samples: list[Sample]
    pairs: PairCounts | None
    limits: dict[str, StepLimits]
    rendered: dict[str, str]
    profile: str
    tokenizer: str


def inspect(
    config: RunConfig,
    source: DataSource,
    tokenizer: PreTrainedTokenizerBase,
    own_template: str | None,
    most_rows: int,
    samples: int,
    note: Note = lambda _: None,
) -> Inspection:
    """All about one data set under a configuration.

    The tokenizer carries the template of the run; `own_template` is the one that came with it.
    Figures on tokens are of `rows.looked_at` rows, spread evenly over the training part.

    Raises:
        DataError: the source cannot be used.
    """
    loaded = load_source(source, config.data.cache_dir, note)
    train = _wanted(loaded.train)
    count = len(train)
    picked = np.unique(np.linspace(0, count - 1, min(most_rows, count)).round().astype(np.int64))
    rows = train.select(picked)
    first = list(train.select(range(min(max(samples, 1), count))))
    reasons = loaded.schema.step_reasons(config.needs_reward_model)
    last = pipeline(config.alignment)[-1].number
    for step in range(last + 1, len(PHASES) + 1):
        reasons[step] = f"a run with alignment={config.alignment} ends after step {last}"
    document: Inspection = {
        "source": source.path,
        "schema": loaded.schema.describe(),
        "columns_not_read": list(loaded.schema.unread),
        "rows": {
            "usable": count,
            "held_out": None if loaded.eval is None else len(loaded.eval),
            "dropped": loaded.dropped,
            "first_dropped": loaded.first_dropped,
            "looked_at": len(rows),
        },
        "steps": {str(step): {"serves": not why, "reason": why} for step, why in reasons.items()},
        "alignment": config.alignment,
        "template": config.data.template,
        "eos": {"token": str(tokenizer.eos_token), "id": tokenizer.eos_token_id},
    }
    if loaded.is_text:
        lengths = [len(encode_document(text, tokenizer)) + 1 for text in rows["text"][:]]
        document["lengths"] = {"text": _spread(lengths), "histogram": histogram(lengths)}
        document["samples"] = [
            {"row": number, "text": row["text"]} for number, row in enumerate(first[:samples], 1)
        ]
        return document
    note(f"tokenising {len(rows)} rows")
    served = {step: phase for step, phase in enumerate(PHASES, 1) if not reasons[step]}
    return {
        **document,
        "lengths": _lengths(rows, config, tokenizer),
        "pairs": _pairs(rows, tokenizer, config),
        "limits": _limits(rows, served, config, tokenizer),
        "rendered": _rendered(first[0], config, tokenizer, own_template),
        "samples": list(_samples(first[:samples], served, config, tokenizer)),
    }


def _wanted(rows: Dataset) -> Dataset:
    """Rows but those whose label calls the answer bad, which are counted as left out."""
    labels = rows.data.column("label").to_pylist()
    wanted = [index for index, label in enumerate(labels) if label is not False]
    return rows if len(wanted) == len(rows) else rows.select(wanted)


def exported(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    phase: Phase,
    note: Note = lambda _: None,
) -> Iterator[Row]:
    """The rows of a phase as its step sees them, train part first: text, token ids, labels.

    Raises:
        DataError: the data cannot be used, or leave the phase without rows.
    """
    data = build_phase(config, tokenizer, phase, note)

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    for part, rows in (("train", data.train), ("eval", data.eval)):
        for row in rows:
            if phase == "sft":
                pieces = learnt_pieces(row["input_ids"], row["labels"], tokenizer)
                learnt = [piece for piece, is_learnt in pieces if is_learnt]
                yield {"part": part, "text": text(row["input_ids"]), "learnt": learnt, **row}
            elif phase == "reward":
                texts = {name: text(row[f"{name}_ids"]) for name in ("chosen", "rejected")}
                yield {"part": part, **texts, **row}
            else:
                yield {"part": part, "prompt": text(row["prompt_ids"]), **row}


def learnt_pieces(
    ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[Piece]:
    """A row decoded in runs of tokens that are all trained on, or all not."""
    runs = itertools.groupby(zip(ids, labels, strict=True), key=lambda token: token[1] != IGNORED)
    return [
        (tokenizer.decode([token for token, _ in run], skip_special_tokens=False), learnt)
        for learnt, run in runs
    ]


def _serves(row: Row, phase: Phase) -> bool:
    return row["phases"] is None or phase in row["phases"]


def histogram(lengths: list[int]) -> list[Bin]:
    """Rows by length, in bins up to powers of two: `up_to` (inclusive) and `rows`."""
    if not lengths:
        return []
    bins = Counter(max(length - 1, 0).bit_length() for length in lengths)
    return [{"up_to": 2**n, "rows": bins[n]} for n in range(min(bins), max(bins) + 1)]


def _spread(lengths: list[int]) -> Spread | None:
    if not lengths:
        return None
    median, high = (int(value) for value in np.percentile(lengths, (50, 95), method="lower"))
    return {"least": min(lengths), "median": median, "p95": high, "greatest": max(lengths)}


def _lengths(rows: Dataset, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Lengths:
    """Tokens of prompt and answers (with EOS) before anything is cut."""
    found: dict[str, list[int]] = {"prompt": [], "chosen": [], "rejected": []}
    whole = []
    for row in rows:
        prompt = len(encode_prompt(row["prompt"], tokenizer, config.data.template))
        found["prompt"].append(prompt)
        for name in ("chosen", "rejected"):
            if row[name] is not None:
                length = len(encode_answer(row[name], tokenizer, config.data.template))
                found[name].append(length)
                if name == "chosen":
                    whole.append(prompt + length)
    return {
        "prompt": _spread(found["prompt"]),
        "chosen": _spread(found["chosen"]),
        "rejected": _spread(found["rejected"]),
        "prompt_and_chosen": _spread(whole),
        "histogram": histogram(whole),
    }


def _pairs(
    rows: Dataset, tokenizer: PreTrainedTokenizerBase, config: RunConfig
) -> PairCounts | None:
    """Pairs for step 2: how many, how many are identical, in how many chosen has more tokens."""
    pairs = [
        (row["chosen"], rejected)
        for row in rows
        if _serves(row, "reward") and row["chosen"] is not None and row["rejected"] is not None
        for rejected in (row["rejected"], *(row["more_rejected"] or ()))
    ]
    if not pairs:
        return None
    lengths = [
        [len(encode_answer(text, tokenizer, config.data.template)) for text in pair]
        for pair in pairs
    ]
    longer = sum(chosen > rejected for chosen, rejected in lengths)
    return {
        "count": len(pairs),
        "identical": sum(chosen == rejected for chosen, rejected in pairs),
        "chosen_longer": longer,
        "chosen_longer_share": longer / len(pairs),
    }


def _limits(
    rows: Dataset, served: dict[int, Phase], config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, StepLimits]:
    """For each step that is served: its token limit, and what is cut, left out and trained on."""
    found: dict[str, StepLimits] = {}
    for step, phase in served.items():
        tally: Counter[str] = Counter()
        seen = with_eos = 0
        for row in rows:
            if not _serves(row, phase):
                continue
            seen += 1 + (len(row["more_rejected"] or ()) if phase == "reward" else 0)
            for encoded in encode_row(row, phase, config, tokenizer, tally):
                tally["kept"] += 1
                answers = [encoded[k] for k in _ANSWER_IDS if k in encoded]
                with_eos += all(ids[-1] == tokenizer.eos_token_id for ids in answers)
        found[str(step)] = {
            "max_tokens": max_tokens(config, phase),
            "rows": seen,
            "kept": tally["kept"],
            "truncated": tally["truncated"],
            "dropped_long": tally["dropped_long"],
            "dropped_identical": tally["dropped_identical"],
            "truncated_share": tally["truncated"] / seen if seen else None,
            "with_eos": None if phase == "ppo" else with_eos,
            "trained_token_share": tally["trained_tokens"] / tally["tokens"]
            if tally["tokens"]
            else None,
        }
    return found


def _rendered(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, own: str | None
) -> dict[str, str]:
    """One row in the template of the run, and in the one that came with the tokenizer."""
    answer = [{"role": "assistant", "content": row["chosen"]}] if row["chosen"] else []
    messages = [*row["prompt"], *answer]

    def render(template: str | None) -> str:
        try:
            return tokenizer.apply_chat_template(
                messages, chat_template=template, tokenize=False, add_generation_prompt=not answer
            )
        except Exception as error:  # Jinja's errors and what templates raise themselves
            return f"refused by the template: {error}"

    # Refuses as training would, where the template does.
    render_prompt(row["prompt"], tokenizer, config.data.template)
    found = {"used": render(None)}
    if own and own != tokenizer.chat_template:
        found["own"] = render(own)
    return found


def _samples(
    rows: list[Row], served: dict[int, Phase], config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Sample]:
    """Rows as each step that uses them sees them."""
    needs = {"sft": ("chosen",), "reward": ("chosen", "rejected"), "ppo": ()}
    for number, row in enumerate(rows, 1):
        for step, phase in served.items():
            if not _serves(row, phase) or any(row[name] is None for name in needs[phase]):
                continue
            sample: Sample = {"row": number, "step": step}
            tally: Counter[str] = Counter()
            made = encode_row(row, phase, config, tokenizer, tally)
            if not made:
                yield {**sample, "left_out": _why_left_out(tally)}
            sample["truncated"] = tally["truncated"] > 0
            for encoded in made:
                yield {**sample, **_decoded(encoded, tokenizer)}


def _why_left_out(tally: Counter[str]) -> str:
    if tally["dropped_identical"]:
        return "identical"
    return "too long" if tally["dropped_long"] else "marked as not to be learnt"


def _decoded(encoded: Row, tokenizer: PreTrainedTokenizerBase) -> Sample:
    """The texts of a tokenised row, and of step 1 what is learnt of it."""
    if "labels" in encoded:
        pieces = learnt_pieces(encoded["input_ids"], encoded["labels"], tokenizer)
        learnt = sum(label != IGNORED for label in encoded["labels"])
        return {"tokens": len(encoded["labels"]), "learnt": learnt, "text": pieces}
    texts: Sample = {}
    for name in ("prompt", "chosen", "rejected"):
        ids = encoded.get(f"{name}_ids")
        if ids is not None:
            text = tokenizer.decode(ids, skip_special_tokens=False)
            texts |= {name: text, f"{name}_tokens": len(ids)}  # type: ignore[misc]
    return texts
