"""Where a model keeps weights and cache during inference, and what that needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LoadIn = Literal["8bit", "4bit"]
Engine = Literal["hf", "deepspeed"]

_NVME = "nvme:"


@dataclass(frozen=True)
class Placement:
    """How a model is laid out for inference; the defaults are whole weights on the device.

    Attributes:
        load_in: weights quantised by bitsandbytes while loading.
        offload: where ZeRO-3 keeps the weights between their layers' turns: cpu or nvme:FOLDER.
        offload_cache: keys and values in host memory, a layer at a time on the device.
        engine: transformers' models, or DeepSpeed-Inference.
    """

    load_in: LoadIn | None = None
    offload: str | None = None
    offload_cache: bool = False
    engine: Engine = "hf"

    def __post_init__(self) -> None:
        if self.offload not in (None, "cpu") and not self.nvme_folder:
            raise ValueError(f"--offload is {self.offload!r}; give cpu or nvme:FOLDER")

    @property
    def nvme_folder(self) -> str | None:
        """The folder for weights on disk, if they are kept there."""
        offload = self.offload or ""
        return offload.removeprefix(_NVME) or None if offload.startswith(_NVME) else None


@dataclass(frozen=True)
class Machine:
    """What a machine offers that placements need.

    Attributes:
        cuda: a CUDA device that torch can use.
        bitsandbytes: the package of that name.
        async_io: DeepSpeed's operator for reading from disk, or what it takes to build it.
        inference_kernels: DeepSpeed-Inference's, or what it takes to build them.
    """

    cuda: bool
    bitsandbytes: bool
    async_io: bool
    inference_kernels: bool


def refusals(placement: Placement, machine: Machine) -> list[str]:
    """Why a machine cannot place a model like this: per reason what is wrong and how to fix it."""
    bits, engine = placement.load_in, placement.engine == "deepspeed"
    offload, nvme, cache = placement.offload, placement.nvme_folder, placement.offload_cache
    checks = (
        (
            bits and not machine.cuda,
            f"--load-in {bits}: bitsandbytes computes on a CUDA device and there is none here; "
            "leave it out, or use --dtype bf16 for half the memory of fp32",
        ),
        (
            bits and machine.cuda and not machine.bitsandbytes,
            f"--load-in {bits}: the package bitsandbytes is missing; pip install bitsandbytes",
        ),
        (
            bits and offload,
            f"--load-in {bits} with --offload {offload}: ZeRO-3 cannot shard weights that "
            "bitsandbytes has packed; give one of them",
        ),
        (
            nvme and not machine.async_io,
            f"--offload {offload}: DeepSpeed's async_io does not build here; install libaio with "
            "its headers (libaio-dev) and a C++ compiler, or use --offload cpu",
        ),
        (
            cache and not machine.cuda,
            "--offload-cache: there is no CUDA device, so the cache is in host memory anyway; "
            "leave it out",
        ),
        (
            engine and not machine.cuda,
            "--engine deepspeed: the kernels of DeepSpeed-Inference are for CUDA devices and "
            "there is none here; use --engine hf",
        ),
        (
            engine and machine.cuda and not machine.inference_kernels,
            "--engine deepspeed: the kernels of DeepSpeed-Inference neither are here nor build; "
            "pip install deepspeed-kernels, with nvcc of torch's CUDA version on PATH, or use "
            "--engine hf",
        ),
        (
            engine and (bits or offload or cache),
            "--engine deepspeed keeps weights and cache on the device itself; leave --load-in, "
            "--offload and --offload-cache out, or use --engine hf",
        ),
    )
    return [reason for wrong, reason in checks if wrong]
