"""What the columns of a data set mean, found from its first rows. Needs no torch, no datasets."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from engine.config.schema import DataSource
from engine.config.steps import Phase
from engine.data import catalogue
from engine.data.files import DataError, Row, is_local, is_missing, local_parts, read_rows

PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")
EMBEDDED = ("embedded:facts",)
ROWS_LOOKED_AT = 20_000
"""Rows from which a schema is found, spread over the files of a source."""
_LEAST_ROWS_OF_A_FILE = 200

# Columns and keys of messages with a meaning of their own; see engine.data.rows.
MEDIA = ("image", "images", "audio", "audios", "video", "videos")
SYSTEM = ("system", "system_prompt")
LABELS = ("label", "kto_tag")
_WEIGHTS = ("weight", "loss_weight")
_MARKS = ("train", "training", *_WEIGHTS)
_EXTRAS = ("references", "preferred_style", "kind", "phases")
_MESSAGE_KEYS = frozenset(("role", "from", "content", "value", *_MARKS))

TURN_MARK = re.compile(r"(?:^|\n\n)\s*(Human|Assistant):")

_MAPPED = ("prompt", "chosen", "rejected", "response", "messages", "text")
_ROLES = ("prompt", "input", "dialogue", "chosen", "rejected", "text", "label")


@dataclass(frozen=True)
class Schema:
    """Which column of a data set has which role; None where there is none.

    Rows of an `entry` of the catalogue are read by its mapping. Each of `several_rejected` answers
    in a row makes a pair. `unread` columns, and keys of messages, have no part in what is learnt.
    `first_rows` is the number of rows that it was found from; None where those are all.
    """

    prompt: str | None = None
    input: str | None = None
    dialogue: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None
    label: str | None = None
    entry: catalogue.Entry | None = None
    several_rejected: bool = False
    unread: tuple[str, ...] = ()
    first_rows: int | None = None

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
        names = {"chosen": "answer"} if not self.rejected else {}
        roles = ((names.get(role, role), column) for role, column in self.roles().items())
        parts = [f"{name} {column!r}" for name, column in roles if column]
        if self.entry:
            parts = [f"{self.entry.name}: {self.entry.describe()}"]
        if self.several_rejected:
            parts.append("each of several rejected answers makes a pair")
        if self.first_rows:
            parts.append(f"found from the first {self.first_rows} rows")
        return ", ".join(parts)

    def roles(self) -> dict[str, str | None]:
        """The column of each role."""
        return {role: getattr(self, role) for role in _ROLES}

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


class Cells:
    """What the cells of each column hold, over the rows that were added."""

    def __init__(self) -> None:
        self.rows = 0
        self.first: dict[str, Any] = {}
        """The first value of each column; None where all cells were empty."""
        self.labels: set[str] = set()
        self.marks: set[str] = set()
        self.fractions: set[str] = set()
        self.several: set[str] = set()
        self.lists: set[str] = set()
        self.message_keys: dict[str, None] = {}

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Cells:
        """The cells of rows."""
        cells = cls()
        for row in rows:
            cells.add(row)
        return cells

    @property
    def filled(self) -> set[str]:
        """Columns with a value in some row."""
        return {name for name, value in self.first.items() if value is not None}

    def add(self, row: Row) -> None:
        """Look at one more row."""
        self.rows += 1
        for name, value in row.items():
            is_empty = is_missing(value)
            if self.first.get(name) is None:
                self.first[name] = None if is_empty else value
            if is_empty:
                continue
            if is_list(value):
                self.lists.add(name)
            if isinstance(value, list):
                self._add_list(name, value)
            elif name in LABELS and label_of(name, value) is not None:
                self.labels.add(name)
            else:
                self._add_mark(name, name, value)

    def _add_list(self, name: str, value: list[Any]) -> None:
        if is_several(value):
            self.several.add(name)
        for turn in value:
            if isinstance(turn, dict) and ("role" in turn or "from" in turn):
                for key, part in turn.items():
                    if key not in _MESSAGE_KEYS and not is_missing(part):
                        self.message_keys.setdefault(f"{name}.{key}")
                    self._add_mark(f"{name}.{key}", key, part)

    def _add_mark(self, name: str, key: str, value: Any) -> None:
        if key in _MARKS and mark_of(key, value) is not None:
            self.marks.add(name)
            if _number(value) not in (0.0, 1.0):
                self.fractions.add(name)


@dataclass(frozen=True)
class Columns:
    """Columns of a source by the role that each may have; None where there is none.

    Attributes:
        source: path of the source.
        cells: what its columns hold.
        mapped: the roles that the source's own mapping names.
    """

    source: str
    cells: Cells
    mapped: frozenset[str]
    prompt: str | None
    input: str | None
    dialogue: str | None
    answer: str | None
    chosen: str | None
    rejected: str | None
    text: str | None

    @classmethod
    def of(cls, cells: Cells, source: DataSource) -> Columns:
        """Pick the columns by the source's mapping, else by the names that are common."""
        filled = cells.filled

        def pick(ours: str, *aliases: str) -> str | None:
            if ours in source.columns:
                return source.columns[ours]
            return next((name for name in (ours, *aliases) if name in filled), None)

        prompt = pick("prompt", "instruction", "question", "query")
        answer = pick("response", "completion", "output", "answer")
        rejected = pick("rejected")
        return cls(
            source=source.path,
            cells=cells,
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
    example: Any = columns.cells.first[chosen]
    if is_list(example) or (isinstance(example, str) and TURN_MARK.search(example)):
        return Schema(chosen=chosen, rejected=columns.rejected)
    raise DataError(
        f"data {columns.source!r}: {chosen!r} and {columns.rejected!r} are answers without a "
        f"question (columns: {', '.join(columns.cells.first)}); map the question: "
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
        f"{', '.join(columns.cells.first)}); map it: columns: {{chosen: COLUMN}}"
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
    files = local_parts(source.path)["train"]
    most_rows = max(ROWS_LOOKED_AT // len(files), _LEAST_ROWS_OF_A_FILE)
    cells, is_whole = Cells(), True
    for file in files:
        rows = read_rows(file)
        for _, row in itertools.islice(rows, most_rows):
            cells.add(row)
        is_whole &= next(rows, None) is None
    return schema_from(cells, source, is_whole)


def _schema_of_entry(entry: catalogue.Entry) -> Schema:
    return Schema(prompt=entry.prompt, chosen=entry.chosen, rejected=entry.rejected, entry=entry)


def schema_from(cells: Cells, source: DataSource, is_whole: bool = True) -> Schema:
    """Which columns hold what: by their cells, the source's own mapping and the catalogue.

    Args:
        cells: of the rows that were looked at.
        source: with its mapping.
        is_whole: whether those are all rows.

    Raises:
        DataError: no rows, a mapping to a column that is not there, or no schema fits.
    """
    if not cells.rows:
        raise DataError(f"data {source.path!r} has no rows")
    entry = None if source.columns else catalogue.entry_for(source.path)
    if entry and (fitted := entry.fitted(cells.filled)):
        schema = _schema_of_entry(fitted)
    else:
        _check_mapping(cells, source, is_whole)
        schema = _found_schema(cells, source)
    return replace(
        schema,
        label=_label(schema, cells),
        several_rejected=not schema.entry and schema.rejected in cells.several,
        unread=_unread(schema, cells),
        first_rows=None if is_whole else cells.rows,
    )


def _check_mapping(cells: Cells, source: DataSource, is_whole: bool) -> None:
    for ours, theirs in source.columns.items():
        if ours not in _MAPPED:
            raise DataError(
                f"data {source.path!r}: columns maps {ours!r}, which is none of "
                f"{', '.join(_MAPPED)}"
            )
        # Lines of JSON may name a column for the first time far down.
        if is_whole and theirs not in cells.first:
            raise DataError(
                f"data {source.path!r}: columns.{ours} names {theirs!r}, but the columns are "
                + ", ".join(cells.first)
            )


def _found_schema(cells: Cells, source: DataSource) -> Schema:
    columns = Columns.of(cells, source)
    schema = next(filter(None, (fits(columns) for fits in SCHEMAS)), None)
    if schema is None:
        raise DataError(
            f"data {source.path!r}: no known schema in the columns {', '.join(cells.first)}; "
            "rename them, or map ours to theirs: columns: {prompt: COLUMN, chosen: COLUMN, "
            "rejected: COLUMN} (or response, messages, text)"
        )
    return schema


def _label(schema: Schema, cells: Cells) -> str | None:
    """The column that says whether an answer is wanted, beside answers without a rejected one."""
    if schema.entry or schema.rejected or not (schema.chosen or schema.dialogue):
        return None
    return next((name for name in LABELS if name in cells.labels), None)


def _unread(schema: Schema, cells: Cells) -> tuple[str, ...]:
    """Columns with values, and keys of messages, that have no part in what is learnt."""
    read = {column for column in (*schema.roles().values(), _label(schema, cells)) if column}
    if schema.entry:
        read = schema.entry.columns()
    elif schema.text:
        read |= cells.marks
    else:
        read |= {*SYSTEM, "tools", *cells.marks}
        if schema.prompt and "history" in cells.lists:
            read.add("history")
    read |= set(_EXTRAS)
    found = [name for name, value in cells.first.items() if value is not None and name not in read]
    found += [key for key in cells.message_keys if key.split(".")[0] in read]
    return (*found, *(f"{name} (all but 0 count as 1)" for name in sorted(cells.fractions)))


def is_list(value: Any) -> bool:
    """Whether a cell holds a list, also as text, as CSV files write it."""
    return isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))


def is_several(value: Any) -> TypeGuard[list[Any]]:
    """Whether a cell holds several answers, and not the turns of one dialogue."""
    return isinstance(value, list) and len(value) > 1 and not isinstance(value[0], dict)


def mark_of(name: str, value: Any) -> bool | None:
    """Whether a mark says that its row or turn is learnt; None where it says nothing of it."""
    number = _number(value)
    if number is None:
        return None
    return number > 0 if name in _WEIGHTS or number in (0.0, 1.0) else None


def label_of(name: str, value: Any) -> bool | None:
    """Whether a label says that its answer is wanted; None where it says nothing of it."""
    # A label that is a number may be the class of anything.
    if name == "label" and str(value).lower() not in ("true", "false"):
        return None
    return mark_of(name, value)


def _number(value: Any) -> float | None:
    """A number, a truth value or their text as a number; None of anything else."""
    try:
        number = float({"true": 1, "false": 0}.get(str(value).lower(), value))
    except (TypeError, ValueError):
        return None
    return None if math.isnan(number) else number


def is_unwanted(values: Row) -> str | None:
    """The mark of a row or of a turn that says not to learn it; None if there is none."""
    return next((name for name in _MARKS if mark_of(name, values.get(name)) is False), None)
