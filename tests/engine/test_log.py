"""training.log: every family and trap that its reader must take, and the round trip of our own."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from log_entries import ppo_step

from engine.log import documents, write
from engine.log.entries import (
    DPOEvaluation,
    PairStep,
    PerplexityEvaluation,
    RewardEvaluation,
    SFTStep,
    TrainingSpeed,
)
from engine.log.read import LogReader

STAMP = "[2023-08-20 10:00:00,123] [INFO]"
COMMAND = f"{STAMP} [runner.py:555:main] cmd = /usr/bin/python3 -u -m deepspeed.launcher.launch"
DASHES = "-" * 85
TIMER = (
    "|E2E latency={e2e}s |Gather latency=0.25s (0.00%) |Generate time=1.37s (45.04%) "
    "|Training time=1.44s (47.33%) |Others=0.23 (7.63%)"
)
RATES = "|CurSamplesPerSec=5.27 |AvgSamplesPerSec=5.19"
LOSSES = (
    "Epoch: 0 | Step: {step} | PPO Epoch: 1 | Actor Loss: -0.25 | Critic Loss: 0.5 | "
    "Unsupervised Loss: 0.0"
)
SPEED = [
    "End-to-End => Latency: 3.81s, TFLOPs: 28.43, Samples/sec: 4.20, Time/seq 0.24s, "
    "Batch Size: 16, Total Seq. Length: 512",
    "Generation => Latency: 3.06s, Per-token Latency 11.94 ms, TFLOPs: 7.16, BW: 239.38 GB/sec, "
    "Answer Seq. Length: 256",
    "Training   => Latency: 0.75s, TFLOPs: 115.09",
    "Actor Model Parameters => 1.429 B, Critic Model Parameters => 0.331 B",
]
OPTIMIZER = (
    STAMP + " [logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, "
    "lr=[{rate}, {rate}], mom=[(0.9, 0.95), (0.9, 0.95)]"
)


def read(*lines: str) -> dict[str, Any]:
    """The document of a log of these lines."""
    return read_bytes("".join(line + "\n" for line in lines).encode())


def read_bytes(content: bytes) -> dict[str, Any]:
    reader = LogReader()
    records: list[dict[str, Any]] = []
    *lines, rest = content.decode("utf-8", "replace").split("\n")
    for line in lines:
        records += reader.feed(line)
    records += reader.finish(rest)
    return {
        "step": reader.step,
        "state": reader.state,
        "returncode": reader.returncode,
        "cause": reader.cause,
        "records": records,
        "events": reader.events,
    }


def launched(ranks: int) -> list[str]:
    devices = list(range(ranks))
    return [
        COMMAND,
        f"{STAMP} [launch.py:145:main] WORLD INFO DICT: {{'localhost': {devices}}}",
        f"{STAMP} [launch.py:151:main] nnodes=1, num_local_procs={ranks}, node_rank=0",
        f"{STAMP} [launch.py:163:main] dist_world_size={ranks}",
    ]


def exits(*pids: int) -> list[str]:
    return [f"{STAMP} [launch.py:347:main] Process {pid} exits successfully." for pid in pids]


def failure(code: int) -> list[str]:
    command = "['/usr/bin/python3', '-u', 'main.py', '--local_rank=1']"
    return [
        f"{STAMP} [launch.py:315:sigkill_handler] Killing subprocess 41",
        f"[2023-08-20 10:00:00,123] [ERROR] [launch.py:321:sigkill_handler] {command} "
        f"exits with return code = {code}",
    ]


def kinds(document: dict[str, Any]) -> list[str]:
    return [record["kind"] for record in document["records"]]


# families


def test_ppo_of_april_2023() -> None:
    document = read(
        "epoch: 0|step: 3|ppo_ep: 1|act_loss: 0.25|cri_loss: 1e-08|unsuper_loss: 0.0",
        "average reward score: -1.5",
        DASHES,
        TIMER.format(e2e="3.03") + RATES,
    )
    assert document["step"] == "ppo"
    assert document["records"] == [
        {
            "kind": "ppo",
            "epoch": 0,
            "step": 3,
            "ppo_epoch": 1,
            "actor_loss": 0.25,
            "critic_loss": 1e-08,
            "unsupervised_loss": 0.0,
            "reward": -1.5,
            "reward_ema": None,
            "e2e_s": 3.03,
            "generate_s": 1.37,
            "train_s": 1.44,
            "tflops": None,
            "gather_s": 0.25,
            "others_s": 0.23,
            "samples_per_s": 5.27,
            "average_samples_per_s": 5.19,
        }
    ]


def test_ppo_of_august_2023_and_with_ema() -> None:
    document = read(
        "***** Running training (total_iters=1548) *****",
        "Beginning of Epoch 1/1, Total Generation Batches 1548",
        LOSSES.format(step=7),
        *SPEED,
        "average reward score: 2.5",
        DASHES,
        LOSSES.format(step=8),
        *SPEED,
        "Average reward score: 3.0078125 | EMA reward score: 2.972019692554085",
        DASHES,
    )
    august, november = document["records"]
    assert august == {
        "kind": "ppo",
        "epoch": 0,
        "step": 7,
        "ppo_epoch": 1,
        "actor_loss": -0.25,
        "critic_loss": 0.5,
        "unsupervised_loss": 0.0,
        "reward": 2.5,
        "reward_ema": None,
        "e2e_s": 3.81,
        "tflops": 28.43,
        "samples_per_s": 4.20,
        "time_per_sequence_s": 0.24,
        "batch_size": 16,
        "sequence_length": 512,
        "generate_s": 3.06,
        "per_token_ms": 11.94,
        "generate_tflops": 7.16,
        "bandwidth_gb_s": 239.38,
        "answer_length_limit": 256,
        "train_s": 0.75,
        "train_tflops": 115.09,
        "actor_parameters_b": 1.429,
        "critic_parameters_b": 0.331,
    }
    assert november["step"] == 8
    assert november["reward"] == 3.0078125
    assert november["reward_ema"] == 2.972019692554085


def test_what_bf16_and_unknown_models_do_not_print() -> None:
    document = read(
        LOSSES.format(step=0).replace("-0.25", "nan").replace("0.5", "inf"),
        SPEED[1].replace("239.38", "-1.00"),
        SPEED[3].replace("1.429 B", "NA"),
        "Average reward score: -inf | EMA reward score: nan",
        DASHES,
    )
    (record,) = document["records"]
    assert math.isnan(record["actor_loss"])
    assert record["critic_loss"] == math.inf
    assert record["reward"] == -math.inf
    assert math.isnan(record["reward_ema"])
    assert record["bandwidth_gb_s"] is None
    assert record["actor_parameters_b"] is None
    assert record["critic_parameters_b"] == 0.331


def test_hybrid_timer_belongs_to_the_step_before() -> None:
    def block(step: int) -> list[str]:
        return [LOSSES.format(step=step), "average reward score: 1.0", DASHES]

    document = read(
        TIMER.format(e2e="9.99"),  # orphan: the log's beginning is gone
        *block(0),
        TIMER.format(e2e="1.00"),
        TIMER.format(e2e="1.50"),  # a second generation of the same step
        *block(1),
        "some text in between",
        TIMER.format(e2e="2.00"),
        *block(2),
    )
    assert [record["step"] for record in document["records"]] == [0, 1, 2]
    assert [record["e2e_s"] for record in document["records"]] == [1.0, 2.0, None]


def test_hybrid_timer_beside_the_times_of_the_script() -> None:
    document = read(
        LOSSES.format(step=0), *SPEED, "average reward score: 1.0", DASHES, TIMER.format(e2e="3.03")
    )
    (record,) = document["records"]
    assert (record["e2e_s"], record["hybrid_e2e_s"]) == (3.81, 3.03)
    assert (record["generate_s"], record["hybrid_generate_s"]) == (3.06, 1.37)


def test_ppo_record_is_given_with_the_line_after_its_block() -> None:
    reader = LogReader()
    lines = [LOSSES.format(step=0), *SPEED, "average reward score: 1.0", DASHES]
    assert [record for line in lines for record in reader.feed(line)] == []
    given = reader.feed(TIMER.format(e2e="3.03"))
    assert [(record["step"], record["hybrid_e2e_s"]) for record in given] == [(0, 3.03)]
    assert list(reader.finish()) == []


def test_ppo_step_without_end_is_given_as_far_as_it_went() -> None:
    document = read(LOSSES.format(step=0), SPEED[0], LOSSES.format(step=1), SPEED[0][:40])
    assert [(r["step"], r["reward"], r["e2e_s"]) for r in document["records"]] == [
        (0, None, 3.81),
        (1, None, None),
    ]


def test_sft() -> None:
    throughput = (
        "Model Parameters: 1.429 B, Latency: 0.60s, TFLOPs: 77.31, Samples/sec: 26.60, "
        "Time/seq 0.04s, Batch Size: 16, Sequence Length: 512"
    )
    document = read(
        "***** Running training *****",
        "***** Evaluating perplexity, Epoch 0/2 *****",
        "ppl: 4937.25, loss: 8.5",
        "Beginning of Epoch 1/2, Total Micro Batches 100",
        "Epoch: 0, Step: 3, Rank: 0, loss = 2.5",
        "Epoch: 0, Step: 3, Rank: 1, loss = nan",
        throughput,
        throughput.replace("1.429 B", "NA"),
        "***** Evaluating perplexity, Epoch 1/2 *****",
        "ppl: inf",
    )
    assert document["step"] == "sft"
    sizes = {"samples_per_s": 26.6, "batch_size": 16, "sequence_length": 512}
    assert document["records"][0] == {"kind": "eval", "epoch": 0, "ppl": 4937.25, "loss": 8.5}
    assert document["records"][1] == {
        "kind": "loss",
        "epoch": 0,
        "step": 3,
        "rank": 0,
        "loss": 2.5,
    }
    assert document["records"][2]["rank"] == 1
    assert math.isnan(document["records"][2]["loss"])
    assert document["records"][3:5] == [
        {"kind": "throughput", "index": index, "latency_s": 0.6, "tflops": 77.31, **sizes}
        for index in (0, 1)
    ]
    assert document["records"][5] == {"kind": "eval", "epoch": 1, "ppl": math.inf, "loss": None}


def test_reward_model_new_and_old() -> None:
    document = read(
        "***** Evaluating reward, Epoch 0/1 *****",
        "chosen_last_scores (higher is better) : 2.5, acc (higher is better) : 0.5",
        "Beginning of Epoch 1/1, Total Micro Batches 50",
        "Iter 40: c_scores: 1.5, r_scores: -0.5, diff: 2.0, acc: 0.75",
        "Epoch 1/1 with loss 0.6502279072578002",
        "***** Evaluating reward, Epoch 1/1 *****",
        "chosen_last_scores (higher is better) : -0.25, rejected_last_scores (lower is better) : "
        "-0.75, acc (higher is better) : 0.6387499570846558",
    )
    assert document["step"] == "reward"
    assert document["records"] == [
        {"kind": "reward_eval", "epoch": 0, "chosen": 2.5, "rejected": None, "accuracy": 0.5},
        {
            "kind": "reward_eval",
            "epoch": 1,
            "step": 40,
            "chosen": 1.5,
            "rejected": -0.5,
            "accuracy": 0.75,
        },
        {"kind": "loss", "epoch": 1, "step": None, "rank": None, "loss": 0.6502279072578002},
        {
            "kind": "reward_eval",
            "epoch": 1,
            "chosen": -0.25,
            "rejected": -0.75,
            "accuracy": 0.6387499570846558,
        },
    ]


def test_dpo() -> None:
    document = read(
        "***** Evaluating rewards, Epoch 1/1 *****", "chosen: 0.5, rejected: -1.5, loss: 0.25"
    )
    assert document["step"] == "dpo"
    assert document["records"] == [
        {
            "kind": "reward_eval",
            "epoch": 1,
            "chosen": 0.5,
            "rejected": -1.5,
            "loss": 0.25,
            "accuracy": None,
        }
    ]


def test_what_was_not_measured_is_read_back_as_such() -> None:
    for what, line, names in (
        ("perplexity", write.perplexity(None, None), {"ppl", "loss"}),
        ("reward", write.reward_scores(None, None, None), {"chosen", "accuracy"}),
        ("rewards", write.dpo_scores(None, None, None), {"chosen", "rejected", "loss"}),
    ):
        header = write.evaluating(what, 1, 2)
        # also where another rank's line tore into it
        for before in ("", write.step_loss(0, 3, 0, 1.5)):
            document = read(header, before + line)
            (record,) = (r for r in document["records"] if r["kind"] != "loss")
            assert names <= record.keys()
            assert {record[name] for name in names} == {None}
            assert '"nan"' not in documents.to_json(document)
    (record,) = read(write.reward_scores_at(7, None, None, None))["records"]
    assert (record["step"], record["chosen"], record["accuracy"]) == (7, None, None)


def test_optimizer_lines_of_ppo_are_the_actors_then_the_critics() -> None:
    document = read(
        "***** Running training (total_iters=9) *****",
        OPTIMIZER.format(step=0, skipped=0, rate="0"),  # engines start
        OPTIMIZER.format(step=70, skipped=6, rate="6e-06"),
        f"{STAMP} [timer.py:260:stop] epoch=0/micro_step=560/global_step=70, "
        "RunningAvgSamplesPerSec=3.5, CurrSamplesPerSec=nan, MemAllocated=5.92GB, "
        "MaxMemAllocated=42.72GB",
        OPTIMIZER.format(step=70, skipped=4, rate="5e-06"),
        OPTIMIZER.format(step=80, skipped=7, rate="np.float64(4e-06)"),
        OPTIMIZER.format(step=80, skipped=4, rate="3e-06"),
    )
    assert [(r["engine"], r["step"], r["skipped"], r["lr"]) for r in document["records"]] == [
        ("actor", 70, 6, [6e-06, 6e-06]),
        ("critic", 70, 4, [5e-06, 5e-06]),
        ("actor", 80, 7, [4e-06, 4e-06]),
        ("critic", 80, 4, [3e-06, 3e-06]),
    ]
    assert document["records"][0]["samples_per_s"] == 3.5
    assert document["records"][0]["peak_memory_gb"] == 42.72


def test_optimizer_of_the_other_steps_is_the_engine_of_their_configuration() -> None:
    for header, engine in (("perplexity", "actor"), ("reward", "critic"), ("rewards", "actor")):
        line = OPTIMIZER.format(step=10, skipped=0, rate="1e-05")
        document = read(f"***** Evaluating {header}, Epoch 0/1 *****", line, line)
        assert {r["engine"] for r in document["records"]} == {engine}


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


# causes

TRACEBACK = ["Traceback (most recent call last):", '  File "main.py", line 1, in <module>']
OOM = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)"
CAUSES = [
    ("out_of_memory", [*TRACEBACK, OOM]),
    ("out_of_memory", [*TRACEBACK, "RuntimeError: [enforce fail at alloc_cpu.cpp:75] err == 0. "
                       "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"]),
    ("bus_error", ["RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is "
                   "possible that dataloader's workers are out of shared memory."]),
    ("port_in_use", ["RuntimeError: The server socket has failed to listen on any local network "
                     "address. The server socket has failed to bind to [::]:29500 (errno: 98 - "
                     "Address already in use)."]),
    ("build_failed", ["RuntimeError: Error building extension 'fused_adam'"]),
    ("build_failed", ["deepspeed.ops.op_builder.builder.CUDAMismatchException: >- Installed CUDA "
                      "version 12.1 does not match the version torch was compiled with 11.8"]),
    ("build_failed", ["FileNotFoundError: [Errno 2] No such file or directory: "
                      "'/usr/local/cuda/bin/nvcc'"]),
    ("shape_mismatch", ["RuntimeError: The size of tensor a (50272) must match the size of tensor "
                        "b (32000) at non-singleton dimension 2"]),
    ("permission", ["PermissionError: [Errno 13] Permission denied: '/tmp/data_files'"]),
    ("diverged", ["Exception: Current loss scale already at minimum - cannot decrease scale "
                  "anymore. Exiting run."]),
    ("missing_file", ["FileNotFoundError: [Errno 2] No such file or directory: 'data/x.json'"]),
    ("missing_file", ["OSError: Can't load tokenizer for '/models/opt'. If you were trying to load "
                      "it from 'https://huggingface.co/models', make sure you don't have a local "
                      "directory with the same name."]),
    ("missing_program", ["ModuleNotFoundError: No module named 'dschat'"]),
    ("rendezvous_timeout", ["torch.distributed.DistStoreError: Timed out after 1801 seconds "
                            "waiting for clients. 1/2 clients joined."]),
    ("not_supported_on_device", ["NotImplementedError: This op had not been implemented on CPU "
                                 "backend."]),
    ("network", ["OSError: We couldn't connect to 'https://huggingface.co' to load this file, "
                 "couldn't find it in the cached files and it looks like x is not the path to a "
                 "directory containing a file named config.json."]),
    ("unknown", [*TRACEBACK, "KeyError: 'prompt'"]),
]  # fmt: skip


@pytest.mark.parametrize(("id", "lines"), CAUSES)
@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "\x1b[31m"])
def test_cause(id: str, lines: list[str], prefix: str) -> None:
    follow_up = [
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by "
        "peer [127.0.0.1]:24051",
    ]
    document = read(*launched(2), *[prefix + line for line in lines], *follow_up, *failure(1))
    assert document["cause"]["id"] == id
    assert document["cause"]["line"] == lines[-1]
    assert document["cause"]["advice"]


MISMATCH = (
    "\tsize mismatch for model.embed_tokens.weight: copying a param with shape "
    "torch.Size([50272, 512]) from checkpoint, the shape in current model is "
    "torch.Size([32000, 512])."
)
MESSAGES_OF_SEVERAL_LINES = {
    "size mismatch": (
        "shape_mismatch",
        ["RuntimeError: Error(s) in loading state_dict for RewardModel:", MISMATCH],
    ),
    "size mismatch after missing keys": (
        "shape_mismatch",
        [
            "RuntimeError: Error(s) in loading state_dict for OPTForCausalLM:",
            '\tMissing key(s) in state_dict: "lm_head.weight". ',
            MISMATCH,
        ],
    ),
    "size mismatch in the report above": (
        "shape_mismatch",
        [
            "RuntimeError: You set `ignore_mismatched_sizes` to `False`, thus raising an error. "
            "For details look at the above report!"
        ],
    ),
    "message that begins with its second line": (
        "missing_program",
        [
            "ImportError: ",
            "LlamaConverter requires the protobuf library but it was not found in your environment",
        ],
    ),
    "nccl's last error": (
        "bus_error",
        [
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1275, "
            "unhandled system error, NCCL version 2.14.3",
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed.",
            "Last error:",
            "Error while creating shared memory segment /dev/shm/nccl-a (size 9637888)",
        ],
    ),
}


@pytest.mark.parametrize("prefix", ["", "[rank1]: "], ids=["plain", "ranked"])
@pytest.mark.parametrize("name", MESSAGES_OF_SEVERAL_LINES)
def test_cause_in_a_later_line_of_the_message(name: str, prefix: str) -> None:
    id, lines = MESSAGES_OF_SEVERAL_LINES[name]
    document = read(*launched(2), *[prefix + x for x in [*TRACEBACK, *lines]], *failure(1))
    assert document["cause"]["id"] == id
    assert document["cause"]["line"] == lines[-1].strip()


def test_lines_of_two_ranks_in_turns_keep_their_cause() -> None:
    lines = [*TRACEBACK, "RuntimeError: Error(s) in loading state_dict for X:", MISMATCH]
    both = [f"[rank{rank}]: {line}" for line in lines for rank in (0, 1)]
    cause = read(*launched(2), *both, *failure(1))["cause"]
    assert (cause["id"], cause["line"]) == ("shape_mismatch", MISMATCH.strip())
    assert "vocabulary" in cause["advice"]


def test_only_the_message_itself_tells_of_the_exception() -> None:
    """What is printed after it, code in a later traceback included, is no part of it."""
    document = read(
        *launched(2),
        *TRACEBACK,
        "KeyError: 'prompt'",
        "tip: a CUDA out of memory error can be avoided",
        *TRACEBACK,
        "    raise OutOfMemoryError('CUDA out of memory')",
        *failure(1),
    )
    cause = document["cause"]
    assert (cause["id"], cause["line"]) == ("unknown", "KeyError: 'prompt'")


def test_cause_of_weights_that_transformers_refuses(tmp_path: Path) -> None:
    """The library's real words, where config.json asks for another vocabulary than the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=24, num_hidden_layers=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    config.vocab_size = 32
    config.save_pretrained(tmp_path)
    printed = io.StringIO()
    logger, handler = (
        logging.getLogger("transformers.modeling_utils"),
        logging.StreamHandler(printed),
    )
    logger.addHandler(handler)
    try:
        with pytest.raises(RuntimeError) as raised:
            AutoModelForCausalLM.from_pretrained(tmp_path)
    finally:
        logger.removeHandler(handler)
    lines = [*printed.getvalue().split("\n"), *TRACEBACK, f"RuntimeError: {raised.value}"]
    cause = read(*launched(1), *lines, *failure(1))["cause"]
    assert cause["id"] == "shape_mismatch"
    assert "torch.Size([24, 8])" in cause["line"]
    assert "torch.Size([32, 8])" in cause["line"]


@pytest.mark.parametrize(
    ("code", "id"),
    [
        (-9, "killed"),
        (247, "killed"),
        (-7, "bus_error"),
        (249, "bus_error"),
        (127, "missing_program"),
        (1, "unknown"),
    ],
)
def test_cause_by_return_code_alone(code: int, id: str) -> None:
    document = read(*launched(1), *failure(code))
    assert document["cause"]["id"] == id
    assert document["cause"]["line"].endswith(f"exits with return code = {code}")


def test_killed_rank_and_what_the_others_say_of_it() -> None:
    document = read(
        *launched(2),
        *TRACEBACK,
        "RuntimeError: [gloo/transport/tcp/pair.cc:598] Connection reset by peer",
        *failure(-9),
    )
    assert document["cause"]["id"] == "killed"


def test_wrappers_hint_about_memory_is_no_evidence() -> None:
    document = read(
        "---=== Running Step 2 ===---",
        *TRACEBACK,
        "RuntimeError: Step 2 exited with non-zero status 1",
        "",
        "If you are seeing an OOM error, try modifying run_350m.sh:",
        "  - Reduce `--per_device_*_batch_size`",
    )
    assert document["step"] == "reward"
    assert (document["state"], document["returncode"]) == ("failed", 1)
    assert document["cause"]["id"] == "unknown"


def test_shells_tell_of_missing_programs() -> None:
    document = read(
        "run_1.3b.sh: line 20: deepspeed: command not found",
        "RuntimeError: Step 1 exited with non-zero status 127",
    )
    assert document["cause"]["id"] == "missing_program"
    assert document["cause"]["line"] == "run_1.3b.sh: line 20: deepspeed: command not found"


def test_compiler_message_is_the_root_of_a_failed_build() -> None:
    document = read(
        *launched(1),
        "/opt/csrc/adam.cpp:7:10: fatal error: cusolverDn.h: No such file or directory",
        "ninja: build stopped: subcommand failed.",
        "subprocess.CalledProcessError: Command '['ninja', '-v']' returned non-zero exit status 1.",
        "The above exception was the direct cause of the following exception:",
        "RuntimeError: Error building extension 'cpu_adam'",
        *failure(1),
    )
    assert document["cause"]["id"] == "build_failed"
    assert "cusolverDn.h" in document["cause"]["line"]


def test_exceptions_in_boxes_and_torn_lines() -> None:
    boxed = read(*launched(1), "│ ❱ 12 raise ValueError('x')   │", f"│ {OOM} │", *failure(1))
    assert boxed["cause"] == {**boxed["cause"], "id": "out_of_memory", "line": OOM}
    torn = read(*launched(1), "KeyError: 'a'KeyError: 'a'", *failure(1))
    assert torn["cause"]["line"] == "KeyError: 'a'KeyError: 'a'"


def test_error_that_training_survived_is_no_cause() -> None:
    steps = [f"Epoch: 0, Step: {step}, Rank: 0, loss = 1.0" for step in range(50)]
    document = read(*launched(1), *TRACEBACK, OOM, *steps, *failure(-9))
    assert document["cause"]["id"] == "killed"
    assert read(*launched(1), *TRACEBACK, OOM, *steps)["cause"] is None


def test_benign_words_are_no_cause() -> None:
    document = read(
        *launched(1),
        "Unable to find hostfile, will proceed with training with local resources only.",
        "tip: a CUDA out of memory error can be avoided",
        "--- ans    --> step=1, rank=0, ['torch.cuda.OutOfMemoryError: CUDA out of memory']",
        *failure(1),
    )
    assert document["cause"]["id"] == "unknown"


def test_stopped_from_outside() -> None:
    document = read(
        *launched(1),
        failure(1)[0],
        f"{STAMP} [launch.py:323:sigkill_handler] Main process received SIGTERM, exiting",
    )
    assert (document["state"], document["cause"]["id"]) == ("failed", "killed")


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


# ours


def test_round_trip_of_every_line() -> None:
    lines_and_records: list[tuple[str, dict[str, Any] | None]] = [
        (write.running_training(), None),
        (write.beginning_of_epoch(1, 2, 30), None),
        (write.evaluating("perplexity", 0, 2), None),
        (
            write.perplexity(math.inf, 0.1),
            {"kind": "eval", "epoch": 0, "ppl": math.inf, "loss": 0.1},
        ),
        (
            write.step_loss(0, 1, 2, 1e-08),
            {"kind": "loss", "epoch": 0, "step": 1, "rank": 2, "loss": 1e-08},
        ),
        (
            write.throughput(None, 0.25, 1.5, 8.0, 2, 64),
            {
                "kind": "throughput",
                "index": 0,
                "latency_s": 0.25,
                "tflops": 1.5,
                "samples_per_s": 8.0,
                "batch_size": 2,
                "sequence_length": 64,
            },
        ),
        (
            write.throughput(0.5, 0.25, math.nan, 8.0, 2, 64),
            {
                "kind": "throughput",
                "index": 1,
                "latency_s": 0.25,
                "tflops": None,
                "samples_per_s": 8.0,
                "batch_size": 2,
                "sequence_length": 64,
            },
        ),
        (
            write.optimizer_step(20, 3, [1e-05, 5e-4], [(0.9, 0.95), (0.9, 0.95)]),
            {"kind": "optimizer", "engine": "actor", "step": 20, "skipped": 3, "lr": [1e-05, 5e-4]},
        ),
        (write.evaluating("reward", 1, 2), None),
        (
            write.reward_scores(1.25, -0.5, 0.75),
            {
                "kind": "reward_eval",
                "epoch": 1,
                "chosen": 1.25,
                "rejected": -0.5,
                "accuracy": 0.75,
            },
        ),
        (
            write.reward_scores_at(5, 1.25, -0.5, 0.75),
            {
                "kind": "reward_eval",
                "epoch": 1,
                "step": 5,
                "chosen": 1.25,
                "rejected": -0.5,
                "accuracy": 0.75,
            },
        ),
        (
            write.epoch_loss(1, 2, 0.5),
            {"kind": "loss", "epoch": 1, "step": None, "rank": None, "loss": 0.5},
        ),
        (write.evaluating("rewards", 1, 2), None),
        (
            write.dpo_scores(1.5, -1.5, 0.5),
            {
                "kind": "reward_eval",
                "epoch": 1,
                "chosen": 1.5,
                "rejected": -1.5,
                "loss": 0.5,
                "accuracy": None,
            },
        ),
        (write.saving_model(), None),
        (
            write.metrics(7, {"kl": -0.5, "answer_length": 12, "eos_share": None}),
            {"kind": "metrics", "step": 7, "kl": -0.5, "answer_length": 12, "eos_share": None},
        ),
        (
            write.phase("loading models"),
            {"kind": "phase", "name": "loading models", "percent": None},
        ),
        (write.phase("tokenising", 34), {"kind": "phase", "name": "tokenising", "percent": 34}),
        (write.note("a => b: 100 %"), {"kind": "note", "text": "a => b: 100 %"}),
        (write.warning("two\nlines"), {"kind": "warning", "text": r"two\nlines"}),
        (write.step_finished("run/model"), {"kind": "finished", "model": "run/model"}),
    ]
    reader = LogReader()
    for line, expected in lines_and_records:
        assert list(reader.feed(line)) == ([] if expected is None else [expected]), line


def test_round_trip_of_a_ppo_step() -> None:
    step = ppo_step(critic_loss=math.nan, bandwidth_gb_s=239.5, actor_parameters_b=1.429)
    (record,) = read(*step.block())["records"]
    assert math.isnan(record.pop("critic_loss"))
    written = {**vars(step), **vars(step.speed), "unsupervised_loss": 0.0}
    shared = set(record) & set(written)
    assert {name: record[name] for name in shared} == {name: written[name] for name in shared}
    assert set(vars(step.speed)) <= shared
    assert (record["samples_per_s"], record["time_per_sequence_s"]) == (4.0, 0.25)
    unknown = ("tflops", "generate_tflops", "train_tflops", "bandwidth_gb_s")
    lines = ppo_step(**dict.fromkeys(unknown, math.nan)).block()
    assert not any("nan" in line for line in lines)
    (record,) = read(*lines)["records"]
    assert {record[name] for name in unknown} == {None}
    # a block that is there at once is read at once
    reader = LogReader()
    assert [*reader.feed_all(lines), *reader.finish()] == [record]


STEPS = {
    "sft": SFTStep(
        step=7,
        speed=TrainingSpeed(parameters=10**9, seconds=0.5, flops=1e12, rows=4, width=64),
        loss=2.5,
        learning_rate=1e-5,
        gradient_norm=None,
        tokens_per_s=512.0,
        trained_token_share=0.5,
        total_steps=100,
    ),
    "pairs": PairStep(
        step=7,
        speed=TrainingSpeed(parameters=10**9, seconds=0.5, flops=1e12, rows=4, width=64),
        loss=0.5,
        accuracy=0.75,
        margin=1.5,
        chosen=1.0,
        rejected=-0.5,
        learning_rate=1e-5,
        gradient_norm=1.0,
        tokens_per_s=512.0,
        total_steps=100,
    ),
    "ppo": ppo_step(step=7, unsupervised_loss=2.0, more={"baseline": 0.5}),
    "ppo without a critic": ppo_step(step=7, critic_loss=None, unsupervised_loss=2.0),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_log_says_of_a_step_what_metrics_jsonl_says(name: str) -> None:
    """Each line reads back to the numbers of the record, in the record's order."""
    entry = STEPS[name]
    speed, metrics = read(*entry.lines())["records"]
    recorded = entry.record()
    assert metrics == recorded
    assert list(metrics) == list(recorded)
    assert recorded["kind"] == "metrics"
    for shared in set(speed) & set(recorded) - {"kind"}:
        assert speed[shared] == recorded[shared], shared


def test_a_step_without_a_critic_has_none_of_its_quantities() -> None:
    step = ppo_step(critic_loss=None)
    gone = set(ppo_step().record()) - set(step.record())
    assert gone == {
        "critic_loss",
        "critic_gradient_norm",
        "critic_learning_rate",
        "value_clip_fraction",
        "explained_variance",
    }
    block, _ = read(*step.lines())["records"]
    assert (block["critic_loss"], block["critic_parameters_b"]) == (None, None)
    assert block["actor_loss"] == step.actor_loss


EVALUATIONS = {
    "perplexity": PerplexityEvaluation(step=9, epoch=1, epochs=2, ppl=8.5, loss=2.125),
    "reward": RewardEvaluation(9, 1, 2, False, 0.5, 1.5, -0.5, 0.75, 8),
    "reward in an epoch": RewardEvaluation(9, 1, 2, True, 0.5, 1.5, -0.5, 0.75, 8),
    "rewards": DPOEvaluation(9, 1, 2, False, 0.5, 1.5, -0.5, 0.75, 8),
}


@pytest.mark.parametrize("name", EVALUATIONS)
def test_the_log_says_of_an_evaluation_what_metrics_jsonl_says(name: str) -> None:
    entry = EVALUATIONS[name]
    recorded = entry.record()
    before = write.beginning_of_epoch(1, 2, 10)
    found, *more = read(before, *entry.lines())["records"]
    assert {**recorded, **{n: x for n, x in found.items() if x is not None}} == recorded
    assert [record["eval_accuracy"] for record in more] == [0.75] * (name == "rewards")


@given(
    st.dictionaries(
        st.from_regex("[a-z][a-z0-9_]{0,9}", fullmatch=True).filter(
            lambda name: name not in ("kind", "step", "offset")
        ),
        st.floats(allow_nan=False) | st.integers(-(10**12), 10**12),
        max_size=5,
    )
)
def test_metrics_are_read_back_to_six_digits(values: dict[str, float]) -> None:
    (record,) = LogReader().feed(write.metrics(3, values))
    assert list(record) == ["kind", "step", *values]
    for name, value in values.items():
        assert record[name] == (value if isinstance(value, int) else pytest.approx(value, 1e-5))


def test_metric_that_would_not_be_read_back_is_refused() -> None:
    for name in ("Actor Loss", "kl,", "kind", "step", ""):
        with pytest.raises(ValueError, match="metric"):
            write.metrics(1, {name: 1.0})


def test_records_carry_the_offset_of_their_first_line() -> None:
    reader = LogReader()
    lines = [LOSSES.format(step=0), SPEED[0], "average reward score: 1.0", DASHES, "Note => x"]
    offset, found = 0, []
    for line in lines:
        found += reader.feed(line, offset)
        offset += len(line) + 1
    assert [(r["kind"], r["offset"]) for r in found] == [("ppo", 0), ("note", offset - 10)]


def test_what_a_progress_display_needs() -> None:
    reader = LogReader()
    reader.feed(f"{COMMAND} --module engine.steps.rlhf --config run.yaml")
    assert reader.step == "ppo"
    reader.feed(write.beginning_of_epoch(1, 3, 250, generation=True))
    assert (reader.epochs, reader.batches_per_epoch) == (3, 250)


def test_lines_of_writers_at_the_same_time_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "training.log"

    def write_notes(rank: int) -> None:
        with path.open("a") as stream:
            for step in range(200):
                write.write_line(stream, write.note(f"{rank} {step} " + "x" * 5000))

    threads = [threading.Thread(target=write_notes, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 800
    assert {len(line.split(" ")[-1]) for line in lines} == {5000}


def test_write_line_keeps_order_with_print_and_takes_any_stream(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        print("first", file=stream)
        write.write_line(stream, "second\nhalf \ud800")
        print("third", file=stream)
    assert (tmp_path / "log").read_text().splitlines() == ["first", r"second\nhalf ?", "third"]
    memory = io.StringIO()
    write.write_line(memory, "line")
    assert memory.getvalue() == "line\n"


# documents


def test_document_of_a_file_has_the_documented_shape(tmp_path: Path) -> None:
    path = tmp_path / "training.log"
    lines = [*launched(1), "***** Evaluating perplexity, Epoch 0/1 *****", "ppl: inf, loss: nan"]
    path.write_text("\n".join([*lines, *exits(4)]))
    document = json.loads(documents.to_json(documents.read_document(path)))
    assert list(document) == ["step", "state", "returncode", "cause", "records", "events"]
    assert document["records"] == [{"kind": "eval", "epoch": 0, "ppl": "inf", "loss": "nan"}]
    assert (document["state"], document["returncode"]) == ("ok", 0)
    assert document["events"]["overflow"] == 0


def test_json_of_what_is_not_finite() -> None:
    text = documents.to_json({"a": [math.nan, -math.inf, 1e-08], "b": {"c": math.inf}})
    assert json.loads(text) == {"a": ["nan", "-inf", 1e-08], "b": {"c": "inf"}}


def test_lines_across_blocks_and_lines_without_end(tmp_path: Path) -> None:
    path = tmp_path / "training.log"
    loss = "Epoch: 0, Step: {}, Rank: 0, loss = 0.5\n"
    with path.open("w") as file:
        for step in range(60_000):
            file.write(loss.format(step))
        file.write("x" * 3_000_000 + "\n" + loss.format(60_000))
    steps = [record["step"] for record in documents.read_document(path)["records"]]
    assert steps == list(range(60_001))


def test_run_folder(tmp_path: Path) -> None:
    for folder, lines in (
        ("step1-sft", [*launched(1), *exits(1)]),
        ("step3-rlhf", [*launched(1), LOSSES.format(step=0)]),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "training.log").write_text("\n".join(lines) + "\n")
    steps = documents.read_run(tmp_path)["steps"]
    assert {name: (d["step"], d["state"]) for name, d in steps.items()} == {
        "sft": ("sft", "ok"),
        "ppo": ("ppo", "unknown"),
    }
    state = {"steps": {"sft": {"state": "running"}, "ppo": {"state": "running"}}}
    (tmp_path / "run.json").write_text(json.dumps(state))
    steps = documents.read_run(tmp_path)["steps"]
    assert (steps["sft"]["state"], steps["ppo"]["state"]) == ("ok", "running")
    (tmp_path / "run.json").write_text("[]")
    assert documents.read_run(tmp_path)["steps"]["ppo"]["state"] == "unknown"


# any bytes

FORMS = [
    LOSSES.format(step=1),
    *SPEED,
    TIMER.format(e2e="1.00") + RATES,
    "Average reward score: 1.0 | EMA reward score: 2.0",
    DASHES,
    "ppl: 2.0, loss: 0.7",
    OPTIMIZER.format(step=10, skipped=0, rate="1e-05"),
    "Epoch: 0, Step: 3, Rank: 0, loss = 0.5",
    "chosen_last_scores (higher is better) : 2.5, acc (higher is better) : 0.5",
    "***** Evaluating reward, Epoch 0/1 *****",
    "Beginning of Epoch 1/1, Total Micro Batches 50",
    "Metrics => step: 1, kl: 0.5",
    "Phase => tokenising 34 %",
    "Grad overflow on iteration 5",
    "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1",
    *launched(2),
    *exits(1),
    *failure(-9),
    "Step 1 exited with non-zero status 1",
    OOM,
    "\x1b[31m \r 34%|███▍ | 34/100 [00:10<00:20]",
]


@settings(max_examples=300)
@given(st.binary(max_size=600))
def test_any_bytes(content: bytes) -> None:
    json.loads(documents.to_json(read_bytes(content)))


@settings(max_examples=300)
@given(st.data())
def test_any_mutilation_of_known_lines(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from(FORMS) | st.text(max_size=20), max_size=12))
    text = data.draw(st.sampled_from(["\n", "", "\r", " "])).join(pieces)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    middle = data.draw(st.text(st.characters() | st.sampled_from("0123456789.:,=[]|"), max_size=9))
    document = read_bytes((text[:start] + middle + text[end:]).encode("utf-8", "surrogatepass"))
    assert document["state"] in ("ok", "failed", "unknown")
    json.loads(documents.to_json(document))


@pytest.mark.parametrize("word", ["ppl: 1.0", "\x1b]", "[", "Epoch: 0 ", "1%|", "\r", "│ ", ": "])
def test_hostile_lines_are_read_in_bounded_time(word: str) -> None:
    hostile = word * (2_000_000 // len(word))
    nested = "│ [rank0]: " * 5000 + "\t│" * 5000
    assert read(nested)["records"] == []
    assert read(hostile, "Epoch: 0, Step: 3, Rank: 0, loss = 0.5")["records"][-1]["step"] == 3


def test_numbers_too_long_for_python_are_no_numbers() -> None:
    assert read(f"Epoch: {'9' * 5000}, Step: 3, Rank: 0, loss = 0.5")["records"] == []


def test_no_torch() -> None:
    code = "import sys, engine.log.documents; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=environment)


def test_a_full_disk_delays_a_line_and_loses_none_of_it(tmp_path: Path, monkeypatch: Any) -> None:
    # As a file system does it: half the line fits, then nothing, then there is room again.
    outcomes = iter([5, OSError(errno.ENOSPC, "full"), OSError(errno.ENOSPC, "full")])
    real_write = os.write

    def write_partly(descriptor: int, content: bytes) -> int:
        outcome = next(outcomes, len(content))
        if isinstance(outcome, OSError):
            raise outcome
        return real_write(descriptor, content[:outcome])

    monkeypatch.setattr(write, "_SECONDS_BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(write.os, "write", write_partly)
    with (tmp_path / "log").open("w") as stream:
        write.write_line(stream, write.note("written once"))
    assert (tmp_path / "log").read_text() == "Note => written once\n"


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_many_lines_at_once_read_as_one_by_one(data) -> None:
    blocks = [
        [
            LOSSES.format(step=step),
            *SPEED,
            f"Average reward score: 1.5 | EMA reward score: {ema}",
            DASHES,
        ]
        for step, ema in enumerate(("1.25", "NA", "x"))
    ]
    others = [
        "",
        "other text",
        "Epoch: 1, Step: 3, Rank: 0, loss = 0.5",
        TIMER.format(e2e=3.25) + RATES,
        write.metrics(3, {"kl": 0.5}),
        "Metrics => step: 1, kl",
        write.running_training(9),
        LOSSES.format(step=7),
        SPEED[0],
        write.throughput(1.429, 0.5, 77.3, 26.6, 16, 512),
        "Model Parameters: NA, Latency: xs, TFLOPs: 1, Samples/sec: 1, Time/seq 1s, "
        "Batch Size: 1, Sequence Length: 2",
        "average reward score: -2.0",
    ]
    pieces = data.draw(
        st.lists(st.sampled_from([*blocks, *([line] for line in others)]), max_size=12)
    )
    lines = [line for piece in pieces for line in piece]
    offsets = range(0, 100 * len(lines), 100)
    at_once, one_by_one = LogReader(), LogReader()
    records = list(at_once.feed_all(lines, offsets))
    slowly = [
        record for pair in zip(lines, offsets, strict=True) for record in one_by_one.feed(*pair)
    ]
    assert records == slowly
    assert list(at_once.finish()) == list(one_by_one.finish())
    assert (at_once.step, at_once.events) == (one_by_one.step, one_by_one.events)
