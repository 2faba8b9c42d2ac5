"""Model families, one file each: all that the project knows of an architecture. No torch.

A family's file is named after its `model_type` in config.json and holds one `FAMILY`. What has no
file is `generic`: it trains all the same, without a plan, and decodes by its own forward pass.
"""

from __future__ import annotations

import importlib
import pkgutil

from engine.families.family import Family
from engine.families.generic import GENERIC

_MODULES = {module.name for module in pkgutil.iter_modules(__path__)} - {"family", "generic"}
KNOWN_FAMILIES: dict[str, Family] = {
    name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in sorted(_MODULES)
}


def family_of(model_type: object) -> Family:
    """The family of a config's `model_type`; the generic one where it is not known."""
    return KNOWN_FAMILIES.get(str(model_type), GENERIC)
