"""What the entries of all steps share: the command line, the ranks, the order of work."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.config.loading import ConfigError, load_config
from engine.config.steps import BY_NAME, StepName

if TYPE_CHECKING:
    from engine.trainers.context import StepContext


class Trainer(Protocol):
    """What a step's trainer offers."""

    def train(self) -> bool:
        """Train to the end; False where it stopped on request, with a checkpoint."""

    def save(self) -> None:
        """Write the models that the step leaves."""


def run_step(name: StepName, load_trainer: Callable[[], Callable[[StepContext], Trainer]]) -> None:
    """Train one step and save its models, as a rank that the `deepspeed` launcher started.

    Exits with 2 when the configuration is refused.

    Args:
        name: of the step.
        load_trainer: imports the class of its trainer, once the arguments are checked.
    """
    step = BY_NAME[name]
    parser = argparse.ArgumentParser(description=f"Step {step.number}: {step.title}")
    parser.add_argument("--config", type=Path, required=True, help="the run's run.yaml")
    parser.add_argument("--output", type=Path, required=True, help="the run's folder")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config)
    except ConfigError as error:
        parser.error(str(error))
    from engine.distributed import process_group
    from engine.trainers.context import StepContext

    with process_group():
        trainer = load_trainer()(StepContext.create(config, arguments.output, name))
        if trainer.train():
            trainer.save()
