"""Which number format a run computes in."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator

_BY_NAME = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_dtype(name: str) -> torch.dtype:
    """The format of `dtype`; auto is bf16 where the hardware is fast at it.

    That is CUDA with bf16, or a CPU with AMX or AVX512-BF16. Else auto is fp16 on CUDA, fp32 on a
    CPU.

    Raises:
        ValueError: fp16 on a device that cannot compute in it.
    """
    accelerator = get_accelerator()
    on_cpu = accelerator.device_name() == "cpu"
    if name == "auto":
        if on_cpu:
            return torch.bfloat16 if _cpu_is_fast_at_bf16() else torch.float32
        return torch.bfloat16 if accelerator.is_bf16_supported() else torch.float16
    if name == "fp16" and not accelerator.is_fp16_supported():
        raise ValueError(
            f"dtype=fp16: this {accelerator.device_name()} cannot compute in fp16; "
            "set dtype=bf16 or dtype=fp32"
        )
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """fp32, bf16 or fp16."""
    return next(name for name, value in _BY_NAME.items() if value == dtype)


def _cpu_is_fast_at_bf16() -> bool:
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
