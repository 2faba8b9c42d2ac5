"""A decoder on DeepSpeed-Inference (its second version, made for ragged batches)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from engine.generation.cache import KeyValueCache

_ONLY = 0
_TOKENS_AT_ONCE = 512
# Blocks of the engine's cache hold this many tokens or more.
_BLOCK = 64


def build_ragged_decoder(path: str, context: int, device: torch.device) -> RaggedDecoder:
    """Let DeepSpeed-Inference load a model for one conversation; needs a process group.

    Args:
        path: folder of a Hugging Face checkpoint in 16 bits.
        context: most tokens of the conversation.
        device: the CUDA device.

    Raises:
        ValueError, RuntimeError, AssertionError: a model that it does not know, in its own words.
    """
    from deepspeed.inference.v2 import RaggedInferenceEngineConfig, build_hf_engine

    blocks = {"mode": "allocate", "size": math.ceil(context / _BLOCK) + 1}
    manager = {
        "max_tracked_sequences": 1,
        "max_ragged_sequence_count": 1,
        "max_ragged_batch_size": _TOKENS_AT_ONCE,
        "max_context": context,
        "memory_config": blocks,
    }
    engine = build_hf_engine(path, RaggedInferenceEngineConfig(state_manager=manager))
    return RaggedDecoder(engine, device)


class RaggedDecoder:
    """One sequence on an engine that keeps keys and values itself and only ever appends.

    Of the cache that a step is given it uses the length alone: where that is shorter than what
    the engine holds, the sequence begins anew.
    """

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self._held: list[int] = []

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        cache: KeyValueCache,
    ) -> Tensor:
        """See `engine.generation.decode.Decoder`; one row."""
        new = input_ids[0].tolist()
        if cache.length < len(self._held):
            new = self._held[: cache.length] + new
            self._held = []
            self.engine.flush(_ONLY)
        for start in range(0, len(new), _TOKENS_AT_ONCE):
            piece = torch.tensor(new[start : start + _TOKENS_AT_ONCE])
            logits = self.engine.put([_ONLY], [piece])
        self._held += new
        cache.advance(input_ids.shape[1])
        return logits
