"""Which number format a run computes in."""

from __future__ import annotations

import torch
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator

from engine.distributed import max_over_ranks

# A device that supports one of these supports all that follow.
_FASTEST_FIRST = (torch.bfloat16, torch.float16, torch.float32)
_BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(name: str) -> torch.dtype:
    """The format of `dtype`; auto is the fastest one that is safe on the devices of all ranks.

    That is bf16 where the hardware computes in it: a GPU with units for it, or a CPU with AMX or
    AVX512-BF16. Elsewhere it is fp16 on a GPU that supports it, and else fp32. With auto a
    collective of all ranks.

    Raises:
        ValueError: fp16 on a device that does not support it.
    """
    accelerator = get_accelerator()
    if name == "auto":
        slowest = max_over_ranks(_FASTEST_FIRST.index(_best(accelerator)))
        return _FASTEST_FIRST[int(slowest)]
    if name == "fp16" and not accelerator.is_fp16_supported():
        raise ValueError(
            f"dtype=fp16: this {accelerator.device_name()} cannot compute in fp16; "
            "set dtype=bf16 or dtype=fp32"
        )
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, bf16 or fp16."""
    return next(name for name, value in _BY_NAME.items() if value == dtype)


def _best(accelerator: DeepSpeedAccelerator) -> torch.dtype:
    on_cpu = accelerator.device_name() == "cpu"
    if on_cpu:
        bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    elif accelerator.device_name() == "cuda":
        # DeepSpeed's check includes emulation, which older GPUs have: slower there than fp32.
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        bf16 = accelerator.is_bf16_supported()
    if bf16:
        return torch.bfloat16
    return torch.float32 if on_cpu or not accelerator.is_fp16_supported() else torch.float16
