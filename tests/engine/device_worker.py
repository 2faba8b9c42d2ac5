"""One rank of `test_gpu.py`: all checks one after another in one process, so that starting, loading
kernels and building them happens once. Also runs on a CPU:

    deepspeed --num_gpus 1 tests/engine/device_worker.py FOLDER [part of a name]
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from device_cases import build_models, checks, refused

from engine.distributed import process_group, rank, world_size


def main(folder: Path, part: str = "") -> None:
    with process_group():
        if rank() == 0:
            models = build_models(folder / "models")
            (folder / "models.json").write_text(json.dumps(models))
        dist.barrier()
        models = json.loads((folder / "models.json").read_text())
        changes = [f"launch.num_accelerators={world_size()}"] if world_size() > 1 else []
        for name, check in checks(world_size()).items():
            if part not in name:
                continue
            started, result = time.perf_counter(), refused(name)
            if result is None:
                result = run(functools.partial(check, models, folder / name, *changes))
            if rank() == 0:
                seconds = round(time.perf_counter() - started, 1)
                record = {"name": name, "result": result, "seconds": seconds}
                with (folder / "results.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
            gc.collect()
            get_accelerator().empty_cache()


def run(check: Callable[[], None]) -> str:
    """Passed, or the traceback; with several ranks an error ends them all, or some would wait."""
    try:
        check()
    except Exception:
        if world_size() > 1:
            raise
        return traceback.format_exc()
    return "passed"


if __name__ == "__main__":
    # The launcher adds --local_rank.
    arguments = [each for each in sys.argv[1:] if not each.startswith("--local_rank")]
    main(Path(arguments[0]), *arguments[1:])
