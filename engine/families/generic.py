"""Any family without a file of its own."""

from __future__ import annotations

from engine.families.family import Family


class Generic(Family):
    """What can be said of any decoder-only model; it has no shape, so no plan."""

    # Linear layers of a repeated block have its number in their name.
    lora_targets = (r"\.\d+\.",)
    dropout_fields = (
        "dropout",
        "attention_dropout",
        "hidden_dropout",
        "activation_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    )


GENERIC = Generic()
