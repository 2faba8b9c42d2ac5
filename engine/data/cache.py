"""The user's cache of prepared data: keyed by content, built once, renamed into place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs
import pyarrow
from datasets import Dataset, Features

from engine.data.files import DataError, Row

ROWS_A_BATCH = 512
_SAMPLES = 8
_SAMPLE_BYTES = 1 << 16
_SECONDS_UNTIL_SETTLED = 2.0
_SECONDS_PARTS_ARE_KEPT = 7 * 24 * 3600


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


def fingerprint(*parts: object) -> str:
    """A short hash of JSON-able values, the same in every process."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def file_fingerprint(file: Path, root: Path) -> str:
    """A hash of a file's content; the cache at `root` remembers it until the file changes."""
    before = file.stat()
    # The time of the last change (ctime) cannot be set back; the samples help where a file system
    # keeps times coarsely.
    seen = [before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino, before.st_dev]
    known = root / f"file-{fingerprint(str(file.resolve()), seen, _samples(file, before.st_size))}"
    try:
        return known.read_text()
    except FileNotFoundError:
        found = content_hash(file)
    # A file written a moment ago may be written again within one tick of the file system's clock.
    settled = time.time() - max(before.st_mtime, before.st_ctime) > _SECONDS_UNTIL_SETTLED
    if settled and file.stat().st_mtime_ns == before.st_mtime_ns:
        # If the cache cannot be written to, the file is hashed again the next time.
        with suppress(OSError):
            temporary = known.with_name(f".{known.name}.{os.getpid()}")
            temporary.write_text(found)
            temporary.rename(known)
    return found


def _samples(file: Path, size: int) -> str:
    """A hash of some blocks of a file, its first and its last among them."""
    digest = hashlib.blake2b(digest_size=12)
    with open(file, "rb") as stream:
        for part in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * part // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def content_hash(file: Path) -> str:
    """A hash of a file's content, read whole."""
    digest = hashlib.blake2b(digest_size=12)
    with open(file, "rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def code_fingerprint() -> str:
    """A hash of this package's own source: a new version prepares the data again."""
    return fingerprint([content_hash(f) for f in sorted(Path(__file__).parent.glob("*.py"))])


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
        os.rename(temporary, folder)
    except OSError:
        # Another process was faster, and may have removed what this one was reading; what it
        # built has the same content.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


@contextmanager
def work_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, for parts of it that a later attempt can use if this one is killed.

    It is kept when the process is killed, or ends with anything but a `DataError`. Those that
    nobody came back to for a week are removed.
    """
    work = folder.with_name(f".{folder.name}.parts")
    for old in folder.parent.glob(".*.parts"):
        with suppress(OSError):
            if old != work and time.time() - old.stat().st_mtime > _SECONDS_PARTS_ARE_KEPT:
                shutil.rmtree(old)
    try:
        yield work
    except DataError:
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)


def write_rows(file: Path, rows: Iterable[Row], features: Features) -> None:
    """Write rows as an Arrow stream, a few hundred in memory at a time."""
    schema = features.arrow_schema
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        batch: list[Row] = []
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
