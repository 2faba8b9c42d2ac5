"""Where the parts of a run lie in its folder. Brings in no torch."""

from __future__ import annotations

from typing import Literal

StepName = Literal["sft", "reward", "ppo", "dpo"]

STEP_FOLDERS: dict[StepName, str] = {
    "sft": "step1-sft",
    "reward": "step2-reward",
    "ppo": "step3-rlhf",
    "dpo": "step2-dpo",
}

STEP_NUMBERS: dict[StepName, int] = {"sft": 1, "reward": 2, "ppo": 3, "dpo": 2}

# The steps of a run, by its `alignment`.
PIPELINES: dict[str, tuple[StepName, ...]] = {
    "ppo": ("sft", "reward", "ppo"),
    "dpo": ("sft", "dpo"),
}


def model_folders(step: StepName, ema: bool) -> list[str]:
    """The model folders, inside the step's own, that a finished step leaves."""
    if step != "ppo":
        return ["model"]
    return ["actor", "critic", "actor_ema"] if ema else ["actor", "critic"]


# A file of this name in a run's folder asks its running step to save a checkpoint and end.
STOP_REQUEST = "stop-request"
