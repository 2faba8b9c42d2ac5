"""One rank of `test_matrix.py`: cells of the matrix, one after another in one process.

Then two generation steps, in the first of which one rank's answers are EOS alone and in the second
all, and two steps under ZeRO-3, each uninterrupted, and stopped and resumed. Last,
steps 1 and 3 on a CUDA device that is not there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fake_cuda import fake_cuda
from matrix_run import Cell, options, run_cell, step_3
from resumed import train
from small_run import with_empty_answers

from engine.distributed import process_group, rank

EMPTY = ("launch.num_accelerators=2", "ppo.max_steps=2", "actor.zero_stage=2")
RESUMED = (
    "launch.num_accelerators=2",
    "actor.zero_stage=3",
    "critic.zero_stage=3",
    "hybrid_engine.enabled=true",
    "ema.enabled=true",
    "ppo.kl_target=1",
    "ppo.normalize_reward=true",
    "ppo.max_steps=4",
    "sft.max_steps=4",
)
ON_FAKE_CUDA = (
    "launch.num_accelerators=2",
    "dtype=bf16",
    "actor.zero_stage=3",
    "actor.lora.rank=4",
    "critic.zero_stage=2",
    "hybrid_engine.enabled=true",
    "ema.enabled=true",
    "ppo.normalize_reward=true",
    "ppo.max_steps=2",
    "checkpoint.interval=2",
)


def main(folder: Path) -> None:
    with process_group():
        plan = json.loads((folder / "plan.json").read_text())
        for entry in plan:
            cell = Cell(**entry["cell"])
            result = run_cell(cell, entry["model"], folder / cell.name, "launch.num_accelerators=2")
            if rank() == 0:
                with (folder / "results.jsonl").open("a") as file:
                    file.write(json.dumps(result) + "\n")
        trainer = step_3(plan[-1]["model"], folder / "empty", *EMPTY)
        for step in range(2):
            if rank() == 1 - step:
                with_empty_answers(trainer, [0, 1])
            trainer.train_step(step, 0, trainer.batches.epoch(0)[step])
        config = options(plan[-1]["model"], *RESUMED)
        for step in ("sft", "ppo"):
            assert train(config, folder / "whole", step)
            assert not train(config, folder / "broken", step, stop_after=2)
            assert train(config, folder / "broken", step)
        with fake_cuda():
            config = options(plan[-1]["model"], *ON_FAKE_CUDA)
            for step in ("sft", "ppo"):
                assert train(config, folder / "fake-cuda", step)


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
