"""Step 3: `deepspeed --module engine.steps.ppo --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.entry import run_step


def _trainer() -> type:
    from engine.rlhf.trainer import PPOTrainer

    return PPOTrainer


if __name__ == "__main__":
    run_step("ppo", _trainer)
