"""One rank of `test_rlhf_groups_ranks.py`: step 3 without a critic, one algorithm after another."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from matrix_run import options
from resumed import train

from engine.distributed import process_group, rank
from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext

COMMON = (
    "launch.num_accelerators=2",
    "rlhf.answers_per_prompt=2",
    "ppo.rollout_batch_size=8",
    "ppo.batch_size=4",
    "ppo.max_steps=3",
)
# algorithm, and a covering subset of what a model can be laid out with
CASES = {
    "dapo": (
        "rlhf.resampling_tries=2",
        # rewards are one of two numbers, so that some groups have no spread
        "ppo.reward_clip=0.001",
        "rlhf.overlong_buffer=0",
        "actor.zero_stage=3",
        "actor.lora.rank=4",
        "actor.lora.only=true",
        "hybrid_engine.enabled=true",
        "ema.enabled=true",
        "ppo.max_steps=4",
    ),
    "rloo": ("actor.zero_stage=2", "actor.offload=true", "ppo.inner_epochs=2"),
    "gspo": ("actor.zero_stage=1", "ppo.micro_batch_size=1", "hybrid_engine.enabled=true"),
    "reinforce++-baseline": ("actor.zero_stage=0", "actor.lora.rank=4", "dtype=bf16"),
    "grpo": ("actor.zero_stage=3", "actor.gradient_checkpointing=true", "rlhf.scale=batch"),
}


def main(folder: Path, model: str) -> None:
    text = f"data.unsupervised_sources={folder}/text.jsonl"
    with process_group():
        for name, changes in CASES.items():
            config = options(model, f"rlhf.algorithm={name}", *COMMON, *changes, text)
            assert train(config, folder / name, "ppo")
        first = next(iter(CASES))
        config = options(model, f"rlhf.algorithm={first}", *COMMON, *CASES[first], text)
        assert not train(config, folder / "broken", "ppo", stop_after=2)
        assert train(config, folder / "broken", "ppo")

        config = options(model, "rlhf.algorithm=grpo", *COMMON)
        trainer = PPOTrainer(StepContext.create(config, folder / "shown", "ppo"))
        rows = trainer.own_rows(trainer.batches.epoch(0)[0])
        experience, _ = trainer.generate_experience(trainer.repeated_prompts(rows), rows)
        experience.scores.copy_(torch.arange(4.0) * (1 + rank()) / 2)
        experience = trainer.add_targets(experience)
        found = {"rows": rows, "ids": experience.ids, "advantages": experience.advantages}
        torch.save({**found, "mask": experience.mask}, folder / f"rank{rank()}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
