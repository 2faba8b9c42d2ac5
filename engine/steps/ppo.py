"""Step 3: `deepspeed --module engine.steps.ppo --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.arguments import parse_arguments


def main() -> None:
    """Train the actor on the reward and save actor and critic."""
    config, run = parse_arguments("Step 3, PPO on the reward")
    from engine.distributed import process_group
    from engine.trainers.context import StepContext
    from engine.trainers.ppo import PPOTrainer

    with process_group():
        trainer = PPOTrainer(StepContext.create(config, run, "ppo"))
        if trainer.train():
            trainer.save()


if __name__ == "__main__":
    main()
