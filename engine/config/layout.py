"""Where the parts of a run lie in its folder. Brings in no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

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

CHECKPOINTS = "checkpoints"
# Written last: a checkpoint whose folder holds it is whole.
CHECKPOINT_MANIFEST = "checkpoint.json"


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def whole_checkpoints(step_folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The whole checkpoints of a step with their manifests, oldest first."""
    found = []
    for file in (step_folder / CHECKPOINTS).glob(f"step-*/{CHECKPOINT_MANIFEST}"):
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(manifest, dict) and isinstance(manifest.get("step"), int):
            found.append((file.parent, manifest))
    return sorted(found, key=lambda item: int(item[1]["step"]))
