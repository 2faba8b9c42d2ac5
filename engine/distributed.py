"""The process group of a step: start, end, and sums over ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import numpy
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator


def device() -> torch.device:
    """The device of this rank."""
    return torch.device(get_accelerator().current_device_name())


def rank() -> int:
    """Rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def process_group() -> Iterator[None]:
    """Join the ranks that the launcher started; leave in order, or at once after an error."""
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile its shared-memory all-reduce, no faster than gloo and a hazard:
        # a build that was killed leaves a lock on which the next run waits for ever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    yield
    # Ranks that leave without each other abort now and then in gloo's threads.
    dist.barrier()
    dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch; ranks that sample must be given different seeds."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def sum_over_ranks(*values: torch.Tensor | float) -> list[float]:
    """Sums of scalars over all ranks, in fp64 and one collective."""
    totals = torch.tensor([float(value) for value in values], dtype=torch.float64)
    if world_size() > 1:
        on_device = totals.to(device())
        dist.all_reduce(on_device)
        totals = on_device.cpu()
    return totals.tolist()


def max_over_ranks(value: torch.Tensor | float) -> float:
    """The largest of a scalar over all ranks."""
    largest = torch.tensor(float(value), dtype=torch.float64, device=device())
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()
