"""Qwen 3: Llama with normalised queries and keys."""

from __future__ import annotations

from engine.families.family import Sizes
from engine.families.llama import Llama


class Qwen3(Llama):
    """Llama with queries and keys normalised per head."""

    model_type = "qwen3"
    defaults = {"num_key_value_heads": 32, "head_dim": 128}
    head_norms = True

    def mlp_bias(self, sizes: Sizes) -> bool:
        return False


FAMILY = Qwen3()
