"""Which model a path means: a run, a step of it, a checkpoint, or a name on the Hub."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.config.steps import BY_FOLDER, STEPS


class PathError(ValueError):
    """A path that cannot be talked to, with the reason and what to give instead."""


@dataclass(frozen=True)
class ModelPath:
    """A model to talk to.

    Attributes:
        location: a local folder, or a Hub id.
        name: what the model is called on the screen: actor, actor_ema, dpo, sft, or the folder's
            name.
        run: the run that the model belongs to, if any.
    """

    location: str
    name: str
    run: Path | None = None


def find_model(path: str, tokenizer: str | None = None) -> ModelPath | None:
    """Find the model in a local folder.

    Args:
        path: a run folder (its EMA actor, else its actor or DPO model, else its SFT model), a
            step's folder, any Hugging Face folder, or the output of the original DeepSpeed-Chat.
        tokenizer: folder or Hub id of the tokenizer, where the model's folder has none.

    Returns:
        the model, or None where the path is no folder but may be a name (Hub id, embedded:NAME).

    Raises:
        PathError: nothing there that answers.
    """
    folder = Path(path).expanduser()
    if not folder.exists():
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise PathError(
                f"There is no folder {path}. Give a run folder, a model folder or a Hub id."
            )
        return None
    if not folder.is_dir():
        raise PathError(f"{path} is a file; give the folder that holds config.json and weights.")
    found = _in_run(folder) or _in_step(folder) or _as_model(folder)
    _check_folder(Path(found.location), tokenizer)
    return found


def relatives(run: Path) -> dict[str, str]:
    """Return the finished models of a run by name: sft, dpo, actor, actor_ema, reward."""
    places = {
        step.model_name(name): run / step.folder / name
        for step in STEPS
        for name in step.chat_models or step.models
    }
    return {name: str(place) for name, place in places.items() if _is_model(place)}


def _in_run(folder: Path) -> ModelPath | None:
    steps = [step.folder for step in STEPS if (folder / step.folder).is_dir()]
    if not steps:
        return None
    # The last step of a run made the best of it.
    for step in sorted(STEPS, key=lambda step: -step.number):
        if step.chat_models and (found := _in_step(folder / step.folder)):
            return found
    raise PathError(
        f"The run {folder} has no finished model to talk to yet (it has {', '.join(steps)}); "
        "wait for its step 1."
    )


def _in_step(folder: Path) -> ModelPath | None:
    step = BY_FOLDER.get(folder.resolve().name)
    if step is None:
        return None
    if not step.chat_models:
        raise PathError(
            f"{folder} holds a reward model: it scores answers and cannot talk. Give the run's "
            "folder; /score shows its scores there."
        )
    for name in step.chat_models:
        if _is_model(folder / name):
            return _as_model(folder / name)
    return None


def _as_model(folder: Path) -> ModelPath:
    whole = folder.resolve()
    step = BY_FOLDER.get(whole.parent.name)
    if step is None:
        return ModelPath(str(folder), whole.name)
    return ModelPath(str(folder), step.model_name(whole.name), whole.parent.parent)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and bool(_weights(folder))


def _weights(folder: Path) -> list[Path]:
    return [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]


def _check_folder(folder: Path, tokenizer: str | None) -> None:
    if not (folder / "config.json").is_file():
        raise PathError(
            f"{folder} is no model: it has no config.json. Give a run folder or a folder that "
            "holds config.json, weights and a tokenizer."
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PathError(f"{folder}/config.json is damaged ({error}).") from None
    architectures = config.get("architectures") or []
    if any("SequenceClassification" in each for each in architectures) or _has_value_head(folder):
        raise PathError(
            f"{folder} holds a reward model ({', '.join(architectures)}): it scores answers and "
            "cannot talk. Give the folder of an actor or SFT model."
        )
    if not _weights(folder):
        raise PathError(f"{folder} has no weights (*.safetensors or pytorch_model.bin).")
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    if tokenizer is None and not any((folder / name).is_file() for name in names):
        raise PathError(
            f"{folder} has no complete tokenizer. Give the one of its base model: "
            f"--tokenizer {_base_model(config)}"
        )


def _base_model(config: Mapping[str, object]) -> str:
    base = config.get("_name_or_path")
    return str(base) if base else f"OWNER/NAME of a {config.get('model_type')} model"


def _has_value_head(folder: Path) -> bool:
    """Tell whether a pickle is the original's reward model, by its names, without unpickling."""
    file = folder / "pytorch_model.bin"
    if not zipfile.is_zipfile(file):
        return False
    with zipfile.ZipFile(file) as archive:
        return any(
            b"v_head.weight" in archive.read(name)
            for name in archive.namelist()
            if name.endswith("data.pkl")
        )
