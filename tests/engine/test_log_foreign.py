"""What is not ours in training.log: events, how a log ends, and lines that are not clean."""

from __future__ import annotations

import pytest
from log_lines import (
    COMMAND,
    DASHES,
    LOSSES,
    OPTIMIZER,
    SPEED,
    STAMP,
    exits,
    failure,
    kinds,
    launched,
    read,
    read_bytes,
)

from engine.log import write

# events


def test_overflow_is_counted_once_for_all_ranks() -> None:
    head = "[deepspeed] OVERFLOW! Rank {} Skipping step. Attempted loss scale: "
    stamped = f"{STAMP} [loss_scaler.py:190:update_scale] "
    document = read(
        head.format(0) + "65536, but hysteresis is 2. Reducing hysteresis to 1",
        head.format(1) + "65536, but hysteresis is 2. Reducing hysteresis to 1",
        stamped + head.format(0) + "65536, reducing to 32768",
        head.format(10) + "32768, reducing to 16384" + head.format(0) + "32768, reducing to 16384",
        head.format(0) + "1, reducing to 1",
        head.format(1) + "1, reducing to 1",
    )
    assert document["events"]["overflow"] == 4
    assert document["events"]["loss_scale_floor"] == 1


@pytest.mark.parametrize("announced", [True, False])
def test_overflow_with_zero_0(announced: bool) -> None:
    lines: list[str] = []
    for iteration, scale in ((3, "2.0 to 1.0"), (4, "1.0 to 1.0"), (5, "1.0 to 1.0")):
        for _ in range(2):
            lines += ["", f"Grad overflow on iteration {iteration}"]
            lines += [f"{STAMP} [fused_optimizer.py:393] Reducing dynamic loss scale from {scale}"]
        if announced:
            lines += [
                f"{STAMP} [logging.py:96:log_dist] [Rank 0] Overflow detected. Skipping step..."
            ]
    document = read(*lines)
    assert document["events"]["overflow"] == 3
    assert document["events"]["loss_scale_floor"] == 2


def test_other_events() -> None:
    document = read(
        write.skipped_both(actor=True, critic=False),
        write.skipped_both(actor=True, critic=True),
        "Dropping too short generated answer: step=3: ",
        "answers: ['Average reward score: 9.0 | EMA reward score: 9.0']",
    )
    assert document["events"] == {
        "overflow": 0,
        "loss_scale_floor": 0,
        "skipped_both": 2,
        "dropped_answers": 1,
    }
    assert document["records"] == []


# how a log ends


def test_ok_only_when_every_launched_process_exited() -> None:
    whole = read(*launched(2), *exits(41, 42))
    assert (whole["state"], whole["returncode"], whole["cause"]) == ("ok", 0, None)
    assert read(*launched(2), *exits(41))["state"] == "unknown"
    assert read(*launched(2))["state"] == "unknown"
    assert read("")["state"] == "unknown"
    torn = "".join(exits(41, 42))
    assert read(*launched(2), torn)["state"] == "ok"


def test_spawned_processes_count_where_the_launcher_tells_them() -> None:
    spawned = [
        f"{STAMP} [launch.py:256:main] process {p} spawned with command: ['x']" for p in "12"
    ]
    assert read(COMMAND, *spawned, *exits(1))["state"] == "unknown"
    assert read(COMMAND, *spawned, *exits(1, 2))["state"] == "ok"


def test_processes_of_several_hosts_in_one_log() -> None:
    def host(name: str, rank: int) -> list[str]:
        info = "{'node-a': [0, 1], 'node-b': [0, 1]}"
        lines = [
            f"WORLD INFO DICT: {info}",
            f"nnodes=2, num_local_procs=2, node_rank={rank}",
            "dist_world_size=4",
        ]
        return [f"{name}: {STAMP} [launch.py:145:main] {line}" for line in lines]

    # the hosts' names are known from the first line that is not prefixed
    begin = [COMMAND, f"{STAMP} [runner.py:1:main] x", *launched(0)[1:2], *host("node-a", 0)]
    begin[2] = f"{STAMP} [launch.py:145:main] WORLD INFO DICT: {{'node-a': [0], 'node-b': [0]}}"
    lines = [*begin, *host("node-b", 1), "node-a: " + LOSSES.format(step=5)]
    ended = [f"node-{x}: {line}" for x in "ab" for line in exits(1, 2)]
    assert read(*lines, *ended)["state"] == "ok"
    assert read(*lines, *ended[:3])["state"] == "unknown"
    assert read(*lines)["records"][0]["step"] == 5


def test_lines_of_hosts_are_read_from_the_first_on() -> None:
    told = f"{STAMP} [multinode_runner.py:86:get_cmd] Running on the following workers: "
    lines = [told + "me@node-a.example,node-b", *launched(0)[:1]]
    lines += [f"node-a: Metrics => step: {step}, loss: 0.5" for step in range(2)]
    lines += ["node-b: a text", "node-c: Metrics => step: 9, loss: 0.5"]
    assert [record["step"] for record in read(*lines)["records"]] == [0, 1]


def test_failed_by_return_code_or_killing() -> None:
    document = read(*launched(2), *exits(40), *failure(3))
    assert (document["state"], document["returncode"]) == ("failed", 3)
    killed = read(*launched(2), failure(1)[0])
    assert (killed["state"], killed["returncode"]) == ("failed", None)


def test_a_resumed_step_is_judged_by_its_last_launch() -> None:
    first = [*launched(2), "ValueError: the first time", *failure(1)]
    document = read(*first, LOSSES.format(step=1), *launched(2), *exits(5, 6))
    assert (document["state"], document["cause"]) == ("ok", None)
    assert read(*first, *launched(2), *exits(5))["state"] == "unknown"


def test_cut_anywhere_a_log_never_claims_success_or_invents_records() -> None:
    lines = [
        *launched(2),
        "***** Evaluating perplexity, Epoch 0/1 *****",
        "ppl: 2.125, loss: 0.75",
        "Epoch: 0, Step: 3, Rank: 1, loss = 12.5",
        write.throughput(1.4, 0.6, 77.0, 26.0, 16, 512),
        write.metrics(3, {"kl": 12.5}),
        *exits(41, 42),
    ]
    content = "\n".join(lines).encode()
    whole = read_bytes(content)
    assert whole["state"] == "ok"
    assert kinds(whole) == ["eval", "loss", "throughput", "metrics"]
    for end in range(len(content)):
        cut = read_bytes(content[:end])
        assert cut["state"] == "unknown"
        assert cut["records"] == whole["records"][: len(cut["records"])]


# lines that are not clean


def test_progress_bars_escapes_and_carriage_returns() -> None:
    loss = "Epoch: 0, Step: {}, Rank: 0, loss = 0.5"
    document = read(
        "\rMap:  34%|███▍      | 34/100 [00:10<00:20,  3.3it/s]" + loss.format(1),
        "  3%|▎   | 3/100 [00:01<00:30]\r  4%|▍   | 4/100 [00:02<00:30]\r" + loss.format(2),
        "\x1b[32m" + loss.format(3) + "\x1b[0m",
        "\x1b]0;title\x07" + loss.format(4) + "\r",
        loss.format(5) + "   ",
        "\ufffd\x00" + loss.format(6) + "\x1b[1",
    )
    assert [record["step"] for record in document["records"]] == [1, 2, 3, 4, 5]


def test_lines_of_several_ranks_torn_into_one() -> None:
    loss = "Epoch: 0, Step: 3, Rank: {}, loss = {}"
    document = read(
        loss.format(0, 1.5) + loss.format(1, 2.5) + loss.format(2, 3.5),
        "",
        OPTIMIZER.format(step=10, skipped=0, rate="1e-05") + LOSSES.format(step=4),
        "".join(SPEED),
        "average reward score: 1.0" + DASHES,
        loss.format(0, "1.")[:30] + loss.format(1, 9.5),
    )
    losses = [(r["rank"], r["loss"]) for r in document["records"] if r["kind"] == "loss"]
    assert losses == [(0, 1.5), (1, 2.5), (2, 3.5), (1, 9.5)]
    (ppo,) = [record for record in document["records"] if record["kind"] == "ppo"]
    assert (ppo["step"], ppo["reward"], ppo["train_tflops"]) == (4, 1.0, 115.09)
    assert [r["step"] for r in document["records"] if r["kind"] == "optimizer"] == [10]


def test_text_that_looks_like_metrics() -> None:
    block = [LOSSES.format(step=0), *SPEED, "Average reward score: 1.0 | EMA reward score: 1.0"]
    lies = [LOSSES.format(step=99), "ppl: 1.0, loss: 0.1", "Epoch: 0, Step: 1, Rank: 0, loss = 9"]
    document = read(
        "***** Evaluating perplexity, Epoch 1/1 *****",
        "ppl: 2.0, loss: 0.7",
        *block,
        DASHES,
        write.prompts_printed(0, 0, lies),
        write.answers_printed(0, 0, ["\n".join(lies)]),
        *[f"Human: {lie}" for lie in lies],
        *[f"{lie} as I was saying" for lie in lies],
        "ppl: 1.0, loss: 0.1",  # no header before it
        "chosen: 1.0, rejected: 0.5, loss: 0.1",
        "Average reward score: 9.0 | EMA reward score: 9.0",  # no step before it
        write.note(LOSSES.format(step=99) + "Metrics => step: 1, kl: 2.0"),
    )
    assert kinds(document) == ["eval", "ppo", "note"]
    assert document["records"][1]["reward"] == 1.0


def test_only_whole_words_choose_how_a_line_is_read() -> None:
    """Lines that begin like one of ours, or of DeepSpeed's, are neither."""
    loss = "Epoch: 0, Step: 3, Rank: 0, loss = 0.5"
    document = read(
        "--- processed ---\r" + loss,
        "OVERFLOWED: actor overflow, skipping both actor and critic steps",
        "--- prompt --> step=1, rank=0, []\r" + loss,
    )
    assert kinds(document) == ["loss"]
    assert document["events"]["skipped_both"] == 0
