"""Mistral: Llama without biases."""

from __future__ import annotations

from engine.families.family import Sizes
from engine.families.llama import Llama


class Mistral(Llama):
    """Llama without biases; its sliding window needs the model's own forward pass."""

    model_type = "mistral"
    defaults = {"num_key_value_heads": 8}

    def query_bias(self, sizes: Sizes) -> bool:
        return False

    def mlp_bias(self, sizes: Sizes) -> bool:
        return False


FAMILY = Mistral()
