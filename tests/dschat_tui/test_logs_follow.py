"""Following a file that grows, is cut, replaced, or not there yet."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dschat_tui.logs.follow import BLOCK_BYTES, LONGEST_LINE_BYTES, Batch, Follower


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "training.log"


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def read_all(follower: Follower) -> Batch:
    """Everything that is there now, as one batch."""
    lines, offsets, restarted = [], [], False
    while True:
        batch = follower.read()
        lines += batch.lines
        offsets += batch.offsets
        restarted |= batch.restarted
        if not batch.more:
            return Batch(lines, offsets, restarted)


def test_waits_for_a_file_then_gives_each_line_once_whole(path: Path) -> None:
    follower = Follower(path)
    assert follower.read() == Batch()
    append(path, b"one\ntw")
    assert follower.read() == Batch(["one"], [0])
    assert follower.unfinished == "tw"
    assert follower.read() == Batch()
    append(path, b"o\n\nthree\n")
    assert follower.read() == Batch(["two", "", "three"], [4, 8, 9])
    assert follower.unfinished == ""


def test_truncated_file_is_a_new_log(path: Path) -> None:
    append(path, b"old 1\nold 2\nold")
    follower = Follower(path)
    follower.read()
    path.write_bytes(b"new\n")
    assert follower.read() == Batch(["new"], [0], restarted=True)
    append(path, b"more\n")
    assert follower.read() == Batch(["more"], [4])


def test_truncated_file_that_outgrew_the_old_one_is_a_new_log(path: Path) -> None:
    append(path, b"old 1\nold 2\n")
    follower = Follower(path)
    follower.read()
    path.write_bytes(b"new 1\nnew 2\nnew 3\n")
    assert follower.read() == Batch(["new 1", "new 2", "new 3"], [0, 6, 12], restarted=True)


def test_replaced_file_is_a_new_log(path: Path) -> None:
    append(path, b"a\nb\n")
    follower = Follower(path)
    follower.read()
    other = path.with_name("other")
    append(other, b"a\nb\nc\n")
    other.replace(path)
    assert follower.read() == Batch(["a", "b", "c"], [0, 2, 4], restarted=True)


def test_deleted_file_is_waited_for(path: Path) -> None:
    append(path, b"a\n")
    follower = Follower(path)
    follower.read()
    path.unlink()
    assert follower.read() == Batch()
    append(path, b"b\n")
    assert read_all(follower).lines == ["b"]


def test_unreadable_path_is_an_error(path: Path) -> None:
    path.mkdir()
    with pytest.raises(IsADirectoryError):
        Follower(path).read()


def test_lines_across_blocks(path: Path) -> None:
    lines = [f"line {i} " + "é" * (i % 90) for i in range(20_000)]
    content = "".join(line + "\n" for line in lines).encode()
    assert len(content) > 4 * BLOCK_BYTES
    append(path, content)
    batch = read_all(Follower(path))
    assert batch.lines == lines
    for line, offset in list(zip(batch.lines, batch.offsets, strict=True))[::97]:
        assert content[offset:].startswith(line.encode() + b"\n")


def test_endless_line_stays_bounded_and_offsets_stay_right(path: Path) -> None:
    content = b"a\n" + b"x" * (3 * LONGEST_LINE_BYTES) + b"\nb\nc\n"
    append(path, content)
    follower = Follower(path)
    lines, offsets = [], []
    while True:
        batch = follower.read()
        lines += batch.lines
        offsets += batch.offsets
        assert len(follower.unfinished) <= LONGEST_LINE_BYTES
        if not batch.more:
            break
    assert [lines[0], lines[2], lines[3]] == ["a", "b", "c"]
    assert len(lines[1]) <= LONGEST_LINE_BYTES + BLOCK_BYTES
    assert offsets == [0, 2, len(content) - 4, len(content) - 2]


def test_closing_releases_the_file(path: Path) -> None:
    append(path, b"a\n")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    follower = Follower(path)
    follower.read()
    follower.close()
    follower.close()
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before
    assert follower.read().lines == ["a"]


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=30), max_size=12))
def test_any_bytes_in_any_portions(portions: list[bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.touch()
        follower = Follower(path)
        lines: list[str] = []
        offsets: list[int] = []
        for portion in portions:
            append(path, portion)
            batch = follower.read()
            assert not batch.restarted
            lines += batch.lines
            offsets += batch.offsets
        follower.close()
    content = b"".join(portions)
    raw = content.split(b"\n")[:-1]
    assert lines == [line.decode("utf-8", "replace") for line in raw]
    starts = [sum(len(line) + 1 for line in raw[:i]) for i in range(len(raw))]
    assert offsets == starts
