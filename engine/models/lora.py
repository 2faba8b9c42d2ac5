"""LoRA (Hu et al. 2021, arXiv 2106.09685) through peft, and the optimizer's parameter groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.config.schema import LoraConfig
from engine.families import family_of
from engine.models.folders import ModelError

_ADAPTER = "default"


def add_lora(
    model: nn.Module, config: LoraConfig, keep_trainable: Sequence[str] = ("score",)
) -> nn.Module:
    """Put adapters into a causal language model or a `RewardModel`, in place.

    Base weights stay as trainable as they are, unless `config.only`.

    Args:
        model: has a `config` of transformers.
        config: rank, alpha, dropout and targets; no targets means those of the family.
        keep_trainable: names of modules that train also under `config.only`.

    Raises:
        ModelError: no linear layer matches the targets, or one whose weight is an embedding too.
    """
    trained_before = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = _target_names(model, config.targets)
    peft.inject_adapter_in_model(
        peft.LoraConfig(
            r=config.rank,
            lora_alpha=config.rank if config.alpha is None else config.alpha,
            lora_dropout=config.dropout,
            target_modules="|".join(re.escape(name) for name in names),
            fan_in_fan_out=isinstance(model.get_submodule(names[0]), Conv1D),
        ),
        model,
        _ADAPTER,
    )
    if not config.only:
        for parameter in trained_before:
            parameter.requires_grad_(True)
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in keep_trainable:
            module.requires_grad_(True)
    return model


def _target_names(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    linear = [
        name for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))
    ]
    patterns = patterns or family_of(model.config.model_type).lora_targets
    matched = [name for name in linear if any(re.search(pattern, name) for pattern in patterns)]
    if not matched:
        examples = ", ".join(linear[:4] + linear[-1:])
        raise ModelError(
            f"the LoRA targets {list(patterns)} match none of the {len(linear)} linear layers of "
            f"this {model.config.model_type} model; its layers are called {examples}"
        )
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tied = [name for name in matched if id(model.get_submodule(name).weight) in embeddings]
    if tied:
        raise ModelError(
            f"the LoRA targets {list(patterns)} match {tied[0]}, whose weight is the embedding: "
            "a merged model has one tensor for both; choose targets without it"
        )
    return matched


def lora_layers(model: nn.Module) -> list[LoraLayer]:
    """All layers that carry adapters."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def describe_lora(model: nn.Module) -> str:
    """One line on the adapters of a model, for the log."""
    size = sum(
        _full_size(parameter)
        for name, parameter in model.named_parameters()
        if _is_adapter(name) and parameter.requires_grad
    )
    return f"LoRA: {len(lora_layers(model))} modules, {size / 1e6:.2f} M trainable parameters"


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes bit for bit what its base weights alone compute.

    Raises:
        ModelError: the model has no adapters.
    """
    layers = lora_layers(model)
    if not layers:
        raise ModelError("this model has no adapters to switch off; it was built without LoRA")
    switched = [layer for layer in layers if not layer.disable_adapters]
    try:
        for layer in switched:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in switched:
            layer.enable_adapters(True)


@dataclass(frozen=True)
class MergedTensor:
    """One tensor of a model as it is without adapters, and what it is computed from.

    Attributes:
        inputs: parameters or a buffer of the model; under ZeRO-3 they may be sharded.
        layer: whose adapters are merged into it; None for what carries none.
    """

    inputs: list[Tensor]
    layer: LoraLayer | None = None

    @property
    def shape(self) -> torch.Size:
        """Its whole shape, also where it is sharded."""
        return getattr(self.inputs[0], "ds_shape", self.inputs[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """The format in which the model holds it."""
        return self.inputs[0].dtype

    def value(self, inputs: Sequence[Tensor]) -> Tensor:
        """Compute it from the whole values of its inputs, of any float dtype; in `dtype`."""
        if self.layer is None:
            return inputs[0].to(self.dtype)
        return merged_weight(self.layer, inputs)


def merged_tensors(model: nn.Module) -> dict[str, MergedTensor]:
    """The tensors of a model by the names they have without adapters; tied ones are one object."""
    adapted = {
        f"{name}.base_layer.weight": module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
    }
    merged: dict[str, MergedTensor] = {}
    seen: dict[int, MergedTensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if _is_adapter(name):
            continue
        layer = adapted.get(name)
        inputs = [tensor] if layer is None else merge_inputs(layer)
        merged[name.replace(".base_layer.", ".")] = seen.setdefault(
            id(tensor), MergedTensor(inputs, layer)
        )
    return merged


def merge_inputs(layer: LoraLayer) -> list[Tensor]:
    """The base weight of a layer, then A and B of each of its active adapters."""
    factors = [
        part[adapter].weight
        for adapter in _active_adapters(layer)
        for part in (layer.lora_A, layer.lora_B)
    ]
    return [layer.get_base_layer().weight, *factors]


@torch.no_grad()
def merged_weight(layer: LoraLayer, inputs: Sequence[Tensor] | None = None) -> Tensor:
    """Base weight plus the updates of one layer: a new tensor, summed in fp32 and rounded once.

    Args:
        layer: gives scaling, layout and the format of the result.
        inputs: whole values of `merge_inputs(layer)`; by default those themselves.
    """
    base, *factors = merge_inputs(layer) if inputs is None else inputs
    total = base.to(torch.float32, copy=True)
    for adapter, down, up in zip(_active_adapters(layer), factors[::2], factors[1::2], strict=True):
        left, right = (down.T, up.T) if layer.fan_in_fan_out else (up, down)
        # In place: the sum of a large layer takes one fp32 copy of it, not three.
        total.addmm_(left.float(), right.float(), alpha=layer.scaling[adapter])
    return total.to(layer.get_base_layer().weight.dtype)


def _active_adapters(layer: LoraLayer) -> list[str]:
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def parameter_groups(
    model: nn.Module, learning_rate: float, weight_decay: float, lora_learning_rate: float
) -> list[dict[str, Any]]:
    """Groups for the optimizer: decayed weights, biases and norms without decay, adapters.

    Only parameters that train, no empty group. Each has a `name`: decay, no_decay or lora.
    """
    groups: dict[str, dict[str, Any]] = {
        "decay": {"lr": learning_rate, "weight_decay": weight_decay},
        "no_decay": {"lr": learning_rate, "weight_decay": 0.0},
        "lora": {"lr": lora_learning_rate, "weight_decay": weight_decay},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        # Biases and the weights of all norms are the parameters with one dimension.
        one_dimensional = len(getattr(parameter, "ds_shape", parameter.shape)) < 2
        kind = "lora" if _is_adapter(name) else "no_decay" if one_dimensional else "decay"
        groups[kind].setdefault("params", []).append(parameter)
    return [{"name": kind, **group} for kind, group in groups.items() if "params" in group]


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _full_size(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())
