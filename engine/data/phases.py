"""The rows of one phase (SFT, reward, PPO), tokenised once into Arrow and cached by content."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from engine.config.schema import RunConfig
from engine.data.cache import (
    build_once,
    cache_root,
    code_fingerprint,
    fingerprint,
    open_rows,
    work_folder,
    write_rows,
)
from engine.data.encoding import FEATURES, max_tokens
from engine.data.files import DataError, Row
from engine.data.order import shuffled
from engine.data.schemas import PHASES, Phase
from engine.data.sources import Note, SourceRows, load_source
from engine.data.templates import adds_bos, fit_prompt
from engine.data.tokenising import ROWS_OF_A_CHUNK, Encoding, Part, tokenise


@dataclass(frozen=True)
class PhaseData:
    """Tokenised rows of one phase, memory-mapped and never padded.

    Columns: sft `input_ids`, `labels`; reward `chosen_ids`, `rejected_ids` (prompt, answer, EOS),
    `prompt_length` (tokens of the prompt in both) and `kind` (None where the data names no kinds);
    ppo `prompt_ids` and `row`, its place among the phase's rows before any was dropped.

    `counts` is of the train rows: `rows`, `truncated` (older turns or the end cut),
    `dropped_long` (no room for an answer, or a prompt over its limit), `dropped_identical`
    (pairs that are equal, also after truncation), `eval_rows`, and `trained_token_share` (sft,
    else None). `dropped_empty` and `dropped_unusable` (no dialogue of question and answer) and
    `dropped_unwanted` (marked as not to be learnt) are of the sources as a whole.
    """

    train: Dataset
    eval: Dataset
    counts: dict[str, float | None]


def build_phase(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    phase: Phase,
    note: Note = lambda _: None,
) -> PhaseData:
    """Load, split, tokenise (once) and open the rows of a phase.

    The tokenizer's EOS must be the one the run trains with. The same configuration and tokenizer
    give the same rows in every process; `note` gets lines like "tokenising 34 %".

    Raises:
        DataError: a source cannot be used, or leaves the phase without rows.
    """
    sources = [load_source(s, config.data.cache_dir, note) for s in config.data.sources]
    named = config.data.sft_only_sources if phase == "sft" else []
    sft_only = [load_source(s, config.data.cache_dir, note) for s in named]
    key = fingerprint(
        code_fingerprint(),
        phase,
        [source.fingerprint for source in sources],
        [source.fingerprint for source in sft_only],
        tokenizer_fingerprint(tokenizer),
        _options(config, phase),
    )

    def build(folder: Path) -> None:
        train, held_out = _split(config, sources, phase)
        train += [Part(s.train, np.arange(len(s.train))) for s in sft_only]

        encoding = Encoding(phase, config, tokenizer)
        counts = tokenise(train, encoding, folder / "train.arrow", work, note)
        tokenise(held_out, encoding, folder / "eval.arrow", work, lambda _: None)
        dropped = Counter[str]()
        for source in sources + sft_only:
            dropped.update(source.dropped)
        found = _summary(counts, dropped, phase)
        found["eval_rows"] = len(open_rows(folder / "eval.arrow"))
        if not found["rows"]:
            raise DataError(_no_rows(config, phase, found))
        (folder / "counts.json").write_text(json.dumps(found))

    folder = cache_root(config.data.cache_dir) / f"{phase}-{key}"
    with work_folder(folder) as work:
        build_once(folder, build)
    return PhaseData(
        train=open_rows(folder / "train.arrow"),
        eval=open_rows(folder / "eval.arrow"),
        counts=json.loads((folder / "counts.json").read_text()),
    )


def eval_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, note: Note = lambda _: None
) -> list[Row]:
    """The held-out prompts in the order of phase ppo's eval rows.

    Each has `row`, `prompt` (messages, as cut), `prompt_ids`, `references` (list or None),
    `preferred_style` (regular expression or None), `chosen` and `rejected` (or None).
    """
    sources = [load_source(s, config.data.cache_dir, note) for s in config.data.sources]
    _, held_out = _split(config, sources, "ppo")
    found = []
    rows = (row for part in held_out for row in part.rows.select(part.indices))
    for number, row in enumerate(rows):
        fitted = fit_prompt(
            row["prompt"], tokenizer, config.data.template, config.ppo.max_prompt_length
        )
        if fitted is None:
            continue
        extras = ("references", "preferred_style", "chosen", "rejected")
        prompt = {"row": number, "prompt": fitted.messages, "prompt_ids": fitted.ids}
        found.append({**prompt, **{name: row[name] for name in extras}})
    return found


class PromptColumns:
    """What reward functions get of the prompts of step 3 besides their text."""

    def __init__(self, config: RunConfig, note: Note = lambda _: None) -> None:
        sources = [load_source(s, config.data.cache_dir, note) for s in config.data.sources]
        self._parts, _ = _split(config, sources, "ppo")
        self._starts = np.cumsum([0, *(len(part.indices) for part in self._parts)])

    def of(self, number: int) -> Row:
        """The columns of a row in the data, by `row` of the train rows of phase ppo.

        `prompt` among them is its text, or its messages where the data holds dialogues.
        """
        at = int(np.searchsorted(self._starts, number, side="right")) - 1
        part = self._parts[at]
        row = part.rows[int(part.indices[number - self._starts[at]])]
        return {"prompt": row["prompt"], **json.loads(row["columns"])}


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

    def build(folder: Path) -> None:
        parts = [Part(s.train, np.arange(len(s.train))) for s in sources]
        texts = folder / "texts.arrow"
        tokenise(parts, Encoding("text", config, tokenizer), texts, work, note)
        write_rows(folder / "train.arrow", _blocks(texts, block_length), FEATURES["text"])
        texts.unlink()
        if not len(open_rows(folder / "train.arrow")):
            raise DataError(
                f"data.unsupervised_sources hold less than one block of {block_length} tokens"
            )

    folder = cache_root(config.data.cache_dir) / f"text-{key}"
    with work_folder(folder) as work:
        build_once(folder, build)
    return open_rows(folder / "train.arrow")


def _blocks(texts: Path, length: int) -> Iterator[Row]:
    """Texts one after another, cut into blocks; the rest of the last one is left out."""
    rest = np.empty(0, dtype=np.int32)
    for batch in open_rows(texts).with_format("arrow").iter(ROWS_OF_A_CHUNK):
        rest = np.concatenate([rest, *(part.flatten() for part in batch["input_ids"].chunks)])
        for start in range(0, len(rest) - length + 1, length):
            yield {"input_ids": rest[start : start + length]}
        rest = rest[len(rest) // length * length :]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what decides a tokenizer's ids: vocabulary, pipeline, special tokens, template."""
    if tokenizer.is_fast:
        state = json.loads(tokenizer.backend_tokenizer.to_str())
        # Calls with padding or truncation change these settings, but no id.
        state["padding"] = state["truncation"] = None
    else:
        state = sorted(tokenizer.get_vocab().items())
    special = [tokenizer.special_tokens_map, tokenizer.eos_token_id, adds_bos(tokenizer)]
    return fingerprint(type(tokenizer).__name__, state, special, tokenizer.chat_template)


def _options(config: RunConfig, phase: Phase) -> list[object]:
    data = config.data
    common = [config.seed, data.split, data.eval_share, data.eval_rows, data.template]
    common += [bool(config.models.trained_reward), config.alignment, config.needs_reward_model]
    if phase == "sft":
        common.append(config.sft.loss_on_prompt)
    return [*common, max_tokens(config, phase)]


def _split(
    config: RunConfig, sources: list[SourceRows], phase: Phase
) -> tuple[list[Part], list[Part]]:
    """Train and held-out rows of a phase, source by source.

    Held-out rows are the source's own test part, else taken out before the split over phases;
    all phases share them. Rows that name their phases serve those, whole.
    """
    train: list[Part] = []
    held_out: list[Part] = []
    for number, source in enumerate(sources):
        order = shuffled(len(source.train), config.seed, "held out", number)
        if source.eval is None:
            share = round(config.data.eval_share * len(order))
            # At least one row is held out, and at least one is left to train on.
            count = min(max(share, 1), config.data.eval_rows, len(order) - 1)
            held_out.append(Part(source.train, order[:count]))
            order = order[count:]
        else:
            rows = shuffled(len(source.eval), config.seed, "eval", number)
            held_out.append(Part(source.eval, rows))
        order = order[shuffled(len(order), config.seed, "phases", number)]
        named, free = _by_phase(source.train, order, phase)
        shares = [
            share if name in source.phases & _wanted(config, sources) else 0.0
            for name, share in zip(PHASES, config.data.split, strict=True)
        ]
        # Bounds are rounded after summing, so that phases neither overlap nor leave a gap.
        bounds = np.cumsum([0.0, *shares]) / (sum(shares) or 1.0)
        start, end = (round(b * len(free)) for b in bounds[PHASES.index(phase) :][:2])
        # Sorted, since memory-mapped rows are fastest to read in order.
        train.append(Part(source.train, np.sort(np.concatenate([named, free[start:end]]))))
    held_out = [
        Part(part.rows, np.concatenate(_by_phase(part.rows, part.indices, phase)))
        for part, source in zip(held_out, sources, strict=True)
        if phase in source.phases
    ]
    total = sum(len(part.indices) for part in held_out)
    if total > config.data.eval_rows:
        limits = [max(1, len(p.indices) * config.data.eval_rows // total) for p in held_out]
        held_out = [Part(p.rows, p.indices[:n]) for p, n in zip(held_out, limits, strict=True)]
    return train, [Part(part.rows, np.sort(part.indices)) for part in held_out]


def _wanted(config: RunConfig, sources: list[SourceRows]) -> frozenset[Phase]:
    """The phases that rows are split over: those of the steps that this run has.

    Without pairs there is no step 2, and no step 3 that needs its model.
    """
    wanted = frozenset(step.phase for step in config.steps)
    has_pairs = any("reward" in source.phases for source in sources)
    if "reward" in wanted and not has_pairs and not config.models.trained_reward:
        return frozenset(("sft",))
    return wanted


def _by_phase(rows: Dataset, indices: np.ndarray, phase: Phase) -> tuple[np.ndarray, np.ndarray]:
    """The indices of rows that name this phase, and of rows that name none."""
    column = rows.data.column("phases")
    if column.null_count == len(column):
        return indices[:0], indices
    serves = column.to_pylist()
    own = np.array([phase in (names or ()) for names in serves], dtype=bool)
    free = np.array([names is None for names in serves], dtype=bool)
    return indices[own[indices]], indices[free[indices]]


def _rows(parts: list[Part]) -> Iterator[Row]:
    for part in parts:
        yield from part.rows.select(part.indices)


def _summary(tally: Counter[str], dropped: Counter[str], phase: Phase) -> dict[str, float | None]:
    names = ("rows", "truncated", "dropped_long", "dropped_identical")
    share = tally["trained_tokens"] / max(tally["tokens"], 1) if phase == "sft" else None
    return {
        **{name: tally[name] for name in names},
        "dropped_empty": dropped["empty"],
        "dropped_unusable": dropped["unusable"],
        "dropped_unwanted": dropped["unwanted"],
        "trained_token_share": share,
    }


def _no_rows(config: RunConfig, phase: Phase, counts: dict[str, float | None]) -> str:
    names = ", ".join(source.path for source in config.data.sources)
    step = PHASES.index(phase) + 1
    lost = [f"{counts[name]} {name}" for name in ("dropped_long", "dropped_identical")]
    split = ",".join(f"{share:g}" for share in config.data.split)
    return (
        f"{names}: no rows for step {step} ({', '.join(lost)}; data.split = {split}); give more "
        "data of the right kind, another split, or more length"
    )
