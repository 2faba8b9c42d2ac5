"""Save complete Hugging Face checkpoints, a file of the weights at a time."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from engine.distributed import long_waits, rank
from engine.models.folders import new_folder
from engine.models.lora import MergedTensor, merged_tensors
from engine.models.reward import RewardModel

# Whole values of parameters and buffers while the context lasts; a collective of all ranks.
Values = Callable[[Sequence[Tensor]], AbstractContextManager[list[Tensor]]]

# Bytes of weights in a file, and so of the tensors that rank 0 holds on the host.
_SHARD_BYTES = 5 * 10**9
# A repeated block of a model: the name up to its number.
_BLOCK = re.compile(r".*?\.\d+\.")


@contextmanager
def current_values(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The values that parameters and buffers have now, gathered where ZeRO-3 has sharded them."""
    sharded = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not sharded:
        yield [tensor.detach() for tensor in tensors]
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded):
        yield [tensor.detach() for tensor in tensors]


def save_model(
    model: PreTrainedModel | RewardModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    values: Values = current_values,
) -> None:
    """Write weights, config, generation config and tokenizer; LoRA merged, ZeRO-3 gathered.

    All ranks call it; rank 0 writes, and all return when the folder is there. It appears whole or
    not at all, and replaces an older one. Rank 0 holds the tensors of one file on the host, and
    one more while it is gathered.

    Args:
        model: what is saved; it is left as it is.
        tokenizer: saved beside it.
        folder: made, or replaced.
        values: gives the values to write, by default those that the model has now.

    Raises:
        OSError: not writable, or the disk is full.
    """
    plain = model.model if isinstance(model, RewardModel) else model
    with long_waits():
        with new_folder(folder) if rank() == 0 else nullcontext() as temporary:
            if temporary is not None:
                _set_special_tokens(plain, tokenizer)
                # Without a tensor it writes all but the weights.
                plain.save_pretrained(temporary, state_dict={})
                tokenizer.save_pretrained(temporary)
            _write_weights(plain, values, temporary)
        if dist.is_initialized():
            dist.barrier()


def _write_weights(model: PreTrainedModel, values: Values, folder: Path | None) -> None:
    """Write all tensors into files of `_SHARD_BYTES`; without a folder only help to gather them."""
    tensors = _without_ties(model, merged_tensors(model))
    # Names and shapes of all that is written, in transformers' order, without a value of it.
    written = revert_weight_conversion(model, _meta(tensors))
    split = split_state_dict_into_shards_factory(
        written,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    pending: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)

    def keep(read: dict[str, Tensor]) -> None:
        assert folder is not None
        for name, value in revert_weight_conversion(model, read).items():
            file = split.tensor_to_filename[name]
            pending[file][name] = value.contiguous()
            if len(pending[file]) == len(split.filename_to_tensors[file]):
                save_file(pending.pop(file), folder / file, {"format": "pt"})

    for part in _parts(model, tensors, written):
        if folder is None:
            for tensor in part.values():
                with values(tensor.inputs):
                    pass
        else:
            # No name here may hold what is written already: it would be one tensor more.
            keep({name: _read(tensor, values) for name, tensor in part.items()})
    if folder is not None and split.is_sharded:
        parameters = sum(
            tensor.shape.numel()
            for tensor in tensors.values()
            if isinstance(tensor.inputs[0], nn.Parameter)
        )
        metadata = {"total_parameters": parameters, **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")


@torch.no_grad()
def _read(tensor: MergedTensor, values: Values) -> Tensor:
    """One merged tensor on the CPU."""
    with values(tensor.inputs) as inputs:
        value = tensor.value(inputs).cpu()
        # DeepSpeed may use the memory of a gathered parameter again.
        gathered = hasattr(tensor.inputs[0], "ds_id") and value.data_ptr() == inputs[0].data_ptr()
        return value.clone() if gathered else value


def _without_ties(
    model: PreTrainedModel, tensors: Mapping[str, MergedTensor]
) -> dict[str, MergedTensor]:
    """One name for each tensor, of several the one that a loading model fills the others from."""
    filled = getattr(model, "all_tied_weights_keys", {})
    ignored = model._keys_to_ignore_on_save or ()
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        known = names.setdefault(id(tensor), name)
        if known in filled and name not in filled:
            names[id(tensor)] = name
    return {name: tensors[name] for name in names.values() if name not in ignored}


def _parts(
    model: PreTrainedModel, tensors: Mapping[str, MergedTensor], written: Mapping[str, Tensor]
) -> list[dict[str, MergedTensor]]:
    """The tensors that must be there together to become those of the files, in their order.

    Each alone for most families. Some, such as mixtures of experts, have other tensors in memory
    than in their files: those of a block then belong together, or all if that is not enough.
    """
    if _shapes(written) == _shapes(_meta(tensors)):
        return [{name: tensors[name]} for name in written]
    blocks: defaultdict[str, dict[str, MergedTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        block = _BLOCK.match(name)
        blocks[name if block is None else block.group()][name] = tensor
    position = {name: index for index, name in enumerate(written)}
    parts = []
    shapes: dict[str, tuple[int, ...]] = {}
    for part in blocks.values():
        becomes = _shapes(revert_weight_conversion(model, _meta(part)))
        parts.append((min(position.get(name, 0) for name in becomes), part))
        shapes |= becomes
    if shapes != _shapes(written):
        return [dict(tensors)]
    return [part for _, part in sorted(parts, key=lambda item: item[0])]


def _meta(tensors: Mapping[str, MergedTensor]) -> dict[str, Tensor]:
    return {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


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
