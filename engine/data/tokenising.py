"""Tokenise rows into one Arrow file, chunk by chunk, in as many processes as are worth starting.

`python -m engine.data.tokenising` is such a process: it reads a job from standard input.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, dynamic_module_utils

from engine.config.schema import RunConfig
from engine.data.cache import open_rows, write_rows
from engine.data.encoding import FEATURES, Use, encode_row
from engine.data.files import DataError, Row
from engine.data.sources import Note

ROWS_OF_A_CHUNK = 2048
ROWS_FOR_A_PROCESS = 10_000  # Fewer rows take less time than starting a process.
_MOST_PROCESSES = 64  # Each takes some 200 MB besides the files that it maps.
_SECONDS_BETWEEN_LOOKS = 0.5


@dataclass(frozen=True)
class Part:
    """Rows of one file of normalised rows, in this order."""

    rows: Dataset
    indices: np.ndarray


@dataclass(frozen=True)
class Encoding:
    """How rows become tokens."""

    use: Use
    config: RunConfig
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class _Chunk:
    """Rows that go into one file: where they are, and the number of the first among all rows."""

    file: Path
    first: int
    pieces: list[tuple[str, np.ndarray]]

    @property
    def tally_file(self) -> Path:
        return self.file.with_suffix(".json")


def tokenise(
    parts: list[Part], encoding: Encoding, target: Path, work: Path, note: Note
) -> Counter[str]:
    """Write the tokenised rows of all parts, in order, into an Arrow file.

    Args:
        parts: the rows.
        encoding: how they become tokens.
        target: file to write.
        work: folder for finished chunks; those that an interrupted attempt with the same parts
            and encoding left there are used.
        note: gets lines like "tokenising 34 %".

    Returns:
        the tally of `encode_row`, and `rows` that were written.

    Raises:
        DataError: a row cannot be used.
        OSError: the files cannot be written.
        RuntimeError: a process ended without saying why.
    """
    work.mkdir(exist_ok=True)
    chunks = list(_chunks(parts, work, target.stem))
    missing = [chunk for chunk in chunks if not chunk.file.exists()]
    rows = sum(len(indices) for chunk in missing for _, indices in chunk.pieces)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    count = min(cores or 1, _MOST_PROCESSES, rows // ROWS_FOR_A_PROCESS)
    progress = _progress(work, target.stem, len(chunks), note)
    if count > 1:
        _tokenise_in_processes(missing, encoding, count, progress)
    else:
        for chunk in missing:
            progress()
            _tokenise_chunk(chunk, encoding)
    tally: Counter[str] = Counter()
    schema = FEATURES[encoding.use].arrow_schema
    with pyarrow.OSFile(str(target), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as writer:
        for chunk in chunks:
            tally.update(json.loads(chunk.tally_file.read_text()))
            with pyarrow.memory_map(str(chunk.file)) as source:
                for batch in pyarrow.ipc.open_stream(source):
                    writer.write_batch(batch)
    return tally


def _chunks(parts: list[Part], work: Path, name: str) -> Iterator[_Chunk]:
    starts = np.cumsum([0, *(len(part.indices) for part in parts)])
    for first in range(0, int(starts[-1]), ROWS_OF_A_CHUNK):
        pieces = []
        for part, start in zip(parts, starts, strict=False):
            indices = part.indices[max(0, first - start) : max(0, first + ROWS_OF_A_CHUNK - start)]
            if len(indices):
                pieces.append((part.rows.cache_files[0]["filename"], indices))
        yield _Chunk(work / f"{name}-{first}.arrow", first, pieces)


def _progress(work: Path, name: str, total: int, note: Note) -> Callable[[], None]:
    """Reports how many chunks are done, in steps of 5 %."""
    next_percent = 0

    def say() -> None:
        nonlocal next_percent
        percent = 100 * sum(1 for _ in work.glob(f"{name}-*.arrow")) // total
        if percent >= next_percent:
            note(f"tokenising {percent} %")
            next_percent = percent + 5

    return say


def _tokenise_chunk(chunk: _Chunk, encoding: Encoding) -> None:
    """Write a chunk's rows and tally; the rows appear last, and whole."""
    tally: Counter[str] = Counter()

    def encoded() -> Iterator[Row]:
        for number, row in enumerate(_rows(chunk), chunk.first):
            for found in encode_row(row, encoding.use, encoding.config, encoding.tokenizer, tally):
                tally["rows"] += 1
                yield {**found, "row": number} if encoding.use == "ppo" else found

    temporary = chunk.file.with_suffix(f".{os.getpid()}")
    write_rows(temporary, encoded(), FEATURES[encoding.use])
    chunk.tally_file.write_text(json.dumps(tally))
    temporary.rename(chunk.file)


def _rows(chunk: _Chunk) -> Iterator[Row]:
    for file, indices in chunk.pieces:
        # Reading rows one by one would take as long as tokenising them.
        yield from _opened(file)[indices].to_pylist()


@functools.lru_cache(maxsize=8)
def _opened(file: str) -> Dataset:
    return open_rows(Path(file)).with_format("arrow")


def _tokenise_in_processes(
    chunks: list[_Chunk], encoding: Encoding, count: int, progress: Callable[[], None]
) -> None:
    # Separate programs: a fork would copy the state of torch's threads, and multiprocessing's
    # other start methods run the main script again.
    folder = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"}
    environment["HF_MODULES_CACHE"] = dynamic_module_utils.HF_MODULES_CACHE
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            with tempfile.TemporaryFile() as job:
                pickle.dump((os.getpid(), encoding, chunks[number::count]), job)
                job.seek(0)
                command = [sys.executable, "-m", "engine.data.tokenising"]
                processes.append(
                    subprocess.Popen(command, stdin=job, stdout=subprocess.PIPE, env=environment)
                )
        running = list(processes)
        while running:
            progress()
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            for process in [process for process in running if process.poll() is not None]:
                _raise_failure(process)
                running.remove(process)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _raise_failure(process: subprocess.Popen[bytes]) -> None:
    """Raise the error of a process that failed."""
    assert process.stdout is not None
    error = process.stdout.read()
    if error:
        raise pickle.loads(error)
    if process.returncode:
        raise RuntimeError(
            f"a process that tokenises ended with code {process.returncode}; look above for its "
            "error (-9 without one: the host ran out of memory); what is done is kept, start again"
        )


def _work(job: BinaryIO, outcome: BinaryIO) -> None:
    """Tokenise the chunks of a job; write an error that comes with advice to `outcome`."""
    # Custom tokenizer code is imported from a folder that this puts on the path.
    dynamic_module_utils.init_hf_modules()
    parent, encoding, chunks = pickle.load(job)
    try:
        for chunk in chunks:
            if os.getppid() != parent:
                return
            _tokenise_chunk(chunk, encoding)
    except (DataError, OSError) as error:
        pickle.dump(error, outcome)


if __name__ == "__main__":
    # What libraries print goes to the log; the pipe carries only the outcome.
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)
        from engine.data import tokenising

        tokenising._work(sys.stdin.buffer, pipe)
