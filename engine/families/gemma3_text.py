"""Gemma 3, the language model alone."""

from __future__ import annotations

from engine.families.family import Sizes
from engine.families.llama import Llama


class Gemma3(Llama):
    """Llama with norms on both sides of attention and of the feed-forward network."""

    model_type = "gemma3_text"
    defaults = {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True}
    rms_norms = 4
    head_norms = True
    fp32_norm_weights = True
    packed = None

    def mlp_bias(self, sizes: Sizes) -> bool:
        return False


FAMILY = Gemma3()
