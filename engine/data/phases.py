"""The rows of one phase (SFT, reward, PPO), tokenised once into Arrow and cached by content."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from engine.config.schema import RunConfig
from engine.data.cache import (
    build_once,
    cache_root,
    code_fingerprint,
    fingerprint,
    open_rows,
    write_rows,
)
from engine.data.files import DataError, Row
from engine.data.order import shuffled
from engine.data.schemas import PHASES, Phase
from engine.data.sources import Note, SourceRows, load_source
from engine.data.templates import (
    FittedPrompt,
    Message,
    Template,
    adds_bos,
    encode_answer,
    encode_document,
    encode_prompt,
    fit_prompt,
)

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
}
IGNORED = -100


@dataclass(frozen=True)
class PhaseData:
    """Tokenised rows of one phase, memory-mapped and never padded.

    Columns: sft `input_ids`, `labels`; reward `chosen_ids`, `rejected_ids` (prompt, answer, EOS),
    `prompt_length` (tokens of the prompt in both) and `kind` (None where the data names no kinds);
    ppo `prompt_ids` and `row`, its place among the phase's rows before any was dropped.

    `counts` is of the train rows: `rows`, `truncated` (older turns or the end cut),
    `dropped_long` (no room for an answer, or a prompt beyond its limit), `dropped_identical`
    (pairs that are equal, also after truncation), `eval_rows`, and `trained_token_share` (sft,
    else None). `dropped_empty` and `dropped_unusable` (no dialogue of question and answer) are of
    the sources as a whole.
    """

    train: Dataset
    eval: Dataset
    counts: dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """Rows of one source that a phase uses."""

    rows: Dataset
    indices: np.ndarray


def build_phase(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    phase: Phase,
    note: Note = lambda _: None,
) -> PhaseData:
    """Load, split, tokenise (once) and open the rows of a phase.

    The tokenizer's EOS must be the one the run trains with. The same configuration and tokenizer
    give the same rows in every process; `note` gets lines as "tokenising 34 %".

    Raises:
        DataError: a source cannot be used, or leaves the phase without rows.
    """
    sources = [load_source(s, config.data.cache_dir, note) for s in config.data.sources]
    alone = config.data.sft_only_sources if phase == "sft" else []
    alone_sources = [load_source(s, config.data.cache_dir, note) for s in alone]
    key = fingerprint(
        code_fingerprint(),
        phase,
        [source.fingerprint for source in sources],
        [source.fingerprint for source in alone_sources],
        tokenizer_fingerprint(tokenizer),
        _options(config, phase),
    )

    def build(folder: Path) -> None:
        train, held_out = _split(config, sources, phase)
        train += [_Part(s.train, np.arange(len(s.train))) for s in alone_sources]

        def encode(row: Row, tally: Counter[str]) -> Row | None:
            return encode_row(row, phase, config, tokenizer, tally)

        counts: Counter[str] = Counter()
        for name, parts in (("train", train), ("eval", held_out)):
            tally = counts if name == "train" else Counter()
            rows = _encoded(parts, phase, encode, tally, note if name == "train" else _silent)
            write_rows(folder / f"{name}.arrow", rows, FEATURES[phase])
        dropped = Counter[str]()
        for source in sources + alone_sources:
            dropped.update(source.dropped)
        found = _summary(counts, dropped, phase)
        found["eval_rows"] = len(open_rows(folder / "eval.arrow"))
        if not found["rows"]:
            raise DataError(_no_rows(config, phase, found))
        (folder / "counts.json").write_text(json.dumps(found))

    folder = build_once(cache_root(config.data.cache_dir) / f"{phase}-{key}", build)
    return PhaseData(
        train=open_rows(folder / "train.arrow"),
        eval=open_rows(folder / "eval.arrow"),
        counts=json.loads((folder / "counts.json").read_text()),
    )


def eval_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, note: Note = lambda _: None
) -> list[dict[str, Any]]:
    """The held-out prompts in the order of phase ppo's eval rows.

    Each has `row`, `prompt` (messages, as cut), `prompt_ids`, `references` (list or None),
    `preferred_style` (regular expression or None), `chosen` and `rejected` (or None).
    """
    sources = [load_source(s, config.data.cache_dir, note) for s in config.data.sources]
    _, held_out = _split(config, sources, "ppo")
    found = []
    for number, row in enumerate(_rows(held_out)):
        fitted = fit_prompt(
            row["prompt"], tokenizer, config.data.template, config.ppo.max_prompt_length
        )
        if fitted is None:
            continue
        extras = ("references", "preferred_style", "chosen", "rejected")
        prompt = {"row": number, "prompt": fitted.messages, "prompt_ids": fitted.ids}
        found.append({**prompt, **{name: row[name] for name in extras}})
    return found


def unsupervised_rows(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    block_length: int,
    note: Note = lambda _: None,
) -> Dataset:
    """The plain text of `data.unsupervised_sources` in blocks: `input_ids` of `block_length`.

    Texts follow each other, each ending in EOS; the rest of the last block is left out.

    Raises:
        DataError: a source without text, or too little text for one block.
    """
    sources = [
        load_source(s, config.data.cache_dir, note) for s in config.data.unsupervised_sources
    ]
    for source, named in zip(sources, config.data.unsupervised_sources, strict=True):
        if not source.is_text:
            raise DataError(
                f"data.unsupervised_sources: {named.path} is no plain text; map its text: "
                "columns: {text: COLUMN}"
            )
    key = fingerprint(
        code_fingerprint(),
        [source.fingerprint for source in sources],
        tokenizer_fingerprint(tokenizer),
        block_length,
    )

    def blocks() -> Iterator[Row]:
        rest: list[int] = []
        for row in _rows([_Part(s.train, np.arange(len(s.train))) for s in sources]):
            rest += [*encode_document(row["text"], tokenizer), tokenizer.eos_token_id]
            full = len(rest) // block_length * block_length
            for start in range(0, full, block_length):
                yield {"input_ids": rest[start : start + block_length]}
            rest = rest[full:]

    def build(folder: Path) -> None:
        note("tokenising unsupervised text")
        write_rows(folder / "train.arrow", blocks(), Features({"input_ids": _IDS}))
        if not len(open_rows(folder / "train.arrow")):
            raise DataError(
                f"data.unsupervised_sources hold less than one block of {block_length} tokens"
            )

    folder = build_once(cache_root(config.data.cache_dir) / f"text-{key}", build)
    return open_rows(folder / "train.arrow")


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides a tokenizer's ids: vocabulary, pipeline, special tokens, template."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Calls with padding or truncation leave their mark here without changing any id.
        state["padding"] = state["truncation"] = None
    else:
        state = sorted(tokenizer.get_vocab().items())
    special = [tokenizer.special_tokens_map, tokenizer.eos_token_id, adds_bos(tokenizer)]
    return fingerprint(type(tokenizer).__name__, state, special, tokenizer.chat_template)


def _silent(_: str) -> None:
    return None


def _options(config: RunConfig, phase: Phase) -> list[Any]:
    data = config.data
    common = [config.seed, data.split, data.eval_share, data.eval_rows, data.template]
    common += [bool(config.models.trained_reward), config.alignment]
    if phase == "sft":
        return [*common, config.sft.max_length, config.sft.loss_on_prompt]
    if phase == "reward":
        return [*common, _pair_length(config)]
    return [*common, config.ppo.max_prompt_length]


def _split(
    config: RunConfig, sources: list[SourceRows], phase: Phase
) -> tuple[list[_Part], list[_Part]]:
    """Train and held-out rows of a phase, source by source.

    Held-out rows are the source's own test part, else taken out before the split over phases;
    all phases share them. Rows that name their phases serve those, whole.
    """
    train: list[_Part] = []
    held_out: list[_Part] = []
    for number, source in enumerate(sources):
        order = shuffled(len(source.train), config.seed, "held out", number)
        if source.eval is None:
            share = round(config.data.eval_share * len(order))
            count = min(max(share, 1), config.data.eval_rows, len(order) - 1)
            held_out.append(_Part(source.train, order[:count]))
            order = order[count:]
        else:
            rows = shuffled(len(source.eval), config.seed, "eval", number)
            held_out.append(_Part(source.eval, rows))
        order = order[shuffled(len(order), config.seed, "phases", number)]
        named, free = _by_phase(source.train, order, phase)
        shares = [
            share if name in source.phases & _wanted(config, sources) else 0.0
            for name, share in zip(PHASES, config.data.split, strict=True)
        ]
        bounds = np.cumsum([0.0, *shares]) / (sum(shares) or 1.0)
        start, end = (round(b * len(free)) for b in bounds[PHASES.index(phase) :][:2])
        train.append(_Part(source.train, np.sort(np.concatenate([named, free[start:end]]))))
    held_out = [
        _Part(part.rows, np.concatenate(_by_phase(part.rows, part.indices, phase)))
        for part, source in zip(held_out, sources, strict=True)
        if phase in source.phases
    ]
    total = sum(len(part.indices) for part in held_out)
    if total > config.data.eval_rows:
        limits = [max(1, len(p.indices) * config.data.eval_rows // total) for p in held_out]
        held_out = [_Part(p.rows, p.indices[:n]) for p, n in zip(held_out, limits, strict=True)]
    return train, [_Part(part.rows, np.sort(part.indices)) for part in held_out]


def _wanted(config: RunConfig, sources: list[SourceRows]) -> frozenset[Phase]:
    """The phases that rows are split over: without pairs SFT takes all; DPO has no step 3."""
    has_pairs = any("reward" in source.phases for source in sources)
    if config.alignment == "dpo":
        return frozenset(("sft", "reward") if has_pairs else ("sft",))
    return frozenset(PHASES if has_pairs or config.models.trained_reward else ("sft",))


def _by_phase(rows: Dataset, indices: np.ndarray, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    """Of the indices: those of rows that name this phase, and those that name none."""
    column = rows.data.column("phases")
    if column.null_count == len(column):
        return indices[:0], indices
    serves = column.to_pylist()
    own = np.array([phase in (names or ()) for names in serves], dtype=bool)
    free = np.array([names is None for names in serves], dtype=bool)
    return indices[own[indices]], indices[free[indices]]


def _rows(parts: list[_Part]) -> Iterator[Row]:
    for part in parts:
        yield from part.rows.select(part.indices)


def _encoded(
    parts: list[_Part],
    phase: Phase,
    encode: Callable[[Row, Counter[str]], Row | None],
    tally: Counter[str],
    note: Note,
) -> Iterator[Row]:
    total = sum(len(part.indices) for part in parts)
    told = 0
    for number, row in enumerate(_rows(parts)):
        if (percent := 100 * number // total) >= told:
            note(f"tokenising {percent} %")
            told = percent + 5
        encoded = encode(row, tally)
        if encoded is None:
            continue
        tally["rows"] += 1
        yield {**encoded, "row": number} if phase == "ppo" else encoded


def _fit(
    row: Row,
    answer_length: int,
    max_length: int,
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    tally: Counter[str],
) -> FittedPrompt | None:
    """The prompt with room for its answer, else (the answer will be cut) without older turns."""
    messages: list[Message] = row["prompt"]
    fitted = fit_prompt(messages, tokenizer, template, max_length - answer_length)
    if fitted is None:
        system = list(itertools.takewhile(lambda turn: turn["role"] == "system", messages))
        fitted = fit_prompt([*system, messages[-1]], tokenizer, template, max_length - 1)
    if fitted is None:
        tally["dropped_long"] += 1
    elif len(fitted.messages) < len(messages) or len(fitted.ids) + answer_length > max_length:
        tally["truncated"] += 1
    return fitted


def _sft_row(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> Row | None:
    template, max_length = config.data.template, config.sft.max_length
    if row["chosen"] is None:
        return None
    answer = encode_answer(row["chosen"], tokenizer, template)
    fitted = _fit(row, len(answer), max_length, tokenizer, template, tally)
    if fitted is None:
        return None
    ids = (fitted.ids + answer)[:max_length]
    labels = [IGNORED] * len(fitted.ids) + ids[len(fitted.ids) :]
    if config.sft.loss_on_prompt:
        labels = list(ids)
    elif row["all_answers"]:
        for start, end in _earlier_answers(fitted, tokenizer, template):
            labels[start:end] = ids[start:end]
    tally["tokens"] += len(ids)
    tally["trained_tokens"] += sum(label != IGNORED for label in labels)
    return {"input_ids": ids, "labels": labels}


def _earlier_answers(
    prompt: FittedPrompt, tokenizer: PreTrainedTokenizerBase, template: Template
) -> Iterator[tuple[int, int]]:
    """Where in the prompt's ids the assistant's earlier turns stand, each with its EOS."""
    for index, turn in enumerate(prompt.messages):
        if turn["role"] != "assistant":
            continue
        before = encode_prompt(prompt.messages[:index], tokenizer, template)
        # Some chat templates rewrite older turns (leave their thoughts out); those are not learnt.
        start = len(before)
        if prompt.ids[:start] == before and tokenizer.eos_token_id in prompt.ids[start:]:
            yield start, prompt.ids.index(tokenizer.eos_token_id, start) + 1


def _reward_row(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> Row | None:
    template, max_length = config.data.template, _pair_length(config)
    if row["chosen"] is None or row["rejected"] is None:
        return None
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
    """Most tokens of a row of a phase: of a prompt in step 3, else of a prompt and its answer."""
    if phase == "ppo":
        return config.ppo.max_prompt_length
    return config.sft.max_length if phase == "sft" else _pair_length(config)


def _pair_length(config: RunConfig) -> int:
    """Most tokens of an answer with its prompt in step 2."""
    return (config.dpo if config.alignment == "dpo" else config.reward).max_length


def _ppo_row(
    row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase, tally: Counter[str]
) -> Row | None:
    limit = config.ppo.max_prompt_length
    fitted = fit_prompt(row["prompt"], tokenizer, config.data.template, limit)
    if fitted is None:
        tally["dropped_long"] += 1
        return None
    tally["truncated"] += fitted.turns_cut > 0
    return {"prompt_ids": fitted.ids}


_ENCODERS = {"sft": _sft_row, "reward": _reward_row, "ppo": _ppo_row}


def encode_row(
    row: Row,
    phase: Phase,
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    tally: Counter[str],
) -> Row | None:
    """One normalised row as a phase sees it (columns as in `PhaseData`); None: it is left out.

    `tally` counts what was cut or left out, under the names of `PhaseData.counts`, and of phase
    sft the `tokens` and `trained_tokens`.
    """
    return _ENCODERS[phase](row, config, tokenizer, tally)


def _summary(tally: Counter[str], dropped: Counter[str], phase: Phase) -> dict[str, Any]:
    names = ("rows", "truncated", "dropped_long", "dropped_identical")
    share = tally["trained_tokens"] / max(tally["tokens"], 1) if phase == "sft" else None
    return {
        **{name: tally[name] for name in names},
        "dropped_empty": dropped["empty"],
        "dropped_unusable": dropped["unusable"],
        "trained_token_share": share,
    }


def _no_rows(config: RunConfig, phase: Phase, counts: dict[str, Any]) -> str:
    names = ", ".join(source.path for source in config.data.sources)
    step = PHASES.index(phase) + 1
    lost = [f"{counts[name]} {name}" for name in ("dropped_long", "dropped_identical")]
    split = ",".join(f"{share:g}" for share in config.data.split)
    return (
        f"{names}: no rows for step {step} ({', '.join(lost)}; data.split = {split}); give more "
        "data of the right kind, another split, or more length"
    )
