"""Which model a name in a configuration means. Imports neither torch nor transformers."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from engine.models import catalogue, embedded
from engine.models.folders import ModelError, read_json

_EMBEDDED = "embedded:"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def resolve_model(name: str) -> str:
    """Path or Hub id of a model by the name that a configuration gives it.

    Args:
        name: `embedded:NAME` (built at its first use), a local folder, a model that was fetched
            with `dschat models get`, or a Hub id.

    Raises:
        ModelError: no such folder or name, or a model that is not there yet.
    """
    if name.startswith(_EMBEDDED):
        return str(embedded.build(name.removeprefix(_EMBEDDED)))
    local = Path(name).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(
                f"the folder {name!r} holds no config.json, so it is no Hugging Face model; name "
                "the folder that holds config.json and the weights"
            )
        return str(local)
    if name in catalogue.MODELS:
        path = catalogue.model_path(name)
        if path is None:
            raise ModelError(f"{name} is not on this machine yet; run: dschat models get {name}")
        return str(path)
    if local.is_absolute() or name.startswith(("./", "../", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelError(f"the model folder {name!r} does not exist; check the path")
    return name


def local_folder(name: str) -> Path | None:
    """Where the model of a name lies on this machine; None where it does not.

    Looks at embedded models that were built, at models that were fetched, at folders, and into
    the Hub's cache; never at the network.
    """
    if name.removeprefix(_EMBEDDED) in embedded.CONFIGS:
        return embedded.built_folder(name.removeprefix(_EMBEDDED))
    if name in catalogue.MODELS:
        return catalogue.model_path(name)
    folder = Path(name).expanduser()
    if folder.exists():
        return folder
    return _downloaded(name) if _HUB_ID.fullmatch(name) else None


def local_config(name: str) -> dict[str, Any] | None:
    """What config.json says of a model by its name; None where that needs a download."""
    if name.removeprefix(_EMBEDDED) in embedded.CONFIGS:
        return embedded.CONFIGS[name.removeprefix(_EMBEDDED)]
    folder = local_folder(name)
    return None if folder is None else read_json(folder / "config.json")


def _downloaded(name: str) -> Path | None:
    """Where the Hub's cache holds a model; None if it does not."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(config).parent if isinstance(config, str) else None


def is_local(path: str) -> bool:
    """Tell whether a model path is a folder here, which then never touches the network."""
    return os.path.isdir(path)
