"""MixZ: frozen weights kept as int8 between uses, dequantised when ZeRO-3 gathers them.

The layout is that of DeepSpeed's CUDA quantizer (ZeRO++, arXiv 2306.10209): symmetric blocks, one
fp32 scale each. What DeepSpeed 0.19.8 gets wrong around it is worked around here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer, Init
from torch import Tensor, nn

from engine.distributed import sum_over_ranks
from engine.operators import why_not_loaded

# DeepSpeed leaves tensors alone that would save little.
_SMALLEST_TENSOR = 500_000
_SMALLEST_SHARD = 2_048
# Its blocks are found for shards of whole groups of 8 alone.
_SHARD_MULTIPLE = 8


class TorchQuantizer:
    """What DeepSpeed's CUDA extension offers, in torch, for devices where it does not build."""

    Symmetric, Asymmetric = 0, 1

    @staticmethod
    def quantize(values: Tensor, groups: int, bits: int, kind: int) -> tuple[Tensor, Tensor]:
        """Integers `(numel,)` and one scale a group, `(groups,)`."""
        blocks = values.detach().reshape(groups, -1).float()
        scales = blocks.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
        # A block of zeros needs no scale, and must not divide by one of 0.
        scales = scales.masked_fill(scales == 0, 1.0)
        integers = (blocks / scales).round_().to(torch.int8)
        return integers.reshape(values.shape), scales.reshape(-1)

    @staticmethod
    def dequantize(integers: Tensor, scales: Tensor, groups: int, bits: int, kind: int) -> Tensor:
        """Values in fp16, as the CUDA extension gives them, in the shape of `integers`."""
        blocks = integers.reshape(groups, -1).float() * scales.reshape(groups, 1)
        return blocks.to(torch.float16).reshape(integers.shape)


@dataclass(frozen=True)
class FrozenBytes:
    """Memory of the frozen weights over all ranks.

    Attributes:
        before, after: bytes of all frozen weights.
        eligible_before, eligible_after: bytes of those that are large enough.
        quantized: how many tensors are kept as int8.
    """

    before: int
    after: int
    eligible_before: int
    eligible_after: int
    quantized: int

    def __str__(self) -> str:
        return (
            f"MixZ: frozen weights {self.before / 1e6:.1f} MB before, {self.after / 1e6:.1f} MB "
            f"after; {self.quantized} large tensors {self.eligible_before / 1e6:.1f} MB to "
            f"{self.eligible_after / 1e6:.1f} MB"
        )


def install_quantizer() -> None:
    """Make DeepSpeed able to quantise weights; call on all ranks, before a model is partitioned."""
    if CUDAQuantizer.quantizer_cuda_module is None and why_not_loaded("QuantizerBuilder"):
        CUDAQuantizer.quantizer_cuda_module = TorchQuantizer()
    # On one rank DeepSpeed dequantises with an attribute of the class that nothing sets.
    if not hasattr(Init, "quantizer_module"):
        Init.quantizer_module = CUDAQuantizer()


def describe_quantizer() -> str:
    """Which quantizer `install_quantizer` took, and why where it is not DeepSpeed's."""
    if isinstance(CUDAQuantizer.quantizer_cuda_module, TorchQuantizer):
        reason = why_not_loaded("QuantizerBuilder")
        return f"weights are quantised by torch, since DeepSpeed's kernels do not load: {reason}"
    return "weights are quantised by DeepSpeed's kernels"


@torch.no_grad()
def quantize_frozen(model: nn.Module) -> FrozenBytes:
    """Keep the large frozen weights of a ZeRO-3 model as int8 from now on.

    They must have been partitioned while they were trainable: DeepSpeed fills those that were
    frozen before with NaN. Its own `quantize_nontrainable_params` refuses bf16.

    Raises:
        ValueError: no weight is large enough, so that nothing would be gained.
    """
    quantizer = CUDAQuantizer()
    counts = [0, 0, 0, 0]
    quantized = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            continue
        shards = [
            name
            for name in ("ds_tensor", "ds_secondary_tensor")
            if getattr(parameter, name, None) is not None
        ]
        before = sum(_bytes(getattr(parameter, name)) for name in shards)
        eligible = parameter.ds_numel > _SMALLEST_TENSOR and all(
            getattr(parameter, name).numel() > _SMALLEST_SHARD
            and getattr(parameter, name).numel() % _SHARD_MULTIPLE == 0
            # Padding of the last shard would tear the blocks of a gathered tensor apart.
            and parameter.ds_numel % getattr(parameter, name).numel() == 0
            for name in shards
        )
        if eligible:
            quantized += 1
            for name in shards:
                setattr(parameter, name, _quantized(getattr(parameter, name), quantizer))
        after = sum(_bytes(getattr(parameter, name)) for name in shards)
        counts[0] += before
        counts[1] += after
        counts[2] += before if eligible else 0
        counts[3] += after if eligible else 0
    if not quantized:
        raise ValueError(
            f"mixz.enabled, but no frozen weight has more than {_SMALLEST_TENSOR} elements, so "
            "there is nothing to gain with this model; set mixz.enabled=false"
        )
    before, after, large_before, large_after = map(int, sum_over_ranks(*counts))
    return FrozenBytes(before, after, large_before, large_after, quantized)


def _quantized(shard: Tensor, quantizer: CUDAQuantizer) -> Tensor:
    """The shard as int8, with what DeepSpeed notes on it, where it was (host or device)."""
    integers, scales = quantizer.quantize(shard)
    integers = integers.to(shard.device)
    integers.ds_quant_scale = scales.to(shard.device)
    for note in ("ds_numel", "status", "final_location"):
        setattr(integers, note, getattr(shard, note))
    integers.requires_grad = False
    return integers


def _bytes(shard: Tensor) -> int:
    scales = getattr(shard, "ds_quant_scale", None)
    own = shard.numel() * shard.element_size()
    return own if scales is None else own + scales.numel() * scales.element_size()
