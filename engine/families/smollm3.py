"""SmolLM3: Llama with some layers that have no positions."""

from __future__ import annotations

from engine.families.llama import Llama


class SmolLM3(Llama):
    """Llama; every fourth layer leaves positions out, which the packed decoder does not know."""

    model_type = "smollm3"
    defaults = {"num_key_value_heads": 4, "tie_word_embeddings": True}
    packed = None


FAMILY = SmolLM3()
