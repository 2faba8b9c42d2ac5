"""Loading a source into rows of one form: Hub name, local file or folder, embedded corpus."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from datasets import Dataset, Features, List, Value

from engine.config.schema import DataSource
from engine.data import catalogue, facts
from engine.data.cache import (
    build_once,
    cache_root,
    code_fingerprint,
    file_fingerprint,
    fingerprint,
    open_rows,
    write_rows,
)
from engine.data.checks import no_usable_row
from engine.data.files import DataError, Row, is_local, local_parts, read_rows
from engine.data.rows import Dropped, Reason, further_columns, read
from engine.data.schemas import ROWS_LOOKED_AT, Cells, Phase, Schema, schema_from, schema_of

Note = Callable[[str], None]
Streams = dict[str, Iterable[tuple[str, Row]]]
"""The rows of each file ("": no file), each with its place."""

ROW_FEATURES = Features(
    {
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "chosen": Value("string"),
        "rejected": Value("string"),
        "more_rejected": List(Value("string")),
        "label": Value("bool"),
        "text": Value("string"),
        "learnt_turns": List(Value("bool")),
        "references": List(Value("string")),
        "preferred_style": Value("string"),
        "kind": Value("string"),
        "phases": List(Value("string")),
        "columns": Value("string"),
    }
)


class FileRows(TypedDict):
    """Rows of a file, and how many of them are usable."""

    file: str
    rows: int
    usable: int


@dataclass(frozen=True)
class SourceRows:
    """The normalised rows of one source, memory-mapped.

    `dropped` counts rows left out by `rows.REASONS`, `first_dropped` says where the first
    of each is and what it lacks; `files` are in the order of their rows; `fingerprint` changes with
    the content and the way it is read.
    """

    train: Dataset
    eval: Dataset | None
    schema: Schema
    dropped: dict[Reason, int]
    first_dropped: dict[Reason, str]
    files: list[FileRows]
    fingerprint: str

    @property
    def phases(self) -> frozenset[Phase]:
        """The phases that the schema can serve."""
        return self.schema.phases

    @property
    def is_text(self) -> bool:
        """Whether the rows are plain text."""
        return bool(self.schema.text)


def load_source(
    source: DataSource, cache_dir: str | None = None, note: Note = lambda _: None
) -> SourceRows:
    """Normalise a source once into the cache and open it.

    Raises:
        DataError: missing, unreadable, no schema fits, or not on the Hub.
    """
    root = cache_root(cache_dir)
    if source.path.startswith("embedded:"):
        schema = schema_of(source)
        assert schema is not None
        parts: dict[str, Streams] = {
            part: {"": ((f"row {i}", row) for i, row in enumerate(facts.rows(part), 1))}
            for part in ("train", "eval")
        }
        content: Any = source.path
    elif is_local(source.path):
        files = local_parts(source.path)
        schema = schema_of(source)
        assert schema is not None
        parts = {
            part: {str(file): read_rows(file) for file in names}
            for part, names in files.items()
            if names
        }
        content = {
            part: [file_fingerprint(file, root) for file in names] for part, names in files.items()
        }
    else:
        splits = _from_hub(source, note)
        train = splits["train"]
        cells = Cells.of(itertools.islice(train, ROWS_LOOKED_AT))
        schema = schema_from(cells, source, is_whole=len(train) == cells.rows)
        parts = {
            part: {"": ((f"{part} row {i}", row) for i, row in enumerate(split, 1))}
            for part, split in splits.items()
        }
        content = [source.path, source.subset, *(s._fingerprint for s in splits.values())]

    key = fingerprint(code_fingerprint(), content, schema.describe())

    def build(folder: Path) -> None:
        note(f"reading {source.path}")
        _write(folder, parts, schema, source)

    if schema.unread:
        note(f"{source.path}: columns not read: {', '.join(schema.unread)}")
    folder = build_once(root / f"rows-{key}", build)
    has_eval = (folder / "eval.arrow").exists()
    dropped = json.loads((folder / "dropped.json").read_text())
    return SourceRows(
        train=open_rows(folder / "train.arrow"),
        eval=open_rows(folder / "eval.arrow") if has_eval else None,
        schema=schema,
        dropped=dropped["counts"],
        first_dropped=dropped["first"],
        files=dropped["files"],
        fingerprint=key,
    )


def _write(folder: Path, parts: dict[str, Streams], schema: Schema, source: DataSource) -> None:
    """Write the rows of each part, and what was left out.

    Raises:
        DataError: no row is usable, or the schema does not hold for all rows.
    """
    dropped, cells = Dropped(), Cells()
    files: list[FileRows] = []

    def normalised(part: str) -> Iterator[Row]:
        for name, rows in parts[part].items():
            count, before = itertools.count(), dropped.counts.total()
            looked = cells if part == "train" else Cells()
            for row, found in read(_placed(name, rows, looked, count), schema, dropped):
                yield {**found, "columns": further_columns(row, schema)}
            seen, left_out = next(count), dropped.counts.total() - before
            files.append({"file": name, "rows": seen, "usable": seen - left_out})

    for part in parts:
        write_rows(folder / f"{part}.arrow", normalised(part), ROW_FEATURES)
    if schema.first_rows:
        _check_later_rows(schema, cells, source)
    if not len(open_rows(folder / "train.arrow")):
        raise DataError(no_usable_row(source, schema, dropped))
    found = {"counts": dropped.counts, "first": dropped.first, "files": files}
    (folder / "dropped.json").write_text(json.dumps(found))


def _placed(
    file: str, rows: Iterable[tuple[str, Row]], cells: Cells, count: Iterator[int]
) -> Iterator[tuple[str, Row]]:
    """Rows with file and place; they are counted, and their cells noted."""
    for place, row in rows:
        next(count)
        cells.add(row)
        yield (f"{file}, {place}" if file else place), row


def _check_later_rows(schema: Schema, cells: Cells, source: DataSource) -> None:
    """Refuse a schema that was found from the first rows where all rows say another one."""
    whole = schema_from(cells, source).roles()
    late = {role: column for role, column in whole.items() if column != schema.roles()[role]}
    if late:
        columns = ", ".join(f"{role} {column!r}" for role, column in late.items())
        raise DataError(
            f"data {source.path!r}: {schema.describe()}; but all rows together have {columns}; "
            "move a row that fills these columns to the top of the file"
        )


def _from_hub(source: DataSource, note: Note) -> dict[str, Dataset]:
    from datasets import load_dataset, load_dataset_builder

    entry = catalogue.entry_for(source.path)
    name = (entry and entry.hub_id) or source.path
    try:
        size = load_dataset_builder(name, source.subset).info.download_size
        megabytes = f"{size / 1e6:.0f} MB" if size else "size unknown"
        note(f"data set {name} from the Hub ({megabytes}; kept in the Hub's cache)")
        splits = load_dataset(name, source.subset)
    except Exception as error:
        # The library raises a dozen exception types that all mean the same to the user.
        reason = str(error).splitlines()[0][:200] if str(error) else ""
        suggestion = "check the name, the subset and the network, or give a local path"
        if "scripts are no longer supported" in reason:
            # The Hub keeps the data of such sets as Parquet in a separate branch.
            suggestion = (
                f"get its files: hf download {name} --repo-type dataset --revision "
                f"refs/convert/parquet --local-dir {source.path}, and give that folder as a path: "
                f"./{source.path}"
            )
        raise DataError(
            f"data {source.path!r}: nothing of this name on this machine, and it could not be "
            f"loaded from the Hub ({type(error).__name__}: {reason}); {suggestion}"
        ) from error
    train = next((name for name in splits if str(name).startswith("train")), None)
    if train is None:
        raise DataError(f"data {source.path!r} has no train part, only {', '.join(splits)}")
    held_out = next((n for n in splits if str(n).split("_")[0] in ("test", "validation")), None)
    if entry and entry.held_out in splits:
        held_out = entry.held_out
    found = {"train": splits[train]}
    return found | ({"eval": splits[held_out]} if held_out else {})
