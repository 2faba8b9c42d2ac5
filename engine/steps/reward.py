"""Step 2: `deepspeed --module engine.steps.reward --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.arguments import parse_arguments


def main() -> None:
    """Train the reward model on pairs and save it."""
    config, run = parse_arguments("Step 2, the reward model")
    from engine.distributed import process_group
    from engine.trainers.context import StepContext
    from engine.trainers.reward import RewardTrainer

    with process_group():
        trainer = RewardTrainer(StepContext.create(config, run, "reward"))
        if trainer.train():
            trainer.save()


if __name__ == "__main__":
    main()
