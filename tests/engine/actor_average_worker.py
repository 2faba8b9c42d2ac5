"""One rank of `test_actor_average.py`: all cases, then writes that outlast the ranks' patience."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from actor_average_run import CASES, Case, build_actor, check

from engine.checkpoint import Checkpoints
from engine.distributed import process_group, rank
from engine.models import save as save_module
from engine.models.load import load_tokenizer
from engine.report import Report

PATIENCE = timedelta(seconds=2)


def slowly(write: Callable[..., Any]) -> Callable[..., Any]:
    def waiting(*arguments: Any, **named: Any) -> Any:
        if rank() == 0:
            time.sleep(2 * PATIENCE.total_seconds())
        return write(*arguments, **named)

    return waiting


def save_slowly(folder: Path, model: str) -> None:
    """Rank 0 writes model and checkpoint for longer than a collective may take elsewhere."""
    engine = build_actor(Case(3, "none"), model)
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(PATIENCE, group)
    save_module.save_file = slowly(save_module.save_file)
    save_module._SHARD_BYTES = 200_000
    save_module.save_model(engine.module, load_tokenizer(model), folder / "model")
    engine.checkpoint_engine.save = slowly(engine.checkpoint_engine.save)
    checkpoints = Checkpoints(folder, folder, {"actor": engine}, Report(folder), 1, 1)
    checkpoints.after_step(1, dict, None)
    for group in dist.distributed_c10d._world.pg_map:
        assert group._get_backend(group._device_types[0]).options._timeout == PATIENCE


def main(folder: Path, model: str) -> None:
    with process_group():
        for index, case in enumerate(CASES):
            check(case, model, folder / str(index))
            if rank() == 0:
                with (folder / "passed").open("a") as file:
                    file.write(f"{case}\n")
        save_slowly(folder, model)


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
