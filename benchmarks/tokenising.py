"""Rows a second that rank 0 tokenises while rank 1 waits, and what a batch of them costs a step.

python benchmarks/tokenising.py [--rows N] [--timeout SECONDS]

Two ranks tokenise `--rows` short dialogues as step 1 does, and a hundredth of that many. Their
collectives end after `--timeout`, which tokenising may outlast.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

_BATCH, _STEPS = 32, 200


def write_rows(file: Path, rows: int) -> None:
    """Write short pairs of question and answer as JSON lines."""
    with open(file, "w", encoding="utf-8") as stream:
        for i in range(rows):
            question = f"What is {i} plus {i % 97}, and what is its last digit?"
            answer = f"It is {i + i % 97}, and its last digit is {(i + i % 97) % 10}."
            stream.write(json.dumps({"instruction": question, "output": answer}) + "\n")


def tokenise_and_step(file: Path, folder: Path) -> dict[str, float]:
    """Tokenise a file as step 1 does, then make batches; seconds and rows of this rank."""
    from engine.config.schema import RunConfig
    from engine.data.batches import GlobalBatches, SftCollator, row_lengths
    from engine.distributed import rank, sum_over_ranks, world_size
    from engine.trainers.context import StepContext

    data = {"sources": [str(file)], "cache_dir": str(folder / "cache")}
    config = RunConfig.model_validate({"data": data, "models": {"actor": "embedded:tiny-llama"}})
    context = StepContext.create(config, folder / file.stem, "sft")
    tokenizer = context.load_tokenizer(context.resolve_model(config.models.actor))
    started = time.perf_counter()
    rows = context.build_data(tokenizer, "sft").train
    seconds = time.perf_counter() - started
    batches = GlobalBatches(row_lengths(rows, "input_ids"), _BATCH * world_size(), config.seed)
    collate = SftCollator(tokenizer.pad_token_id)
    times = []
    for step in range(min(_STEPS, len(batches))):
        # Time of this thread's core, which what else runs on the machine does not change.
        started = time.thread_time()
        batch = batches.epoch(0)[step]
        for cut in batches.local_micro_batches(batch, rank(), world_size()):
            collate([rows[row] for row in cut])
        times.append(time.thread_time() - started)
    # All ranks still have a working group.
    (everywhere,) = sum_over_ranks(len(rows))
    median = statistics.median(times[1:])
    return {
        "rows": len(rows),
        "rows_everywhere": everywhere,
        "seconds": seconds,
        "first_batch": times[0],
        "batch": median,
    }


def run_rank(rank: int, folder: Path, timeout: float) -> None:
    """Be one of two ranks; print what both files cost as JSON."""
    import torch.distributed as dist

    from engine.distributed import process_group

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    with process_group():
        found = [tokenise_and_step(folder / name, folder) for name in ("few.jsonl", "many.jsonl")]
    print(json.dumps({"rank": rank, "files": found}), flush=True)


def measure(rows: int, timeout: float) -> list[dict]:
    """Start both ranks and wait for them; what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder / "few.jsonl", max(500, rows // 100))
        write_rows(folder / "many.jsonl", rows)
        command = [sys.executable, __file__, "--folder", name, "--timeout", str(timeout)]
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env={**os.environ, **address},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate()[0] for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(process.returncode for process in ranks):
        sys.exit("\n".join(outputs))
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    """Measure and print, or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--timeout", type=float, default=20.0, help="of collectives, in seconds")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options.rank, options.folder, options.timeout)
        return
    cores = len(os.sched_getaffinity(0))
    for rank in measure(options.rows, options.timeout):
        few, many = rank["files"]
        verb = "tokenised" if rank["rank"] == 0 else "waited for"
        print(
            f"rank {rank['rank']}: {verb} {many['rows']:,} rows in {many['seconds']:.1f} s on "
            f"{cores} cores, {many['rows'] / many['seconds']:,.0f} rows/s, with collectives that "
            f"end after {options.timeout:g} s; a batch takes {1e3 * many['batch']:.2f} ms, with "
            f"{few['rows']:,} rows {1e3 * few['batch']:.2f} ms: "
            f"{many['batch'] / few['batch']:.2f} times as long "
            f"(the first of the epoch {1e3 * many['first_batch']:.0f} ms)"
        )


if __name__ == "__main__":
    main()
