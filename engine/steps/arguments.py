"""The command line that the three steps share."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.config.loading import ConfigError, load_config
from engine.config.schema import RunConfig


def parse_arguments(description: str) -> tuple[RunConfig, Path]:
    """The configuration and the run folder that the launcher was given.

    Exits with 2 when the configuration is refused.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", type=Path, required=True, help="the run's run.yaml")
    parser.add_argument("--output", type=Path, required=True, help="the run's folder")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    arguments = parser.parse_args()
    try:
        return load_config(arguments.config), arguments.output
    except ConfigError as error:
        parser.error(str(error))
