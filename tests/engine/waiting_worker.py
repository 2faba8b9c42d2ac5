"""One of two ranks whose collectives time out in two seconds, while rank 0 works alone for longer.

An operator loads on rank 0 alone.

Arguments: the rank, and a folder for both. Prints what this rank met.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

from engine import operators
from engine.config.schema import RunConfig
from engine.distributed import process_group, rank, sum_over_ranks
from engine.trainers import context
from engine.trainers.context import StepContext

TIMEOUT = 2.0


def work_alone(done: Path, act: str) -> str:
    """In place of building models and data: rank 0 takes longer than a collective may."""
    if rank() != 0:
        return "found" if done.exists() else "nothing there"
    time.sleep(1.5 * TIMEOUT)
    if act == "fails":
        raise OSError("no space for the model")
    if act == "dies":
        os._exit(7)
    done.touch()
    return "made"


class Operators:
    """Stands where an accelerator does; what it builds loads on rank 0 alone."""

    @staticmethod
    def create_op_builder(name: str) -> SimpleNamespace:
        def load(verbose: bool) -> None:
            if rank() == 1:
                raise OSError(f"no compiler for {name}")

        return SimpleNamespace(load=load)


def main() -> None:
    """Let rank 0 work, fail and die alone; a sum shows that the ranks are in step after it."""
    os.environ |= {"RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2"}
    folder = Path(sys.argv[2])
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    report = SimpleNamespace(phase=lambda _: None, note=lambda _: None)
    step = StepContext(RunConfig(), folder, "sft", None, report)
    context.resolve_model = lambda name: work_alone(folder / f"model {name}", name)
    context.unsupervised_rows = lambda *_, note: work_alone(folder / "text", "works")

    def build_phase(*_, note):
        return SimpleNamespace(train=work_alone(folder / "data", "works"), eval=(), counts={})

    context.build_phase = build_phase
    operators.get_accelerator = Operators
    with process_group():
        print("operator", operators.why_not_loaded("FusedAdamBuilder"), flush=True)
        print("data", step.build_data(None, "sft").train, flush=True)
        print("text", step.text_blocks(None, 8), flush=True)
        for act in ("works", "fails", "dies"):
            try:
                print(act, step.resolve_model(act), flush=True)
            except (OSError, RuntimeError) as error:
                print(act, f"{type(error).__name__}: {error}", flush=True)
                if act == "dies":
                    os._exit(1)
            print(act, "sum", sum_over_ranks(rank() + 1), flush=True)


if __name__ == "__main__":
    main()
