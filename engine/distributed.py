"""The process group of a step: start, end, sums over ranks, and work that one rank does first."""

from __future__ import annotations

import itertools
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import deepspeed
import numpy
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

_SECONDS_BETWEEN_LOOKS = 0.1
_turns = itertools.count()
_LONGEST_WAIT = timedelta(days=1)


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
    """Join the ranks that the launcher started; leave together, or at once after an error."""
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed would compile its shared-memory all-reduce, no faster than gloo and a hazard:
        # a build that was killed leaves a lock on which the next run waits forever.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    else:
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    yield
    # Ranks that leave at different times sometimes abort in gloo's threads.
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def long_waits() -> Iterator[None]:
    """Let ranks wait a day for each other, instead of the minutes after which they hang.

    For work with collectives that takes long and differs between ranks, such as writing a large
    model; if only rank 0 works, `rank_zero_first` has no timeout at all. The last thing inside
    should be a barrier: whatever a rank starts after it has the usual timeout again. A rank that
    fails does not keep the others waiting: the launcher ends them.
    """
    if not dist.is_initialized():
        yield
        return
    # DeepSpeed gathers and reduces in its own groups, each with its own timeout.
    backends = {
        group._get_backend(kind)
        for group in dist.distributed_c10d._world.pg_map
        for kind in group._device_types
    }
    usual = [(backend, backend.options._timeout) for backend in backends]
    try:
        for backend in backends:
            backend._set_default_timeout(_LONGEST_WAIT)
        yield
    finally:
        for backend, timeout in usual:
            backend._set_default_timeout(timeout)


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch; ranks that sample must be given different seeds."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def sum_over_ranks(*values: torch.Tensor | float) -> list[float]:
    """Sums of scalars over all ranks, in fp64: one collective, and one read of the device."""
    numbers = [0.0 if isinstance(value, torch.Tensor) else value for value in values]
    totals = torch.tensor(numbers, dtype=torch.float64, device=device())
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            totals[index] = value
    if world_size() > 1:
        dist.all_reduce(totals)
    return totals.tolist()


def max_over_ranks(value: torch.Tensor | float) -> float:
    """The largest of a scalar over all ranks."""
    largest = torch.as_tensor(value, dtype=torch.float64, device=device()).clone()
    if world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


@contextmanager
def rank_zero_first() -> Iterator[None]:
    """Run the body on rank 0, then on one rank of each other node, then on all the others.

    All ranks must enter it, and they leave together. Rank 0 may take hours: unlike a collective,
    the wait has no timeout. Work for rank 0 alone goes under `if rank() == 0` in the body; the
    others find what it puts into a cache, on each node's own disk as well. The body must contain
    no collective.

    Raises:
        RuntimeError: on the ranks that wait, when another rank's body raised (it names that error)
            or rank 0 ended.
    """
    if world_size() == 1:
        yield
        return
    turn, host = f"dschat/turn-{next(_turns)}", socket.gethostname()
    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    # A collective would end with the group's timeout. The store, which lives in rank 0, is
    # polled instead: one long wait would hold the lock that NCCL's watchdog needs too.
    store = dist.distributed_c10d._get_default_store()
    if rank() != 0:
        _wait_for(store, turn, "rank 0" if first_of_host else host, 1)
    try:
        yield
    except BaseException as error:
        store.set(f"{turn}/failed", f"rank {rank()} failed: {type(error).__name__}: {error}")
        raise
    done = ["all", *(["rank 0"] if rank() == 0 else []), *([host] if first_of_host else [])]
    for name in done:
        store.add(f"{turn}/{name}", 1)
    _wait_for(store, turn, "all", world_size())


def _wait_for(store: dist.Store, turn: str, name: str, count: int) -> None:
    """Return when `count` ranks have reported `name`; RuntimeError when one has failed."""
    try:
        while store.add(f"{turn}/{name}", 0) < count:
            if store.check([f"{turn}/failed"]):
                raise RuntimeError(store.get(f"{turn}/failed").decode())
            time.sleep(_SECONDS_BETWEEN_LOOKS)
    except dist.DistNetworkError as error:
        raise RuntimeError(
            "connection closed by peer: rank 0 ended while the others waited for it"
        ) from error
