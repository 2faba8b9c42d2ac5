"""Keys and values of the tokens so far, in memory that is allocated once."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KeyValueCache:
    """Keys and values of every layer, `(rows, heads, capacity, head size)` each.

    Buffers are allocated by the first token of a layer and kept over batches that fit. `length`
    counts the positions filled in all layers; a step writes behind it and then calls `advance`.

    Args:
        offload: keep the buffers in host memory; what `update` returns is then a copy of one layer
            on the device that computes.
    """

    def __init__(self, offload: bool = False) -> None:
        self.length = 0
        self._offload = offload
        self._rows = 0
        self._capacity = 0
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def start(self, rows: int, capacity: int) -> None:
        """Forget everything and make room for `rows` sequences of `capacity` tokens."""
        self.length = 0
        self._rows = rows
        if self._keys and (self._keys[0].shape[0] < rows or self._capacity < capacity):
            self.release()
        self._capacity = max(self._capacity, capacity)

    def release(self) -> None:
        """Give the memory back."""
        self.length = 0
        self._capacity = 0
        self._keys.clear()
        self._values.clear()

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values `(rows, heads, new, head size)` behind the old.

        Returns:
            all keys and values up to the new ones, `(rows, heads, length + new, ...)`: views of
            the buffers where these lie on the same device.
        """
        end = self.length + keys.shape[2]
        if end > self._capacity:
            self._grow(end)
        while layer >= len(self._keys):
            self._keys.append(self._allocate(keys))
            self._values.append(self._allocate(values))
        views = []
        for buffers, new in ((self._keys, keys), (self._values, values)):
            place = torch.device("cpu") if self._offload else new.device
            if buffers[layer].dtype != new.dtype or buffers[layer].device != place:
                buffers[layer] = self._allocate(new)
            rows = buffers[layer][: self._rows]
            rows[:, :, self.length : end] = new
            views.append(rows[:, :, :end].to(new.device))
        return views[0], views[1]

    def advance(self, new: int) -> None:
        """Count `new` positions that all layers have written."""
        self.length += new

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on."""
        self.length = min(self.length, length)

    def keep_rows(self, keep: Tensor, count: int) -> Tensor:
        """Drop all rows but those marked in `keep`; the last rows move into the gaps.

        Args:
            keep: bool `(rows,)`.
            count: how many are marked, which the host cannot know without waiting for the device.

        Returns:
            for each row now, the row that it was before, int64 `(count,)` on the device of `keep`.
        """
        # Both are ascending rows that stay in their places, then gaps here and movers there.
        places = keep[:count].int().argsort(descending=True, stable=True)
        sources = keep.int().argsort(descending=True, stable=True)[:count]
        # There are at most so many gaps; a row that is copied too much is copied onto itself.
        moves = min(count, len(keep) - count)
        if moves:
            for buffer in (*self._keys, *self._values):
                to, source = (x[-moves:].to(buffer.device) for x in (places, sources))
                buffer[to, :, : self.length] = buffer[source, :, : self.length]
        self._rows = count
        return torch.empty_like(places).scatter_(0, places, sources)

    def _allocate(self, like: Tensor) -> Tensor:
        return self._empty(like, self._rows, like.shape[1], self._capacity, like.shape[3])

    def _empty(self, like: Tensor, *shape: int) -> Tensor:
        if not self._offload:
            return like.new_empty(shape)
        # Pinned memory reaches a GPU several times as fast.
        return torch.empty(shape, dtype=like.dtype, pin_memory=torch.cuda.is_available())

    def _grow(self, needed: int) -> None:
        self._capacity = max(needed, 2 * self._capacity)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                buffers[layer] = self._empty(old, *old.shape[:2], self._capacity, old.shape[3])
                buffers[layer][:, :, : self.length] = old[:, :, : self.length]


class _LayerView(CacheLayerMixin):
    """One layer of a `KeyValueCache` as transformers' models see it."""

    def __init__(self, store: KeyValueCache, layer: int) -> None:
        super().__init__()
        self._store = store
        self._layer = layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store allocates."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self._store.update(self._layer, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._store.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._store.length

    def get_max_length(self) -> int:
        return -1


def transformers_view(store: KeyValueCache, layers: int) -> Cache:
    """Present a store to a model of transformers with `layers` layers."""
    return Cache(layers=[_LayerView(store, layer) for layer in range(layers)])
