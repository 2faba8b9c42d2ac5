"""Step 1: `deepspeed --module engine.steps.sft --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.arguments import parse_arguments


def main() -> None:
    """Train the base model on dialogues and save it."""
    config, run = parse_arguments("Step 1, supervised fine-tuning")
    from engine.distributed import process_group
    from engine.trainers.context import StepContext
    from engine.trainers.sft import SFTTrainer

    with process_group():
        trainer = SFTTrainer(StepContext.create(config, run, "sft"))
        if trainer.train():
            trainer.save()


if __name__ == "__main__":
    main()
