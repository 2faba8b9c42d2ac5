"""What dtype=auto comes to on GPUs that this machine does not have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

from engine import precision


@pytest.fixture
def gpu(monkeypatch):
    """Let torch and DeepSpeed see a GPU of some compute capability."""

    def install(major: int, minor: int, hip: str | None = None) -> None:
        properties = SimpleNamespace(major=major, minor=minor)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        # torch emulates bf16 on every older GPU, slower than fp32.
        monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda device: True)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(precision, "get_accelerator", CUDA_Accelerator)

    return install


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("GTX 1080", (6, 1), torch.float32),
        ("V100", (7, 0), torch.float16),
        ("T4", (7, 5), torch.float16),
        ("A100", (8, 0), torch.bfloat16),
        ("L4", (8, 9), torch.bfloat16),
        ("H200", (9, 0), torch.bfloat16),
    ],
)
def test_auto_takes_what_a_gpu_computes_in_and_no_emulation(name, capability, expected, gpu):
    gpu(*capability)
    assert precision.resolve_dtype("auto") is expected
    assert precision.resolve_dtype("bf16") is torch.bfloat16


def test_auto_takes_what_the_gpus_of_all_ranks_compute_in(gpu, monkeypatch):
    gpu(8, 0)
    # The other rank has a T4.
    theirs = precision._FASTEST_FIRST.index(torch.float16)
    monkeypatch.setattr(precision, "max_over_ranks", lambda ours: max(ours, theirs))
    assert precision.resolve_dtype("auto") is torch.float16


def test_auto_takes_bf16_with_rocm(gpu):
    gpu(9, 0, hip="6.2")
    assert precision.resolve_dtype("auto") is torch.bfloat16


def test_fp16_is_refused_where_it_is_not_supported(gpu):
    gpu(6, 1)
    with pytest.raises(ValueError, match="dtype=fp16: this cuda cannot compute in fp16"):
        precision.resolve_dtype("fp16")
