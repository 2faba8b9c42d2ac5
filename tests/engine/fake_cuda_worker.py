"""One of two ranks of `test_fake_cuda.py`: steps 1 to 3 under ZeRO-3 with LoRA alone."""

from __future__ import annotations

import sys
from pathlib import Path

from fake_cuda import fake_cuda
from matrix_run import options

from engine.distributed import process_group
from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer

COMMON = ("launch.num_accelerators=2", "dtype=bf16", "data.eval_rows=5", "ppo.max_steps=1")
LAYOUT = ("zero_stage=3", "lora.rank=4", "lora.only=true")
STEPS = {"sft": SFTTrainer, "reward": RewardTrainer, "ppo": PPOTrainer}


def main(folder: Path, model: str) -> None:
    layout = [f"{role}.{change}" for role in ("actor", "critic") for change in LAYOUT]
    ppo = ("ema.enabled=true", "ppo.normalize_reward=true", "checkpoint.interval=1")
    config = options(model, f"models.reward={model}", *COMMON, *layout, *ppo)
    with process_group(), fake_cuda():
        for step, trainer_type in STEPS.items():
            trainer = trainer_type(StepContext.create(config, folder, step))
            assert trainer.train()
            trainer.save()


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
