"""What the columns of a data set mean, found from its first rows. Needs no torch, no datasets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.config.schema import DataSource
from engine.data import catalogue
from engine.data.files import DataError, Row, is_local, is_missing, local_parts, read_rows

Phase = Literal["sft", "reward", "ppo"]

PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")
EMBEDDED = ("embedded:facts",)
ROWS_LOOKED_AT = 5000
# Columns with a meaning of their own in every schema; see engine.data.rows.
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
MARKS = ("label", "kto_tag", "train", "training", "weight", "loss_weight")
_READ_BESIDE = ("system", "history", "references", "preferred_style", "kind", "phases", *MEDIA)

TURN_MARK = re.compile(r"(?:^|\n\n)\s*(Human|Assistant):")

_MAPPED = ("prompt", "chosen", "rejected", "response", "messages", "text")


ROLES = ("prompt", "input", "dialogue", "chosen", "rejected", "text")


@dataclass(frozen=True)
class Schema:
    """Which column of a data set has which role; None where there is none.

    Rows of an `entry` of the catalogue are read by its mapping. Of `several_rejected` answers in
    a row the first makes the pair; `unread` columns have no part in what is learnt.
    """

    prompt: str | None = None
    input: str | None = None
    dialogue: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None
    entry: catalogue.Entry | None = None
    several_rejected: bool = False
    unread: tuple[str, ...] = ()

    @property
    def phases(self) -> frozenset[Phase]:
        """The phases that rows of this schema can serve."""
        if self.text:
            return frozenset()
        if self.rejected:
            return frozenset(PHASES)
        return frozenset(("sft", "ppo") if self.chosen or not self.prompt else ("ppo",))

    def describe(self) -> str:
        """The schema in words, as `prompt 'instruction', answer 'output'`."""
        if self.entry:
            return f"{self.entry.name}: {self.entry.describe()}"
        names = {"chosen": "answer"} if not self.rejected else {}
        roles = [(names.get(role, role), getattr(self, role)) for role in ROLES]
        parts = [f"{name} {column!r}" for name, column in roles if column]
        if self.several_rejected:
            parts.append("of several rejected answers the first")
        return ", ".join(parts)

    def step_reasons(self, needs_reward_model: bool) -> dict[int, str | None]:
        """For each step why it is not served; None if it is.

        If step 3 learns from the reward model of step 2, both need pairs.
        """
        if self.text:
            text = "plain text, which serves only the mixture loss of step 3"
            return dict.fromkeys((1, 2, 3), f"{text} (data.unsupervised_sources)")
        no_pairs = "no rejected answers: steps 2 and 3 need pairs of a chosen and a rejected answer"
        pairs = None if "reward" in self.phases else no_pairs
        answers = None if "sft" in self.phases else "no answers to learn from"
        prompts = None if "ppo" in self.phases else "no prompts to answer"
        return {1: answers, 2: pairs, 3: pairs if needs_reward_model else prompts}


@dataclass(frozen=True)
class Columns:
    """Columns of a source by the role that each may have; None where there is none.

    Attributes:
        source: path of the source.
        rows: its first rows.
        names: all columns.
        mapped: the roles that the source's own mapping names.
    """

    source: str
    rows: list[Row]
    names: list[str]
    mapped: frozenset[str]
    prompt: str | None
    input: str | None
    dialogue: str | None
    answer: str | None
    chosen: str | None
    rejected: str | None
    text: str | None

    @classmethod
    def of(cls, rows: list[Row], names: list[str], source: DataSource) -> Columns:
        """Pick the columns by the source's mapping, else by the names that are common."""
        filled = _filled(rows)

        def pick(ours: str, *aliases: str) -> str | None:
            if ours in source.columns:
                return source.columns[ours]
            return next((name for name in (ours, *aliases) if name in filled), None)

        prompt = pick("prompt", "instruction", "question", "query")
        answer = pick("response", "completion", "output", "answer")
        rejected = pick("rejected")
        return cls(
            source=source.path,
            rows=rows,
            names=names,
            mapped=frozenset(source.columns),
            prompt=prompt,
            input="input" if prompt == "instruction" and "input" in filled else None,
            dialogue=pick("messages", "conversations", "conversation"),
            answer=answer,
            chosen=pick("chosen") or (answer if rejected else None),
            rejected=rejected,
            text=pick("text"),
        )

    @property
    def has_pairs(self) -> bool:
        """Whether there are chosen and rejected answers."""
        return self.chosen is not None and self.rejected is not None


def _mapped_text(columns: Columns) -> Schema | None:
    return Schema(text=columns.text) if "text" in columns.mapped else None


def _mapped_dialogue(columns: Columns) -> Schema | None:
    if "messages" not in columns.mapped:
        return None
    return _dialogue_and_pair(columns) or Schema(dialogue=columns.dialogue)


def _prompt_and_pair(columns: Columns) -> Schema | None:
    if not columns.prompt or not columns.has_pairs:
        return None
    return Schema(
        prompt=columns.prompt,
        input=columns.input,
        chosen=columns.chosen,
        rejected=columns.rejected,
    )


def _dialogue_and_pair(columns: Columns) -> Schema | None:
    if not columns.dialogue or not columns.has_pairs:
        return None
    return Schema(dialogue=columns.dialogue, chosen=columns.chosen, rejected=columns.rejected)


def _pair_of_dialogues(columns: Columns) -> Schema | None:
    chosen = columns.chosen
    if chosen is None or not columns.has_pairs:
        return None
    example: Any = next(row[chosen] for row in columns.rows if not is_missing(row.get(chosen)))
    if isinstance(example, list) or (isinstance(example, str) and TURN_MARK.search(example)):
        return Schema(chosen=chosen, rejected=columns.rejected)
    raise DataError(
        f"data {columns.source!r}: {chosen!r} and {columns.rejected!r} are answers without a "
        f"question (columns: {', '.join(columns.names)}); map the question: "
        "columns: {prompt: COLUMN}"
    )


def _prompt_and_answer(columns: Columns) -> Schema | None:
    answer = columns.chosen or columns.answer
    if not columns.prompt or not answer:
        return None
    return Schema(prompt=columns.prompt, input=columns.input, chosen=answer)


def _lone_rejected(columns: Columns) -> Schema | None:
    if columns.rejected is None or columns.chosen is not None:
        return None
    raise DataError(
        f"data {columns.source!r}: {columns.rejected!r} without a column 'chosen' (columns: "
        f"{', '.join(columns.names)}); map it: columns: {{chosen: COLUMN}}"
    )


def _dialogue(columns: Columns) -> Schema | None:
    return Schema(dialogue=columns.dialogue) if columns.dialogue else None


def _text(columns: Columns) -> Schema | None:
    return Schema(text=columns.text) if columns.text else None


def _prompt_alone(columns: Columns) -> Schema | None:
    return Schema(prompt=columns.prompt, input=columns.input) if columns.prompt else None


# In order: the first that fits is used.
SCHEMAS: tuple[Callable[[Columns], Schema | None], ...] = (
    _mapped_text,
    _mapped_dialogue,
    _prompt_and_pair,
    _dialogue_and_pair,
    _pair_of_dialogues,
    _prompt_and_answer,
    _lone_rejected,
    _dialogue,
    _text,
    _prompt_alone,
)


def schema_of(source: DataSource) -> Schema | None:
    """The schema of a source: from its first rows where it is local, or of the catalogue.

    None for a name on the Hub that the catalogue does not hold.

    Raises:
        DataError: missing, unreadable, or no schema fits.
    """
    if source.path.startswith("embedded:"):
        if source.path not in EMBEDDED:
            raise DataError(f"no corpus {source.path!r}; there is {', '.join(EMBEDDED)}")
        return Schema(prompt="prompt", chosen="chosen", rejected="rejected")
    if not is_local(source.path):
        entry = None if source.columns else catalogue.entry_for(source.path)
        return None if entry is None else _schema_of_entry(entry)
    rows = (row for file in local_parts(source.path)["train"] for _, row in read_rows(file))
    return find_schema(itertools.islice(rows, ROWS_LOOKED_AT), source)


def _schema_of_entry(entry: catalogue.Entry) -> Schema:
    return Schema(prompt=entry.prompt, chosen=entry.chosen, rejected=entry.rejected, entry=entry)


def find_schema(first_rows: Iterable[Row], source: DataSource) -> Schema:
    """Which columns hold what, from a few rows, the source's own mapping and the catalogue.

    Raises:
        DataError: no rows, a mapping to a column that is not there, or no schema fits.
    """
    rows = list(first_rows)
    if not rows:
        raise DataError(f"data {source.path!r} has no rows")
    names = list(dict.fromkeys(name for row in rows for name in row))
    entry = None if source.columns else catalogue.entry_for(source.path)
    filled = _filled(rows)
    if entry and (fitted := entry.fitted(filled)):
        return _schema_of_entry(fitted)
    for ours, theirs in source.columns.items():
        if ours not in _MAPPED:
            raise DataError(
                f"data {source.path!r}: columns maps {ours!r}, which is none of "
                f"{', '.join(_MAPPED)}"
            )
        if theirs not in names:
            raise DataError(
                f"data {source.path!r}: columns.{ours} names {theirs!r}, but the columns are "
                + ", ".join(names)
            )
    columns = Columns.of(rows, names, source)
    schema = next(filter(None, (fits(columns) for fits in SCHEMAS)), None)
    if schema is None:
        raise DataError(
            f"data {source.path!r}: no known schema in the columns {', '.join(names)}; rename "
            "them, or map ours to theirs: columns: {prompt: COLUMN, chosen: COLUMN, rejected: "
            "COLUMN} (or response, messages, text)"
        )
    return replace(
        schema,
        several_rejected=any(is_several(row.get(schema.rejected)) for row in rows)
        if schema.rejected
        else False,
        unread=tuple(name for name in names if name in filled and not _is_read(name, schema, rows)),
    )


def _filled(rows: Iterable[Row]) -> set[str]:
    """Columns with a value in some row."""
    return {name for row in rows for name, value in row.items() if not is_missing(value)}


def is_several(value: Any) -> bool:
    """Whether a cell holds several answers as text, and not the turns of one dialogue."""
    return isinstance(value, list) and len(value) > 1 and not isinstance(value[0], dict)


def _is_read(name: str, schema: Schema, rows: Iterable[Row]) -> bool:
    if name in MARKS and not schema.rejected:
        return any(mark_of(name, row.get(name)) is not None for row in rows)
    return name in _READ_BESIDE or name in (getattr(schema, role) for role in ROLES)


def mark_of(name: str, value: Any) -> bool | None:
    """Whether a mark says that its row or turn is learnt; None where it says nothing of it.

    A label that is a number is the class of something; a weight is a number.
    """
    if name in ("weight", "loss_weight"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value > 0 if is_number and not is_missing(value) else None
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.lower())
    return value if isinstance(value, bool) else None


def is_unwanted(values: Row) -> str | None:
    """The mark of a row or of a turn that says not to learn it; None if there is none."""
    return next((name for name in MARKS if mark_of(name, values.get(name)) is False), None)
