"""Model folders on disk: written whole, checked for completeness. No torch, no transformers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


class ModelError(ValueError):
    """A model that cannot be used; the message names it, what is wrong and what to do."""


def missing_parts(folder: str | Path) -> list[str]:
    """What a folder lacks to be a complete Hugging Face checkpoint; empty if it is one.

    Looks at config.json, the safetensors weights (every file of the index there, none cut off)
    and the tokenizer.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [f"the folder {folder}"]
    missing = []
    if read_json(folder / "config.json") is None:
        missing.append("config.json")
    missing += [name for name in _weight_files(folder) if not _is_whole(folder / name)]
    if read_json(folder / "tokenizer_config.json") is None:
        missing.append("tokenizer_config.json")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        missing.append(" or ".join(_TOKENIZER_FILES))
    return missing


def is_complete_model(folder: str | Path) -> bool:
    """Tell whether a folder holds a config, all weights and a tokenizer."""
    return not missing_parts(folder)


@contextmanager
def new_folder(folder: str | Path, replace: bool = True) -> Iterator[Path]:
    """A sibling folder to write into, renamed to `folder` at the end unless an error occurs.

    Args:
        replace: what happens to a `folder` that is there by then: it is replaced, or it stays and
            the new one is dropped (another process was faster).
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.new"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        if replace and folder.exists():
            replaced = temporary.with_suffix(".old")
            folder.rename(replaced)
            temporary.rename(folder)
            shutil.rmtree(replaced)
            return
        try:
            temporary.rename(folder)
        except OSError:
            # Another process was faster: a folder that is not empty cannot be renamed over.
            if replace or not folder.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def cache_folder() -> Path:
    """The user's own folder for built and fetched models, mode 0700, made if missing."""
    root = platformdirs.user_cache_path("dschat")
    folder = root / "models"
    for path in (root, folder):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _weight_files(folder: Path) -> list[str]:
    index = read_json(folder / _INDEX)
    if index is None:
        return [_INDEX] if (folder / _INDEX).exists() else ["model.safetensors"]
    return sorted(set(index.get("weight_map", {}).values())) or [_INDEX]


def _is_whole(path: Path) -> bool:
    """Compare a safetensors file's size with what its header promises."""
    try:
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            if not 2 <= header_size <= path.stat().st_size - 8:
                return False
            header = json.loads(file.read(header_size))
    except (OSError, ValueError):
        return False
    header.pop("__metadata__", None)
    ends = [tensor["data_offsets"][1] for tensor in header.values()]
    return path.stat().st_size == 8 + header_size + max(ends, default=0)
