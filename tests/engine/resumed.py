"""A step that is stopped and goes on, in this process, and what it wrote of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.config.layout import STOP_REQUEST
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME, StepName
from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer

TRAINERS = {"sft": SFTTrainer, "reward": RewardTrainer, "ppo": PPOTrainer}
TIMES = {"tokens_per_s", "e2e_s", "generate_s", "train_s"}


def train(config: RunConfig, folder: Path, step: StepName, stop_after: int | None = None) -> bool:
    """Begin a step or go on with it; stop it on request after so many of its steps."""
    trainer = TRAINERS[step](StepContext.create(config, folder, step))
    after_step = trainer.checkpoints.after_step

    def stop_then(done, *arguments):
        if done == stop_after:
            (folder / STOP_REQUEST).touch()
        return after_step(done, *arguments)

    trainer.checkpoints.after_step = stop_then
    (folder / STOP_REQUEST).unlink(missing_ok=True)
    return trainer.train()


def records(folder: Path, step: StepName) -> list[dict[str, Any]]:
    """All records of a step's metrics.jsonl, without what depends on the clock."""
    rows = (folder / BY_NAME[step].folder / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in json.loads(row).items() if name not in TIMES}
        for row in rows
    ]
