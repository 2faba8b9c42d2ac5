"""The average of the actor's weights in step 3, one slice per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn

from engine.algorithms.averages import ema_update
from engine.distributed import device, rank, world_size
from engine.models.save import current_values


class ActorAverage:
    """Exponential moving average of the trained weights, in fp32.

    In 16 bits its small updates would vanish. Each rank averages its own slice of every trained
    parameter: under ZeRO-3 the shard it holds, below that an equal part of the whole.

    Attributes:
        shards: this rank's averages, flat and in fp32, in the order of the trained parameters.

    Args:
        engine: whose trained parameters are averaged; it is never written to.
        decay: share of the old average that is kept in an update, 0 to 1.
        on_host: keep the average in host memory.
    """

    def __init__(self, engine: DeepSpeedEngine, decay: float, on_host: bool = False) -> None:
        self._decay = decay
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._index = {id(parameter): i for i, parameter in enumerate(self._parameters)}
        place = torch.device("cpu") if on_host else device()
        self.shards = [
            _slice(parameter).to(place, copy=True).float() for parameter in self._parameters
        ]

    def load(self, shards: Sequence[Tensor]) -> None:
        """Take over the averages of a checkpoint: slices, or whole ones as older ones have."""
        for own, saved in zip(self.shards, shards, strict=True):
            flat = saved.reshape(-1)
            own.copy_(flat if len(flat) == len(own) else _slice_of_flat(flat))

    def update(self) -> None:
        """Move the average towards the weights; call after a real optimizer step alone."""
        ema_update(self.shards, [_slice(parameter) for parameter in self._parameters], self._decay)

    @contextmanager
    def values(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """As `engine.models.save.current_values`, with the average in place of what trains."""
        averaged = {id(t): self._whole(t) for t in tensors if id(t) in self._index}
        others = [tensor for tensor in tensors if id(tensor) not in averaged]
        with current_values(others) as rest:
            found = averaged | {id(t): value for t, value in zip(others, rest, strict=True)}
            yield [found[id(tensor)] for tensor in tensors]

    def _whole(self, parameter: nn.Parameter) -> Tensor:
        """The average of one parameter, in its shape and fp32; a collective of all ranks."""
        shard = self.shards[self._index[id(parameter)]]
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if world_size() == 1:
            return shard[: shape.numel()].view(shape).to(device())
        size = _slice_size(shape.numel())
        own = torch.zeros(size, device=device())
        own[: len(shard)] = shard
        flat = torch.empty(size * world_size(), device=device())
        deepspeed.comm.all_gather_into_tensor(flat, own)
        return flat[: shape.numel()].view(shape)


def _slice(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a parameter's current values, flat; no copy."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.detach()
    return _slice_of_flat(parameter.detach().reshape(-1))


def _slice_of_flat(flat: Tensor) -> Tensor:
    """This rank's part of a whole; shorter or empty at the end, where it does not divide."""
    size = _slice_size(len(flat))
    return flat[rank() * size : (rank() + 1) * size]


def _slice_size(elements: int) -> int:
    return -(-elements // world_size())
