"""Why a step failed: the cause among the lines of its log."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from log_lines import (
    OOM,
    STAMP,
    TRACEBACK,
    failure,
    launched,
    read,
)

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
