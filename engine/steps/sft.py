"""Step 1: `deepspeed --module engine.steps.sft --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.entry import run_step


def _trainer() -> type:
    from engine.trainers.sft import SFTTrainer

    return SFTTrainer


if __name__ == "__main__":
    run_step("sft", _trainer)
