"""Loading a source into rows of one form: Hub name, local file or folder, embedded corpus."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

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
from engine.data.rows import Dropped, Reason, UnusableRow, further_columns, normalise
from engine.data.schemas import ROWS_LOOKED_AT, Phase, Schema, find_schema, schema_of

Note = Callable[[str], None]

ROW_FEATURES = Features(
    {
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "chosen": Value("string"),
        "rejected": Value("string"),
        "text": Value("string"),
        "learnt_turns": List(Value("bool")),
        "references": List(Value("string")),
        "preferred_style": Value("string"),
        "kind": Value("string"),
        "phases": List(Value("string")),
        "columns": Value("string"),
    }
)


@dataclass(frozen=True)
class SourceRows:
    """The normalised rows of one source, memory-mapped.

    `dropped` counts rows left out by `rows.REASONS`, `first_dropped` says where the first
    of each is and what it lacks; `fingerprint` changes with the content and the way it is read.
    """

    train: Dataset
    eval: Dataset | None
    schema: Schema
    dropped: dict[Reason, int]
    first_dropped: dict[Reason, str]
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
        parts: dict[str, Iterable[tuple[str, Row]]] = {
            part: ((f"row {i}", row) for i, row in enumerate(facts.rows(part), 1))
            for part in ("train", "eval")
        }
        content: Any = source.path
    elif is_local(source.path):
        files = local_parts(source.path)
        schema = schema_of(source)
        assert schema is not None
        parts = {part: _file_rows(names) for part, names in files.items() if names}
        content = {
            part: [file_fingerprint(file, root) for file in names] for part, names in files.items()
        }
    else:
        splits = _from_hub(source, note)
        schema = find_schema(islice(splits["train"], ROWS_LOOKED_AT), source)
        parts = {
            part: ((f"{part} row {i}", row) for i, row in enumerate(split, 1))
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
        fingerprint=key,
    )


def _file_rows(files: list[Path]) -> Iterator[tuple[str, Row]]:
    for file in files:
        for place, row in read_rows(file):
            yield f"{file}, {place}", row


def _write(
    folder: Path,
    parts: dict[str, Iterable[tuple[str, Row]]],
    schema: Schema,
    source: DataSource,
) -> None:
    dropped = Dropped()

    def normalised(rows: Iterable[tuple[str, Row]]) -> Iterator[Row]:
        for where, row in rows:
            try:
                found = normalise(row, schema, where)
            except UnusableRow as unusable:
                dropped.add(unusable, where)
                continue
            yield {**found, "columns": further_columns(row, schema)}

    for part, rows in parts.items():
        write_rows(folder / f"{part}.arrow", normalised(rows), ROW_FEATURES)
    if not len(open_rows(folder / "train.arrow")):
        raise DataError(no_usable_row(source, schema, dropped))
    found = {"counts": dropped.counts, "first": dropped.first}
    (folder / "dropped.json").write_text(json.dumps(found))


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
