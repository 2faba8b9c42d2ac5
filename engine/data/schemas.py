"""What the rows of a data set look like, found from its first rows. Needs no torch, no datasets.

Every schema becomes one normalised row: `prompt` (messages ending in a user turn), `chosen` and
`rejected` (answers), or `text`; beside them `all_answers` (the assistant turns inside the prompt
are learnt too) and what a data set may carry: `references`, `preferred_style`, `kind`, `phases`.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from engine.config.schema import DataSource, RunConfig
from engine.data import catalogue

Phase = Literal["sft", "reward", "ppo"]
Reason = Literal["empty", "unusable"]
Row = dict[str, Any]

REASONS: dict[Reason, str] = {
    "empty": "without an answer",
    "unusable": "no dialogue of a question and its answer",
}

PHASES: tuple[Phase, ...] = ("sft", "reward", "ppo")
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet", ".arrow")
EMBEDDED = ("embedded:facts",)
ROWS_LOOKED_AT = 20
ROWS_CHECKED = 5000
"""Rows of a local source that are read and normalised before a run starts."""

_EVAL_NAMES = ("test", "eval", "evaluation", "validation", "valid", "val", "dev")
_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_TURN_MARK = re.compile(r"(?:^|\n\n)\s*(Human|Assistant):")


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the place and the way out."""


class UnusableRow(Exception):
    """A row that is dropped and counted under `reason`; `detail` says what it lacks."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass
class Dropped:
    """Rows left out, counted by reason, and where the first of each stands."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    first: dict[str, str] = field(default_factory=dict)

    def add(self, row: UnusableRow, where: str) -> None:
        """Count a row; `where` names its file and place."""
        self.counts[row.reason] += 1
        self.first.setdefault(row.reason, f"{where}: {row.detail}")

    def describe(self) -> str:
        """What was left out, with the first of each, in words; empty if nothing was."""
        return "; ".join(
            f"{self.counts[reason]} {REASONS[reason]}, first {self.first[reason]}"
            for reason in REASONS
            if self.counts[reason]
        )


@dataclass(frozen=True)
class Schema:
    """Which column of a data set plays which part; None where there is none.

    Rows of an `entry` of the catalogue are read by its mapping.
    """

    prompt: str | None = None
    input: str | None = None
    dialogue: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    text: str | None = None
    entry: catalogue.Entry | None = None

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
        parts = [(names.get(name, name), column) for name, column in vars(self).items() if column]
        return ", ".join(f"{name} {column!r}" for name, column in parts)

    def step_reasons(self) -> dict[int, str | None]:
        """Of each step why it is not served; None: it is.

        Step 3 learns from the reward model of step 2, so both need pairs.
        """
        if self.text:
            text = "plain text, which serves the mixture loss of step 3 alone"
            return dict.fromkeys((1, 2, 3), f"{text} (data.unsupervised_sources)")
        no_pairs = "no rejected answers: steps 2 and 3 need pairs of a chosen and a rejected answer"
        pairs = None if "reward" in self.phases else no_pairs
        answers = None if "sft" in self.phases else "no answers to learn from"
        return {1: answers, 2: pairs, 3: pairs}


def is_local(path: str) -> bool:
    """Whether a source's path means this machine: such a path is never looked up on the Hub."""
    looks_local = path.startswith(("/", ".", "~")) or path.lower().endswith(SUFFIXES)
    looks_local |= path == catalogue.LOCAL_FILES
    return not path.startswith("embedded:") and (looks_local or Path(path).exists())


def local_parts(path: str) -> dict[Literal["train", "eval"], list[Path]]:
    """The files of a local source by part, in a fixed order.

    Raises:
        DataError: missing, or nothing readable in it.
    """
    root = Path(path).expanduser()
    if named_files := catalogue.local_files(path):
        missing = [str(file) for file in named_files if not file.is_file()]
        if missing:
            raise DataError(
                f"data {path!r} stands for {named_files[0]} and {named_files[1]}; missing: "
                f"{', '.join(missing)}; put them there, or give the path of your file"
            )
        return {"train": named_files[:1], "eval": named_files[1:]}
    if not root.exists():
        raise DataError(f"data {path!r}: no such file or folder; check the path")
    if root.is_file():
        if root.suffix.lower() not in SUFFIXES:
            raise DataError(
                f"data {path!r}: cannot read {root.suffix or 'a file without a suffix'}; "
                f"known are {', '.join(SUFFIXES)}"
            )
        return {"train": [root], "eval": []}
    files = sorted(
        file
        for file in root.rglob("*")
        if file.suffix.lower() in SUFFIXES and file.is_file() and _is_data(file.relative_to(root))
    )
    named = {file: _part_name(file.relative_to(root)) for file in files}
    evals = [file for file in files if named[file] == "eval"]
    # A folder that names its train part may hold other things beside it.
    train = [file for file in files if named[file] == "train"]
    train = train or [file for file in files if named[file] is None]
    if not train:
        raise DataError(
            f"data folder {path!r} holds no train file "
            f"({', '.join(SUFFIXES)}, or a save_to_disk folder); found: "
            + (", ".join(file.name for file in files[:5]) or "nothing readable")
        )
    return {"train": train, "eval": evals}


def _is_data(relative: Path) -> bool:
    hidden = any(part.startswith(".") for part in relative.parts)
    about_data = relative.name in ("state.json", "dataset_info.json", "dataset_dict.json")
    return not hidden and not about_data and not relative.name.startswith("dataset_infos")


def _part_name(relative: Path) -> Literal["train", "eval"] | None:
    for name in (relative.stem, *reversed(relative.parts[:-1])):
        word = re.split(r"[-_.]", name.lower())[0]
        if word == "train":
            return "train"
        if word in _EVAL_NAMES:
            return "eval"
    return None


def read_rows(file: Path) -> Iterator[tuple[str, Row]]:
    """The rows of one file in a stream, each with its place ("line 17", "row 17") for errors.

    Raises:
        DataError: unreadable; the message names the file and the line where it is known.
    """
    suffix = file.suffix.lower()
    try:
        if suffix in (".parquet", ".arrow"):
            yield from _columnar_rows(file, suffix)
            return
        with open(file, encoding="utf-8-sig", newline="" if suffix == ".csv" else None) as stream:
            if suffix == ".csv":
                yield from _csv_rows(file, stream)
            elif _first_character(stream) == "[":
                yield from _json_list_rows(file, stream)
            else:
                yield from _json_line_rows(file, stream)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(file)) from error


def _not_utf8(file: Path) -> str:
    """Where a file stops being UTF-8, and the way out."""
    guess = "ENCODING"
    with open(file, "rb") as stream:
        for line, content in enumerate(stream, 1):
            if line == 1 and content.startswith((b"\xff\xfe", b"\xfe\xff")):
                guess = "UTF-16"
            try:
                content.decode("utf-8")
            except UnicodeDecodeError as error:
                byte = content[error.start]
                return (
                    f"{file}: line {line} is not UTF-8 text (byte 0x{byte:02x} at column "
                    f"{error.start + 1}); save it as UTF-8: iconv -f {guess} -t UTF-8 "
                    f"{file.name} > utf8-{file.name}"
                )
    return f"{file} changed while it was read; try again"


def _columnar_rows(file: Path, suffix: str) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        if suffix == ".parquet":
            batches: Iterable[Any] = pyarrow.parquet.ParquetFile(file).iter_batches(256)
        else:
            batches = pyarrow.ipc.open_stream(pyarrow.memory_map(str(file)))
        number = itertools.count(1)
        for batch in batches:
            for row in batch.to_pylist():
                yield f"row {next(number)}", row
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a readable {suffix[1:]} file: {error}") from error


def _csv_rows(file: Path, stream: IO[str]) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(2**27)
    reader = csv.DictReader(stream)
    try:
        for row in reader:
            if None in row or None in row.values():
                raise DataError(
                    f"{file}: line {reader.line_num} does not have the header's "
                    f"{len(reader.fieldnames or [])} fields; check its commas and quotes"
                )
            yield f"line {reader.line_num}", dict(row)
    except csv.Error as error:
        raise DataError(f"{file}: line {reader.line_num} is not CSV: {error}") from error


def _first_character(stream: IO[str]) -> str:
    while (character := stream.read(1)).isspace():
        pass
    stream.seek(0)
    return character


def _json_line_rows(file: Path, stream: IO[str]) -> Iterator[tuple[str, Row]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{file}: line {number} is not JSON ({error.msg}); mend or remove it (a file "
                "holds a list of objects, or one object a line)"
            ) from error
        yield f"line {number}", _object(file, f"line {number}", row)


def _json_list_rows(file: Path, stream: IO[str]) -> Iterator[tuple[str, Row]]:
    """Decode a list element by element, so that a large file is never in memory as a whole."""
    decoder = json.JSONDecoder()
    buffer = stream.read(1 << 16).lstrip("\ufeff")
    line = 1 + buffer[: buffer.index("[")].count("\n")
    buffer = buffer[buffer.index("[") + 1 :]
    number = 0
    while True:
        rest = buffer.lstrip(" \t\r\n,")
        line += buffer[: len(buffer) - len(rest)].count("\n")
        buffer = rest
        try:
            if buffer.startswith("]"):
                return
            row, end = decoder.raw_decode(buffer)
        except json.JSONDecodeError as error:
            # Reads as much again as is there: a broken row costs no quadratic time.
            more = stream.read(max(len(buffer), 1 << 16))
            if more:
                buffer += more
                continue
            raise DataError(
                f"{file}: line {line + error.lineno - 1} is not JSON ({error.msg}), "
                f"in or after row {number + 1}; mend or remove it (a file holds a list of "
                "objects, or one object a line)"
            ) from error
        number += 1
        yield f"row {number}", _object(file, f"row {number}", row)
        line += buffer[:end].count("\n")
        buffer = buffer[end:]


def _object(file: Path, place: str, row: Any) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{file}: {place} holds a {type(row).__name__}, not an object of columns")
    return row


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
        return entry and _schema_of_entry(entry)
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
    columns = list(dict.fromkeys(name for row in rows for name in row))
    filled = {name for row in rows for name, value in row.items() if value is not None}
    entry = None if source.columns else catalogue.entry_for(source.path)
    if entry and (fitted := entry.fitted(filled)):
        return _schema_of_entry(fitted)
    known = ("prompt", "chosen", "rejected", "response", "messages", "text")
    for ours, theirs in source.columns.items():
        if ours not in known:
            raise DataError(
                f"data {source.path!r}: columns maps {ours!r}, which is none of {', '.join(known)}"
            )
        if theirs not in columns:
            raise DataError(
                f"data {source.path!r}: columns.{ours} names {theirs!r}, but the columns are "
                + ", ".join(columns)
            )

    def pick(ours: str, *aliases: str) -> str | None:
        if ours in source.columns:
            return source.columns[ours]
        return next((name for name in (ours, *aliases) if name in filled), None)

    prompt = pick("prompt", "instruction", "question", "query")
    dialogue = pick("messages", "conversations", "conversation")
    answer = pick("response", "completion", "output", "answer")
    chosen = pick("chosen") or (answer if "rejected" in filled | set(source.columns) else None)
    rejected = pick("rejected") if chosen else None
    text = pick("text")
    extra = "input" if prompt == "instruction" and "input" in filled else None

    if "text" in source.columns:
        return Schema(text=text)
    if "messages" in source.columns:
        return Schema(dialogue=dialogue, chosen=chosen if rejected else None, rejected=rejected)
    if prompt and chosen and rejected:
        return Schema(prompt=prompt, input=extra, chosen=chosen, rejected=rejected)
    if dialogue and chosen and rejected:
        return Schema(dialogue=dialogue, chosen=chosen, rejected=rejected)
    if chosen and rejected:
        example = next(row[chosen] for row in rows if row.get(chosen) is not None)
        if isinstance(example, list) or (isinstance(example, str) and _TURN_MARK.search(example)):
            return Schema(chosen=chosen, rejected=rejected)
        raise DataError(
            f"data {source.path!r}: {chosen!r} and {rejected!r} are answers without a question "
            f"(columns: {', '.join(columns)}); map the question: columns: {{prompt: COLUMN}}"
        )
    if prompt and (chosen or answer):
        return Schema(prompt=prompt, input=extra, chosen=chosen or answer)
    if "rejected" in filled and not chosen:
        raise DataError(
            f"data {source.path!r}: 'rejected' without a column 'chosen' (columns: "
            f"{', '.join(columns)}); map it: columns: {{chosen: COLUMN}}"
        )
    if dialogue:
        return Schema(dialogue=dialogue)
    if text:
        return Schema(text=text)
    if prompt:
        return Schema(prompt=prompt, input=extra)
    raise DataError(
        f"data {source.path!r}: no known schema in the columns {', '.join(columns)}; rename them, "
        "or map ours to theirs: columns: {prompt: COLUMN, chosen: COLUMN, rejected: COLUMN} "
        "(or response, messages, text)"
    )


def serves_steps(source: DataSource) -> frozenset[int]:
    """The steps (1 SFT, 2 reward, 3 PPO) that a source can serve by itself.

    A Hub name serves all as far as one can tell without the network. Step 3 learns from the
    reward model of step 2, so a source without pairs serves neither.

    Raises:
        DataError: missing, unreadable, or no schema fits.
    """
    schema = schema_of(source)
    phases = frozenset(PHASES) if schema is None else schema.phases
    return frozenset(
        ({1} if "sft" in phases else set()) | ({2, 3} if "reward" in phases else set())
    )


@dataclass(frozen=True)
class Reading:
    """What a look at a source's rows found: how many, whether all, and what is left out."""

    rows: int
    complete: bool
    dropped: Dropped

    @property
    def usable(self) -> int:
        """Rows that a step can use."""
        return self.rows - self.dropped.counts.total()


def check_rows(source: DataSource, schema: Schema, most_rows: int = ROWS_CHECKED) -> Reading:
    """Read and normalise the first rows of each file of a local source.

    Raises:
        DataError: a row that is broken, or all that were read are unusable; the message names the
            file and the line.
    """
    dropped = Dropped()
    count, complete = 0, True
    for file in itertools.chain.from_iterable(local_parts(source.path).values()):
        rows = read_rows(file)
        for place, row in itertools.islice(rows, most_rows):
            count += 1
            try:
                normalise(row, schema, f"{file}, {place}")
            except UnusableRow as unusable:
                dropped.add(unusable, f"{file}, {place}")
        complete &= next(rows, None) is None
    if count == dropped.counts.total():
        raise DataError(no_usable_row(source, schema, dropped))
    return Reading(count, complete, dropped)


def no_usable_row(source: DataSource, schema: Schema, dropped: Dropped) -> str:
    """The message on a source of which nothing is left."""
    return (
        f"data {source.path!r}: no usable row ({schema.describe()}); {dropped.describe()}; "
        "fill these columns, or map others: columns: {prompt: COLUMN, chosen: COLUMN}"
    )


def refusals(config: RunConfig, steps: Iterable[int]) -> list[str]:
    """Why the data of a configuration cannot serve the asked steps: one line a reason, or none.

    Reads only the first thousands of rows of local sources.
    """
    steps = set(steps)
    found: list[str] = []
    schemas: dict[str, Schema | None] = {}
    data = config.data
    for source in [*data.sources, *data.sft_only_sources, *data.unsupervised_sources]:
        try:
            schema = schemas[source.path] = schema_of(source)
            if schema is not None and is_local(source.path):
                check_rows(source, schema)
        except DataError as error:
            found.append(str(error))
    if found:
        return found
    for source in data.unsupervised_sources:
        schema = schemas[source.path]
        if 3 in steps and schema is not None and not schema.text:
            found.append(
                f"data.unsupervised_sources: {source.path} is no plain text "
                f"({schema.describe()}); map its text: columns: {{text: COLUMN}}"
            )

    def serving(phase: Phase) -> bool:
        sources = [*data.sources, *(data.sft_only_sources if phase == "sft" else [])]
        loaded = [schemas[source.path] for source in sources]
        return any(schema is None or phase in schema.phases for schema in loaded)

    names = ", ".join(source.path for source in data.sources) or "data.sources (empty)"
    if 1 in steps and not serving("sft"):
        found.append(f"{names}: no answers to learn from: step 1 needs prompts with answers")
    needs_pairs = steps & ({2} if config.models.trained_reward else {2, 3})
    if needs_pairs and not serving("reward"):
        found.append(
            f"{names}: no rejected answers: steps 2 and 3 need pairs of a chosen and a rejected "
            "answer; run --steps 1, or give a data set with pairs"
        )
    elif 3 in steps and not serving("ppo"):
        found.append(f"{names}: no prompts: step 3 needs them")
    split_is_used = any(source.path not in EMBEDDED for source in data.sources)
    for step, share in zip((1, 2, 3), data.split, strict=True):
        alone = step == 1 and data.sft_only_sources
        if step in steps and share == 0 and split_is_used and not alone:
            found.append(f"data.split gives step {step} a share of 0: raise it, or leave it out")
    return found


def normalise(row: Row, schema: Schema, where: str) -> Row:
    """One row in the normalised form; `where` names file and place in errors.

    Raises:
        UnusableRow: no answer, or no dialogue that ends in a question and its answer.
        DataError: a value of the wrong type.
    """
    if schema.text:
        text = _text(row.get(schema.text), schema.text, where)
        if not text.strip():
            raise UnusableRow("empty", _nothing_in(row, schema.text))
        return {"text": text}
    if schema.entry:
        columns = {name: name for name in ("prompt", "chosen", "rejected") if vars(schema)[name]}
        return normalise(schema.entry.read(row), Schema(**columns), where)
    chosen = rejected = None
    all_answers = False
    if schema.prompt:
        prompt = _prompt(row, schema, where)
    elif schema.dialogue:
        prompt = _turns(row.get(schema.dialogue), schema.dialogue, where)
        if not schema.chosen:
            prompt, chosen = _split_answer(_until_last_answer(prompt))
            all_answers = True
    else:
        assert schema.chosen
        assert schema.rejected
        prompt, chosen = _split_answer(_turns(row.get(schema.chosen), schema.chosen, where))
        other, rejected = _split_answer(_turns(row.get(schema.rejected), schema.rejected, where))
        if other != prompt:
            raise UnusableRow("unusable", "the answers belong to two different dialogues")
    if schema.chosen and chosen is None:
        chosen = _answer(row.get(schema.chosen), schema.chosen, where)
    if schema.rejected and rejected is None:
        rejected = _answer(row.get(schema.rejected), schema.rejected, where)
    extras = _extras(row, where)
    serves = set(extras.get("phases", PHASES))
    # A row that says which phases it serves needs only their answers.
    if chosen == "" and serves & {"sft", "reward"}:
        raise UnusableRow("empty", _nothing_in(row, schema.chosen or schema.dialogue))
    if rejected == "" and "reward" in serves:
        raise UnusableRow("empty", _nothing_in(row, schema.rejected))
    prompt = tidy_turns(prompt)
    if not prompt or prompt[-1]["role"] != "user":
        raise UnusableRow("unusable", "the prompt is empty or does not end in a question")
    normalised = {"prompt": prompt, "chosen": chosen or None, "rejected": rejected or None}
    return {**normalised, "all_answers": all_answers, **extras}


def _nothing_in(row: Row, column: str | None) -> str:
    return f"column {column!r} is {'empty' if column in row else 'missing'}"


def tidy_turns(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Strip and drop empty turns, join neighbours of one role, begin with the person's turn.

    Chat templates refuse dialogues whose roles do not alternate.
    """
    tidy: list[dict[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if not content:
            continue
        if tidy and tidy[-1]["role"] == role:
            tidy[-1]["content"] += f"\n\n{content}"
        elif role != "assistant" or any(turn["role"] == "user" for turn in tidy):
            tidy.append({"role": role, "content": content})
    return tidy


def _text(value: Any, column: str, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}, not text; write text "
            "there, or map another column"
        )
    return value


def _prompt(row: Row, schema: Schema, where: str) -> list[dict[str, str]]:
    assert schema.prompt
    value = row.get(schema.prompt)
    if isinstance(value, list):
        return _turns(value, schema.prompt, where)
    text = _text(value, schema.prompt, where).strip()
    if text.startswith("Human:") and text.endswith("\n\nAssistant:"):
        return _turns(text, schema.prompt, where)[:-1]
    system = _text(row.get("system"), "system", where)
    if schema.input:
        extra = _text(row.get(schema.input), schema.input, where).strip()
        text = f"{text}\n\n{extra}" if extra else text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _turns(value: Any, column: str, where: str) -> list[dict[str, str]]:
    """Messages from a list of `role`/`content` or `from`/`value`, or from 'Human: ...' text."""
    if isinstance(value, str):
        pieces = _TURN_MARK.split(value)
        if len(pieces) < 3:
            raise UnusableRow("unusable", f"no 'Human:' and 'Assistant:' in column {column!r}")
        roles = [_ROLES[name.lower()] for name in pieces[1::2]]
        contents = [content.strip() for content in pieces[2::2]]
        return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    if not value:
        raise UnusableRow("empty", f"column {column!r} is empty or missing")
    if not isinstance(value, list):
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}, not a list of messages"
        )
    return [_message(turn, column, where) for turn in value]


def _message(turn: Any, column: str, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: a turn in {column!r} is a {type(turn).__name__}, not a message")
    name = turn.get("role", turn.get("from"))
    if name is None:
        raise DataError(
            f"{where}: a turn in {column!r} has {', '.join(turn)}; expected role and content, "
            "or from and value"
        )
    role = _ROLES.get(str(name).lower())
    if role is None:
        raise UnusableRow("unusable", f"a turn of {str(name)!r} in column {column!r}")
    return {"role": role, "content": _text(turn.get("content", turn.get("value")), column, where)}


def _until_last_answer(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]
    return turns


def _split_answer(turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], str]:
    if not turns or turns[-1]["role"] != "assistant":
        raise UnusableRow("unusable", "the dialogue does not end in an answer")
    return tidy_turns(turns[:-1]), turns[-1]["content"].strip()


def _answer(value: Any, column: str, where: str) -> str:
    if isinstance(value, list):
        value = value[-1] if value else None
    if isinstance(value, dict):
        message = _message(value, column, where)
        if message["role"] != "assistant":
            raise UnusableRow("unusable", f"column {column!r} holds no turn of the assistant")
        return message["content"].strip()
    return _text(value, column, where).strip()


def _extras(row: Row, where: str) -> Row:
    """What a row may say beside prompt and answers, where it is of the right type."""
    extras: Row = {}
    for name in ("references", "phases"):
        value = row.get(name)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            extras[name] = value
    for name in ("preferred_style", "kind"):
        if isinstance(row.get(name), str):
            extras[name] = row[name]
    unknown = set(extras.get("phases", [])) - set(PHASES)
    if unknown:
        raise DataError(
            f"{where}: phases holds {', '.join(sorted(unknown))}; known are {', '.join(PHASES)}"
        )
    return extras
