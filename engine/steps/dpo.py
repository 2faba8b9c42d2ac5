"""Step 2 by DPO: `deepspeed --module engine.steps.dpo --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.entry import run_step


def _trainer() -> type:
    from engine.trainers.dpo import DPOTrainer

    return DPOTrainer


if __name__ == "__main__":
    run_step("dpo", _trainer)
