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
from engine.data import facts
from engine.data.cache import (
    build_once,
    cache_root,
    code_fingerprint,
    file_fingerprint,
    fingerprint,
    open_rows,
    write_rows,
)
from engine.data.schemas import (
    ROWS_LOOKED_AT,
    DataError,
    Phase,
    Row,
    Schema,
    UnusableRow,
    find_schema,
    is_local,
    local_parts,
    normalise,
    read_rows,
    schema_of,
)

Note = Callable[[str], None]

ROW_FEATURES = Features(
    {
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "chosen": Value("string"),
        "rejected": Value("string"),
        "text": Value("string"),
        "all_answers": Value("bool"),
        "references": List(Value("string")),
        "preferred_style": Value("string"),
        "kind": Value("string"),
        "phases": List(Value("string")),
    }
)


@dataclass(frozen=True)
class SourceRows:
    """The normalised rows of one source, memory-mapped.

    `phases` are those that its schema can serve; `dropped` counts rows left out as `empty` or
    `unusable`; `fingerprint` changes with the content and the way it is read.
    """

    train: Dataset
    eval: Dataset | None
    phases: frozenset[Phase]
    is_text: bool
    dropped: dict[str, int]
    fingerprint: str


def load_source(
    source: DataSource, cache_dir: str | None = None, note: Note = lambda _: None
) -> SourceRows:
    """Normalise a source once into the cache and open it.

    Raises:
        DataError: missing, unreadable, no schema fits, or not on the Hub.
    """
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
        content = {part: [file_fingerprint(f) for f in names] for part, names in files.items()}
    else:
        splits = _from_hub(source, note)
        schema = find_schema(islice(splits["train"], ROWS_LOOKED_AT), source)
        parts = {
            part: ((f"{part} row {i}", row) for i, row in enumerate(split, 1))
            for part, split in splits.items()
        }
        content = [source.path, source.subset, *(s._fingerprint for s in splits.values())]

    key = fingerprint(code_fingerprint(), content, source.columns)

    def build(folder: Path) -> None:
        note(f"reading {source.path}")
        _write(folder, parts, schema, source)

    folder = build_once(cache_root(cache_dir) / f"rows-{key}", build)
    has_eval = (folder / "eval.arrow").exists()
    return SourceRows(
        train=open_rows(folder / "train.arrow"),
        eval=open_rows(folder / "eval.arrow") if has_eval else None,
        phases=schema.phases,
        is_text=bool(schema.text),
        dropped=json.loads((folder / "dropped.json").read_text()),
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
    dropped = {"empty": 0, "unusable": 0}

    def normalised(rows: Iterable[tuple[str, Row]]) -> Iterator[Row]:
        for where, row in rows:
            try:
                yield normalise(row, schema, where)
            except UnusableRow as unusable:
                dropped[unusable.reason] += 1

    for part, rows in parts.items():
        write_rows(folder / f"{part}.arrow", normalised(rows), ROW_FEATURES)
    if not len(open_rows(folder / "train.arrow")):
        raise DataError(
            f"data {source.path!r}: no usable row ({schema.describe()}); {dropped['empty']} "
            f"without an answer, {dropped['unusable']} that are no dialogue of question and answer"
        )
    (folder / "dropped.json").write_text(json.dumps(dropped))


def _from_hub(source: DataSource, note: Note) -> dict[str, Dataset]:
    from datasets import load_dataset, load_dataset_builder

    try:
        size = load_dataset_builder(source.path, source.subset).info.download_size
        megabytes = f"{size / 1e6:.0f} MB" if size else "size unknown"
        note(f"data set {source.path} from the Hub ({megabytes}; kept in the Hub's cache)")
        splits = load_dataset(source.path, source.subset)
    except Exception as error:  # the library raises a dozen kinds; all mean the same to a person
        raise DataError(
            f"data {source.path!r}: nothing of this name on this machine, and it could not be "
            f"loaded from the Hub ({type(error).__name__}: {str(error).splitlines()[0][:200]}); "
            "check the name, the subset and the network, or give a local path"
        ) from error
    train = next((name for name in splits if str(name).startswith("train")), None)
    if train is None:
        raise DataError(f"data {source.path!r} has no train part, only {', '.join(splits)}")
    held_out = next((n for n in splits if str(n).split("_")[0] in ("test", "validation")), None)
    found = {"train": splits[train]}
    return found | ({"eval": splits[held_out]} if held_out else {})
