"""Save LoRA adapters alone, as peft and its users read them."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.distributed import long_waits, rank
from engine.models.folders import new_folder
from engine.models.reward import RewardModel
from engine.models.save import current_values

_ADAPTER = "default"


def save_adapters(model: nn.Module, base: str, folder: str | Path) -> None:
    """Write the adapters, and the head of a reward model; `PeftModel.from_pretrained` reads them.

    All ranks call it; rank 0 writes, and all return when the folder is there.

    Args:
        model: trained with adapters alone: its base weights are still those of `base`.
        base: folder or Hub id of the model that the adapters belong to.
        folder: replaced if it is there.
    """
    plain = model.model if isinstance(model, RewardModel) else model
    config = copy.copy(model.peft_config[_ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.task_type = "CAUSAL_LM"
    kept = [".lora_A.", ".lora_B."]
    if isinstance(model, RewardModel):
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
        # Layers were named as seen from the wrapper, which is not saved.
        patterns = config.target_modules.split("|")
        config.target_modules = "|".join(name.removeprefix(r"model\.") for name in patterns)
        kept.append("score.")
    # peft puts its own wrapper around the model, and leaves the adapter's name to the reader.
    weights: dict[str, Tensor] = {}
    for name, parameter in plain.named_parameters():
        if any(mark in f"{name}." for mark in kept):
            with current_values([parameter]) as (value,):
                saved_as = "base_model.model." + name.replace(f".{_ADAPTER}.", ".")
                weights[saved_as] = value.cpu().clone(memory_format=torch.contiguous_format)
    with long_waits():
        if rank() == 0:
            with new_folder(folder) as temporary:
                config.save_pretrained(str(temporary))
                save_file(weights, temporary / "adapter_model.safetensors", {"format": "pt"})
        if dist.is_initialized():
            dist.barrier()
