"""What the benchmarks say of a device that is not here."""

from __future__ import annotations

import pytest

from benchmarks.gpu import peak_tflops


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla T4", 65),
        # Other devices than the A10 and the L40.
        ("NVIDIA A10G", None),
        ("NVIDIA A1000 Laptop GPU", None),
        ("CPU", None),
    ],
)
def test_mfu_is_of_the_device_that_the_driver_names(name, expected):
    """Expected: dense bf16 or fp16 TFLOPs of NVIDIA's data sheets."""
    assert peak_tflops(name, "bf16") == expected
    assert peak_tflops(name, "fp32") is None
