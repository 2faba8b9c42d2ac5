"""The user's cache of prepared data: keyed by content, built once, renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import platformdirs
import pyarrow
from datasets import Dataset, Features

from engine.data.files import DataError

ROWS_A_BATCH = 512


def cache_root(cache_dir: str | None) -> Path:
    """The folder for prepared data, made with mode 0700: `cache_dir`, or the user's own.

    Raises:
        DataError: it cannot be made.
    """
    root = Path(cache_dir).expanduser() if cache_dir else platformdirs.user_cache_path("dschat")
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not cache_dir:
            root.chmod(0o700)
    except OSError as error:
        raise DataError(
            f"cannot make the cache folder {root}: {error}; set data.cache_dir to a folder of yours"
        ) from error
    return root


def fingerprint(*parts: Any) -> str:
    """A short hash of JSON-able values, the same in every process."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def file_fingerprint(file: Path) -> str:
    """A hash of a file's content."""
    digest = hashlib.blake2b(digest_size=12)
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def code_fingerprint() -> str:
    """A hash of this package's own source: another version of it prepares data afresh."""
    return fingerprint([file_fingerprint(f) for f in sorted(Path(__file__).parent.glob("*.py"))])


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, built by `build(temporary folder)` unless it is there. Safe between processes.

    Raises:
        DataError: the cache cannot be written.
    """
    if folder.is_dir():
        return folder
    try:
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        raise DataError(
            f"cannot write into the cache {folder.parent}: {error}; set data.cache_dir"
        ) from error
    try:
        build(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            # Another process was faster; what it built has the same content.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def write_rows(file: Path, rows: Iterable[dict[str, Any]], features: Features) -> None:
    """Write rows as an Arrow stream, a few hundred in memory at a time."""
    schema = features.arrow_schema
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        batch: list[dict[str, Any]] = []
        for row in rows:
            batch.append(row)
            if len(batch) == ROWS_A_BATCH:
                writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))
                batch = []
        if batch:
            writer.write_batch(pyarrow.RecordBatch.from_pylist(batch, schema))


def open_rows(file: Path) -> Dataset:
    """The rows of a file of `write_rows`, memory-mapped."""
    return Dataset.from_file(str(file))
