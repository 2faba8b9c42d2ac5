"""Evaluations of steps 1 and 2 on the first few held-out rows; as a worker, on two ranks."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small_run import configuration

from engine.config.schema import RunConfig
from engine.distributed import process_group, rank, world_size
from engine.trainers.context import StepContext
from engine.trainers.dpo import DPOTrainer
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer

TRAINERS = {"sft": SFTTrainer, "reward": RewardTrainer, "dpo": DPOTrainer}
# with batches of two: none, fewer than ranks, a rank with a batch more than the other, all alike
SIZES = (0, 1, 3, 5, 8)
SHARDED = ("actor.zero_stage=3", "critic.zero_stage=3")


def options(step: str, sft: str, *changes: str) -> RunConfig:
    """The configuration of a step of a few optimizer steps on the model `sft`."""
    alignment = "alignment=dpo" if step == "dpo" else "alignment=ppo"
    return configuration(
        f"models.sft={sft}", alignment, f"{step}.eval_batch_size=2", f"{step}.max_steps=3", *changes
    )


def evaluations(step: str, sft: str, run: Path, *changes: str) -> list[dict[str, Any]]:
    """Train a step, save it in `run`, and evaluate it on the first rows: a record for each size.

    Each has `notes`, what the log says of the evaluation.
    """
    trainer = TRAINERS[step](StepContext.create(options(step, sft, *changes), run, step))
    trainer.train()
    trainer.save()
    notes: list[str] = []
    trainer.context.report.note = notes.append
    held_out, found = trainer.data.eval, []
    for size in SIZES:
        notes.clear()
        trainer.data = replace(trainer.data, eval=held_out.select(range(size)))
        trainer.evaluate(epoch=1, step=3)
        metrics = (trainer.context.folder / "metrics.jsonl").read_text().splitlines()
        found.append({**json.loads(metrics[-1]), "notes": list(notes)})
    return found


def check_the_head(sft: str, run: Path) -> None:
    """A reward model in bf16 under ZeRO-3 trains, and its scores are products in fp32."""
    config = options("reward", sft, "dtype=bf16", *SHARDED)
    trainer = RewardTrainer(StepContext.create(config, run, "reward"))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    trainer.engine.module.model.score.register_forward_hook(
        lambda head, inputs, output: seen.append(
            (output, inputs[0].double() @ head.weight.double().T)
        )
    )
    assert trainer.train()
    for scores, expected in seen:
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores.double(), expected, atol=1e-6, rtol=1e-5)


def main(sft: str, folder: Path) -> None:
    with process_group():
        assert world_size() == 2
        for step in TRAINERS:
            found = evaluations(step, sft, folder / step, *SHARDED)
            if rank() == 0:
                (folder / f"{step}.json").write_text(json.dumps(found))
        check_the_head(sft, folder / "bf16")


if __name__ == "__main__":
    main(sys.argv[-2], Path(sys.argv[-1]))
