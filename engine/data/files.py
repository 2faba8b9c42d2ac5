"""Files of a local data set: finding them, and reading their rows as a stream. Needs no torch."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from engine.data import catalogue

Row = dict[str, Any]

SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".txt", ".parquet", ".arrow")
# A text file beside data is about it: a licence, a read-me.
_IN_FOLDERS = tuple(suffix for suffix in SUFFIXES if suffix != ".txt")
# Keys under which a JSON document keeps its rows.
_LISTS_OF_ROWS = ("data", "rows", "examples", "instances")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")

_EVAL_NAMES = ("test", "eval", "evaluation", "validation", "valid", "val", "dev")


class DataError(ValueError):
    """Data that cannot be used; the message names the file, the place and what to do."""


def is_missing(value: object) -> bool:
    """Whether a cell is empty: None, or NaN, as pandas writes it."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def lines_of(text: str) -> list[str]:
    """The lines of a text that are not blank, split at newlines alone.

    `str.splitlines` also splits at U+2028 and others, which JSON and people write inside of lines.
    """
    return [line for line in text.split("\n") if line.strip()]


def is_local(path: str) -> bool:
    """Whether a source's path is on this machine; such a path is never looked up on the Hub."""
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
        if file.suffix.lower() in _IN_FOLDERS
        and file.is_file()
        and _is_data(file.relative_to(root))
    )
    named = {file: _part_name(file.relative_to(root)) for file in files}
    evals = [file for file in files if named[file] == "eval"]
    # A folder that names its train part may hold other things beside it.
    train = [file for file in files if named[file] == "train"]
    train = train or [file for file in files if named[file] is None]
    if not train:
        raise DataError(
            f"data folder {path!r} holds no train file "
            f"({', '.join(_IN_FOLDERS)}, or a save_to_disk folder); found: "
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
        is_table = suffix in (".csv", ".tsv")
        with open(file, encoding="utf-8-sig", newline="" if is_table else None) as stream:
            if is_table:
                yield from _csv_rows(file, stream, "\t" if suffix == ".tsv" else ",")
            elif suffix == ".txt":
                for number, line in enumerate(stream, 1):
                    yield f"line {number}", {"text": line.rstrip("\n")}
            elif _first_character(stream) == "[":
                yield from _json_list_rows(file, stream)
            else:
                yield from _json_line_rows(file, stream)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(file)) from error


def _not_utf8(file: Path) -> str:
    """Where a file stops being UTF-8, and how to fix it."""
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
            batches = _arrow_batches(pyarrow.memory_map(str(file)))
        number = itertools.count(1)
        for batch in batches:
            for row in batch.to_pylist():
                yield f"row {next(number)}", row
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file} is not a readable {suffix[1:]} file: {error}") from error


def _arrow_batches(content: Any) -> Iterator[Any]:
    """Batches of Arrow's stream format, as datasets writes it, or of its file format."""
    import pyarrow

    if bytes(content.read(6)) == b"ARROW1":
        file = pyarrow.ipc.open_file(content)
        return (file.get_batch(index) for index in range(file.num_record_batches))
    content.seek(0)
    return iter(pyarrow.ipc.open_stream(content))


def _csv_rows(file: Path, stream: IO[str], delimiter: str) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(2**27)
    reader = csv.DictReader(stream, delimiter=delimiter)
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
        place = f"line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            document = _document(stream) if number == 1 else None
            if document is not None:
                yield from _document_rows(file, document)
                return
            raise DataError(
                f"{file}: {place} is not JSON ({error.msg}); fix or remove it (a file "
                "holds a list of objects, or one object per line)"
            ) from error
        except RecursionError as error:
            raise DataError(_too_deep(file, place)) from error
        if number == 1 and isinstance(row, dict) and _list_of_rows(row) and not stream.readline():
            yield from _document_rows(file, row)
            return
        yield place, _object(file, place, row, line)


def _document(stream: IO[str]) -> Row | None:
    """The file as one JSON object over several lines; None if it is none."""
    stream.seek(0)
    try:
        found = json.loads(stream.read().lstrip("\ufeff"))
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _list_of_rows(document: Row) -> str | None:
    """The key of a document's rows; None if it is a row itself."""
    for key in _LISTS_OF_ROWS:
        rows = document.get(key)
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return key
    return None


def _document_rows(file: Path, document: Row) -> Iterator[tuple[str, Row]]:
    key = _list_of_rows(document)
    rows = [document] if key is None else document[key]
    for number, row in enumerate(rows, 1):
        yield f"row {number}", _object(file, f"row {number}", row, json.dumps(row))


def _too_deep(file: Path, place: str) -> str:
    return f"{file}: {place} holds values nested too deeply to be read; flatten or remove it"


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
            # Doubles the buffer, so that even a broken row is found in linear time.
            more = stream.read(max(len(buffer), 1 << 16))
            if more:
                buffer += more
                continue
            raise DataError(
                f"{file}: line {line + error.lineno - 1} is not JSON ({error.msg}), "
                f"in or after row {number + 1}; fix or remove it (a file holds a list of "
                "objects, or one object per line)"
            ) from error
        except RecursionError as error:
            raise DataError(_too_deep(file, f"row {number + 1}")) from error
        number += 1
        yield f"row {number}", _object(file, f"row {number}", row, buffer[:end])
        line += buffer[:end].count("\n")
        buffer = buffer[end:]


def _object(file: Path, place: str, row: Any, text: str) -> Row:
    """A row that was read from `text`; JSON allows half of a surrogate pair, UTF-8 does not."""
    if not isinstance(row, dict):
        raise DataError(f"{file}: {place} holds a {type(row).__name__}, not an object of columns")
    if _SURROGATE.search(text):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(error.object[error.start]):x}"
            raise DataError(
                f"{file}: {place} holds {half}, half of a character (a surrogate), which is no "
                "text; replace it or remove the row"
            ) from error
    return row
