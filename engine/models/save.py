"""Save complete Hugging Face checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.models.folders import new_folder
from engine.models.lora import merged_state_dict
from engine.models.reward import RewardModel


def save_model(
    model: PreTrainedModel | RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
) -> None:
    """Write weights, config, generation config and tokenizer; LoRA merged, ZeRO-3 gathered.

    All ranks call it; rank 0 writes, and all return when the folder is there. It appears whole or
    not at all, and replaces an older one.

    Raises:
        OSError: not writable, or the disk is full.
    """
    plain = model.model if isinstance(model, RewardModel) else model
    weights = merged_state_dict(plain)
    if not dist.is_initialized() or dist.get_rank() == 0:
        _set_special_tokens(plain, tokenizer)
        with new_folder(folder) as temporary:
            plain.save_pretrained(temporary, state_dict=weights)
            tokenizer.save_pretrained(temporary)
    if dist.is_initialized():
        dist.barrier()


def _set_special_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's EOS and pad ids into the configs, beside EOS ids they have."""
    generation = model.generation_config if model.can_generate() else None
    for config in filter(None, (model.config, generation)):
        config.pad_token_id = tokenizer.pad_token_id
        known = config.eos_token_id
        if not isinstance(known, list):
            config.eos_token_id = tokenizer.eos_token_id
        elif tokenizer.eos_token_id not in known:
            config.eos_token_id = [tokenizer.eos_token_id, *known]
    if generation is not None:
        try:
            generation.validate(strict=True)
        except ValueError:
            # Some models come with a temperature but sampling off, which is refused at saving.
            generation.do_sample = True
