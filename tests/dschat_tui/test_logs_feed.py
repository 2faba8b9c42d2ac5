"""The reading thread, replay, lines by number and the answers of PPO, on real files."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dschat_tui.logs.feed import Feed, History, Message, NewRows, News, Problem
from dschat_tui.logs.lines import LogLines
from dschat_tui.logs.replay import Replay
from dschat_tui.logs.rollouts import SORTS, Rollouts
from dschat_tui.logs.source import ONE_LOG, SourceError, find_source
from engine.log import write


def take_until(feed: Feed | Replay, enough: Callable[[list[Message]], bool]) -> list[Message]:
    messages: list[Message] = []
    end = time.monotonic() + 180
    while not enough(messages):
        assert time.monotonic() < end, f"waited in vain, got {messages}"
        messages += feed.take()
        time.sleep(0.01)
    return messages


@pytest.fixture
def started():
    """Start feeds; they are stopped after the test."""
    threads: list[Feed | Replay] = []

    def start(thread: Feed | Replay) -> Feed | Replay:
        threads.append(thread)
        thread.start()
        return thread

    yield start
    for thread in threads:
        thread.stop()
        thread.join(5)
        assert not thread.is_alive()


def metrics(*steps: int) -> str:
    return "".join(write.metrics(s, {"loss": 5.0 - s}) + "\n" for s in steps)


def test_history_comes_at_once_then_what_comes_as_it_comes(tmp_path: Path, started) -> None:
    log, late = tmp_path / "a.log", tmp_path / "late.log"
    log.write_text(metrics(0, 1))
    feed = started(Feed({"sft": log, "reward": late}))
    histories = take_until(feed, lambda got: len(got) == 2)
    by_key = {message.key: message for message in histories if isinstance(message, History)}
    assert by_key["sft"].model.series["loss"].total == 2
    assert by_key["reward"].model.status.lines == 0

    model = by_key["sft"].model
    with log.open("a") as file:
        file.write(metrics(2) + "Metrics => step: 3, lo")
    for message in take_until(feed, bool):
        assert isinstance(message, News)
        model.apply(message.update)
    assert model.status.done == 3
    late.write_text(metrics(0))
    assert [message.key for message in take_until(feed, bool)] == ["reward"]

    log.unlink()
    log.write_text(metrics(0))
    for message in take_until(feed, bool):
        model.apply(message.update)
    assert model.series["loss"].total == 1


def test_a_log_that_cannot_be_read_is_a_message(tmp_path: Path, started) -> None:
    feed = started(Feed({"sft": tmp_path}))
    (message,) = take_until(feed, bool)
    assert isinstance(message, Problem)
    assert str(tmp_path) in message.text


def test_replay_gives_all_of_a_log_in_the_order_of_the_steps(tmp_path: Path, started) -> None:
    first, second = tmp_path / "1.log", tmp_path / "2.log"
    first.write_text(metrics(0, 1))
    second.write_text(metrics(0))
    replay = started(Replay({"sft": first, "reward": second}, speed=1000.0))

    def ended(messages: list[Message]) -> bool:
        lines = sum(len(m.update.marks) for m in messages if isinstance(m, News))
        return lines == 2 and isinstance(messages[-1], News) and messages[-1].key == "reward"

    messages = take_until(replay, ended)
    models = {m.key: m.model for m in messages if isinstance(m, History)}
    order = []
    for message in messages:
        if isinstance(message, News):
            models[message.key].apply(message.update)
            order.append(message.key)
    assert order == sorted(order, reverse=True)
    assert models["sft"].series["loss"].total == 2


def log_lines(path: Path, lines: list[str]) -> LogLines:
    path.write_text("\n".join(lines) + "\n")
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line.encode()) + 1)
    return LogLines(path, offsets[:-1][::64], len(lines))


def test_lines_are_read_by_number_and_found_by_byte(tmp_path: Path) -> None:
    texts = [f"line {number} é" + "x" * (number % 50) for number in range(1000)]
    lines = log_lines(tmp_path / "log", texts)
    for first in (0, 1, 63, 64, 65, 640, 999):
        assert lines.read(first, 5) == texts[first : first + 5]
        offset = len(("\n".join(texts[:first]) + "\n").encode()) if first else 0
        assert lines.number_at(offset) == first
    assert lines.read(1000, 5) == []


def test_a_line_of_ten_megabytes_is_cut_and_the_next_is_whole(tmp_path: Path) -> None:
    lines = log_lines(tmp_path / "log", ["before", "y" * 10_000_000, "after"])
    before, long, after = lines.read(0, 3)
    assert (before, after) == ("before", "after")
    assert 0 < len(long) < 10_000


def test_searching_goes_both_ways_from_where_one_is(tmp_path: Path) -> None:
    texts = ["nothing"] * 10_000
    for number in (5, 4500, 9000):
        texts[number] = "here is the NEEDLE"
    lines = log_lines(tmp_path / "log", texts)
    assert lines.find("needle", 0) == 5
    assert lines.find("needle", 6) == 4500
    assert lines.find("needle", 9001) is None
    assert lines.find("needle", 9000, backwards=True) == 4500
    assert lines.find("needle", 5, backwards=True) is None
    assert lines.find("haystack", 0) is None


def rollout(step: int, reward: float | None, length: int, answer: str) -> str:
    record = {
        "step": step,
        "prompt": f"question {step}",
        "answer": answer,
        "reward": reward,
        "score": 0.0,
        "kl": 0.1 * step,
        "length": length,
        "ended": length < 40,
    }
    return json.dumps(record) + "\n"


@pytest.fixture
def answers(tmp_path: Path, started) -> Rollouts:
    """Four answers and a line that is none."""
    path = tmp_path / "rollouts.jsonl"
    path.write_text(
        rollout(0, 1.0, 40, "Apple")
        + "not json\n"
        + rollout(1, -2.0, 3, "pear")
        + rollout(2, float("nan"), 20, "plum")
        + rollout(3, 5.0, 10, "pineapple")
    )
    (rows,) = take_until(started(Feed({}, path)), bool)
    assert isinstance(rows, NewRows)
    rollouts = Rollouts(path)
    rollouts.extend(rows.rows)
    return rollouts


def test_answers_are_sorted_every_way(answers: Rollouts) -> None:
    def steps(sort: str) -> list[int]:
        return [answers.row(index).step for index in answers.order(sort)]

    assert steps("newest") == [3, 2, 1, 0]
    assert steps("best") == [3, 0, 1, 2]
    assert steps("worst") == [1, 0, 3, 2]
    assert steps("kl") == [3, 2, 1, 0]
    assert steps("longest") == [0, 2, 3, 1]
    assert steps("shortest") == [1, 3, 2, 0]
    assert len(SORTS) == 6


def test_answers_are_found_by_their_text(answers: Rollouts) -> None:
    found = answers.find("APPLE")
    rows = [answers.row(index) for index in answers.order("newest", found)]
    assert [answers.text(row.offset) for row in rows] == [
        ("question 3", "pineapple"),
        ("question 0", "Apple"),
    ]
    assert [row.ended for row in rows] == [True, False]
    assert answers.find("nothing of it") == set()


def test_what_can_be_watched(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = run / "step3-rlhf" / "training.log"
    log.parent.mkdir(parents=True)
    log.write_text("")
    assert list(find_source(run).logs) == ["sft", "reward", "ppo"]
    assert find_source(log.parent).logs == find_source(log).logs == {"ppo": log}
    elsewhere = tmp_path / "old.log"
    elsewhere.write_text("")
    assert list(find_source(elsewhere).logs) == [ONE_LOG]
    with pytest.raises(SourceError, match="does not exist"):
        find_source(tmp_path / "nowhere")
    with pytest.raises(SourceError, match=r"run\.json"):
        find_source(tmp_path)
