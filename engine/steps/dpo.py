"""Step 2 by DPO: `deepspeed --module engine.steps.dpo --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.arguments import parse_arguments


def main() -> None:
    """Train the actor on pairs and save it."""
    config, run = parse_arguments("Step 2, direct preference optimisation of the actor")
    from engine.distributed import process_group
    from engine.trainers.context import StepContext
    from engine.trainers.dpo import DPOTrainer

    with process_group():
        trainer = DPOTrainer(StepContext.create(config, run, "dpo"))
        if trainer.train():
            trainer.save()


if __name__ == "__main__":
    main()
