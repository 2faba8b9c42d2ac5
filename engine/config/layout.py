"""Where the parts of a run are in its folder. Brings in no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.steps import BY_NAME, StepName

if TYPE_CHECKING:
    from engine.config.schema import RunConfig

# A file of this name in a run's folder makes its running step save a checkpoint and end.
STOP_REQUEST = "stop-request"

CHECKPOINTS = "checkpoints"
# Written last: a checkpoint with this file is complete.
CHECKPOINT_MANIFEST = "checkpoint.json"


@dataclass(frozen=True)
class Manifest:
    """The manifest of a complete checkpoint; its file is written last.

    Attributes:
        step: steps that were done.
        ranks: each wrote a part.
        score: higher is better; None where nothing was measured.
        size: bytes on disk.
    """

    step: int
    ranks: int
    score: float | None
    size: int


def checkpoint_name(step: int) -> str:
    """Name of the folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def whole_checkpoints(step_folder: Path) -> list[tuple[Path, Manifest]]:
    """The complete checkpoints of a step with their manifests, oldest first."""
    found = []
    for file in (step_folder / CHECKPOINTS).glob(f"step-*/{CHECKPOINT_MANIFEST}"):
        try:
            found.append((file.parent, Manifest(**json.loads(file.read_text(encoding="utf-8")))))
        except (OSError, ValueError, TypeError):
            # Not readable, no JSON, or not an object with these keys.
            continue
    return sorted(found, key=lambda item: item[1].step)


def model_source(config: RunConfig, run: Path, name: StepName) -> str:
    """The model that step 1 or 2 made, or the finished one given in its place."""
    finished = {"sft": config.models.sft, "reward": config.models.trained_reward}.get(name)
    return finished or str(run / BY_NAME[name].folder / "model")
