"""Step 2: `deepspeed --module engine.steps.reward --config RUN/run.yaml --output RUN`."""

from __future__ import annotations

from engine.steps.entry import run_step


def _trainer() -> type:
    from engine.trainers.reward import RewardTrainer

    return RewardTrainer


if __name__ == "__main__":
    run_step("reward", _trainer)
