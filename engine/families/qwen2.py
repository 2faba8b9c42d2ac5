"""Qwen 1.5 to 2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from engine.families.family import Sizes
from engine.families.llama import Llama


class Qwen2(Llama):
    """Llama with biases of queries, keys and values alone."""

    model_type = "qwen2"
    defaults = {"num_key_value_heads": 32}

    def query_bias(self, sizes: Sizes) -> bool:
        return True

    def output_bias(self, sizes: Sizes) -> bool:
        return False

    def mlp_bias(self, sizes: Sizes) -> bool:
        return False


FAMILY = Qwen2()
