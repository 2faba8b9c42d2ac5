"""Hybrid engine on against off: generation under ZeRO, each pair in one run.

    python benchmarks/generation.py [--model FOLDER] [--dtype fp32|bf16] [--ranks 1 2]

Without a model: a 54M OPT with random weights. The bandwidth limit counts the bytes that a token
step must read (weights once, keys and values of all rows) at the speed measured for a plain read
in the same process, all ranks reading at once. Off is transformers' `generate`, with this
project's choice of a token, which is faster than transformers' own.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, OPTConfig, OPTForCausalLM

from engine.config.schema import HybridEngineConfig, LoraConfig
from engine.distributed import (
    device,
    max_over_ranks,
    process_group,
    rank,
    sum_over_ranks,
    world_size,
)
from engine.generation.decode import DecodeSession, build_decoder
from engine.generation.hybrid import HybridEngine
from engine.generation.plain import generate
from engine.generation.sampling import Generation, Sampling
from engine.models.lora import add_lora

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# As in the training scripts of DeepSpeed-Chat.
LORA_RANK = 128


@dataclass(frozen=True)
class Case:
    """One pair: a ZeRO stage, with LoRA or without, EOS honoured or ignored.

    Ragged answers have up to twice the tokens, and a quarter of that limit on average."""

    stage: int
    lora: bool = False
    ragged: bool = False

    def __str__(self) -> str:
        lora = " LoRA" if self.lora else ""
        return f"ZeRO-{self.stage}{lora}{' ragged' if self.ragged else ''}"


CASES = {
    1: [Case(2), Case(2, lora=True), Case(2, ragged=True), Case(3), Case(3, lora=True)],
    2: [Case(2), Case(3), Case(3, lora=True)],
}


def build_model(path: str | None, dtype: torch.dtype) -> Any:
    """The model of the benchmark on the CPU."""
    torch.manual_seed(0)
    if path is not None:
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
    config = OPTConfig(
        vocab_size=50272,
        hidden_size=512,
        word_embed_proj_dim=512,
        ffn_dim=2048,
        num_hidden_layers=9,
        num_attention_heads=8,
        max_position_embeddings=512,
    )
    return OPTForCausalLM(config).to(dtype)


def read_bandwidth() -> float:
    """Bytes a second that this rank reads while all ranks read."""
    block = torch.ones(2**26, device=device())
    best = float("inf")
    for _ in range(5):
        if world_size() > 1:
            dist.barrier()
        start = time.perf_counter()
        # Reading the result waits for a GPU.
        block.sum().item()
        best = min(best, time.perf_counter() - start)
    return block.nbytes / best


def step_bytes(model: Any, rows: int, length: float) -> float:
    """Bytes that one token step of `rows` rows must read at a length of `length` tokens."""
    tables = {id(model.get_input_embeddings().weight)} - {id(model.get_output_embeddings().weight)}
    weights = sum(p.nbytes for p in model.parameters() if id(p) not in tables)
    config = model.config
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    size = config.hidden_size // config.num_attention_heads
    cached = 2 * config.num_hidden_layers * heads * size * rows * length
    return weights + cached * next(model.parameters()).element_size()


def timed(run: Callable[[], Generation]) -> tuple[float, int]:
    """Seconds of the slowest rank and tokens of all ranks."""
    if world_size() > 1:
        dist.barrier()
    start = time.perf_counter()
    tokens = int(run().lengths.sum())
    seconds = time.perf_counter() - start
    return max_over_ranks(seconds), int(sum_over_ranks(tokens)[0])


def measure_pair(case: Case, options: argparse.Namespace) -> str:
    """Time both ways in turn and describe them in a line."""
    model = build_model(options.model, DTYPES[options.dtype])
    bytes_a_step = step_bytes(model, options.rows, options.prompt + options.new_tokens / 2)
    vocabulary = model.config.vocab_size
    if case.lora:
        add_lora(model, LoraConfig(rank=LORA_RANK))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True),
        config={
            "train_micro_batch_size_per_gpu": options.rows,
            "zero_optimization": {"stage": case.stage},
            "bf16": {"enabled": options.dtype == "bf16"},
        },
    )
    sampling = Sampling(max_new_tokens=options.new_tokens, eos_ids=(), pad_id=1, ignore_eos=True)
    if case.ragged:
        # A share of the vocabulary as EOS makes lengths geometric, whatever the model says.
        sampling = Sampling(
            max_new_tokens=2 * options.new_tokens,
            eos_ids=tuple(range(0, vocabulary, options.new_tokens // 2)),
            pad_id=1,
        )
    seed = torch.Generator().manual_seed(rank())
    ids = torch.randint(5, vocabulary, (options.rows, options.prompt), generator=seed).to(device())
    mask = torch.ones_like(ids)
    mask[0, : options.prompt // 4] = 0
    hybrid = HybridEngine(engine, HybridEngineConfig(enabled=True))

    def on() -> Generation:
        with hybrid.rollout():
            return hybrid.generate(ids, mask, sampling, torch.Generator(device()).manual_seed(1))

    def off() -> Generation:
        return generate(
            engine.module, ids, mask, sampling, torch.Generator(device()).manual_seed(1)
        )

    on()
    if hybrid.off_reason is not None:
        return f"{case!s:<16} hybrid engine off: {hybrid.off_reason}"
    pairs = [(timed(off), timed(on)) for _ in range(options.repeats)]
    off_s, on_s = (median(pair[way][0] / pair[way][1] for pair in pairs) for way in (0, 1))
    tokens = pairs[0][1][1]
    # A token step serves all rows of all ranks; ragged, their number changes.
    steps = math.nan if case.ragged else tokens / options.new_tokens
    limit_s = bytes_a_step / options.bandwidth
    return table_line(
        str(case), 1 / off_s, 1 / on_s, limit_s / (off_s * steps), limit_s / (on_s * steps)
    )


def table_line(name: str, off: float, on: float, off_share: float, on_share: float) -> str:
    """Tokens a second both ways, their ratio, and the shares of the limit that they reach."""
    shares = "" if math.isnan(on_share) else f"{off_share:7.0%} {on_share:7.0%}"
    return f"{name:<16} {off:10.1f} {on:10.1f} {on / off:7.2f}x {shares}"


def measure_one_row(options: argparse.Namespace) -> str:
    """Time one row, greedy, against transformers' own `generate`."""
    model = build_model(options.model, DTYPES[options.dtype]).eval().to(device())
    seed = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 1000, (1, options.prompt), generator=seed).to(device())
    sampling = Sampling(
        max_new_tokens=options.new_tokens, eos_ids=(), pad_id=1, ignore_eos=True, greedy=True
    )
    session = DecodeSession(build_decoder(model, rows=1))
    limit = step_bytes(model, 1, options.prompt + options.new_tokens / 2) / options.bandwidth
    times: list[tuple[float, float]] = []
    for _ in range(options.repeats + 1):
        start = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=options.new_tokens,
                min_new_tokens=options.new_tokens,
                do_sample=False,
                pad_token_id=1,
            )
        middle = time.perf_counter()
        session.truncate(0)
        session.feed(ids[0].tolist())
        list(session.stream(sampling))
        times.append((middle - start, time.perf_counter() - middle))
    theirs, ours = (median(pair[way] for pair in times[1:]) for way in (0, 1))
    off, on = options.new_tokens / theirs, options.new_tokens / ours
    return table_line("one row, greedy", off, on, limit * off, limit * on)


def work(options: argparse.Namespace) -> None:
    """Run all cases of one rank count; rank 0 prints."""
    with process_group():
        options.bandwidth = read_bandwidth()
        if rank() == 0:
            name = options.model or "OPT 54M"
            print(
                f"\n{name} {options.dtype}, {world_size()} rank(s), {options.rows} rows a rank, "
                f"{options.prompt} + {options.new_tokens} tokens, "
                f"read {options.bandwidth / 1e9:.1f} GB/s a rank\n"
                f"{'':<16} {'off tok/s':>10} {'on tok/s':>10} {'ratio':>8} share of limit off, on"
            )
        for case in CASES[world_size()]:
            line = measure_pair(case, options)
            if rank() == 0:
                print(line, flush=True)
        if world_size() == 1:
            print(measure_one_row(options), flush=True)


def main() -> None:
    """Start the launcher once for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder of a model; default: a 54M OPT, random weights")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--ranks", type=int, nargs="+", choices=[1, 2], default=[1, 2])
    parser.add_argument("--rows", type=int, default=8, help="prompts a rank")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many pairs")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        work(options)
        return
    for ranks in options.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        threads = max(1, (os.cpu_count() or 1) // ranks)
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command += ["--num_accelerators", str(ranks), "--master_port", str(port)]
        command += [os.path.abspath(__file__), *sys.argv[1:]]
        # as `dschat run` sets them
        environment = {"OMP_NUM_THREADS": str(threads), "GOMP_SPINCOUNT": "5000", **os.environ}
        subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
