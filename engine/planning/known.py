"""Shapes of models that are planned without a network: known_shapes.yaml. No torch."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import yaml


def known_config(name: str) -> dict[str, Any] | None:
    """The sizes in the config.json of a model by its name on the Hub; None if not in the table."""
    return _table().get(name)


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files("engine.planning").joinpath("known_shapes.yaml").read_text("utf-8")
    return {name: entry["config"] for entry in yaml.safe_load(text) for name in entry["names"]}
