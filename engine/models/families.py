"""What differs between model families, in one table."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from torch import Tensor, nn

_LLAMA_LAYERS = (
    r"layers\.\d+\.self_attn\.(q|k|v|o)_proj$",
    r"layers\.\d+\.mlp\.(gate|up|down)_proj$",
)


@dataclass(frozen=True)
class Family:
    """Facts of one model family.

    Attributes:
        lora_targets: patterns, searched in module names, of the layers that get adapters.
        dropout_fields: fields of its config that set dropout.
    """

    lora_targets: tuple[str, ...]
    dropout_fields: tuple[str, ...] = ("attention_dropout",)


_LLAMA = Family(_LLAMA_LAYERS)

FAMILIES: dict[str, Family] = {
    "opt": Family(
        (r"layers\.\d+\.self_attn\.(q|k|v|out)_proj$", r"layers\.\d+\.fc[12]$"),
        ("dropout", "attention_dropout"),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma3_text": _LLAMA,
    "smollm3": _LLAMA,
    "gpt2": Family(
        (r"h\.\d+\.attn\.c_(attn|proj)$", r"h\.\d+\.mlp\.c_(fc|proj)$"),
        ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    ),
    "gpt_neox": Family(
        (
            r"layers\.\d+\.attention\.(query_key_value|dense)$",
            r"layers\.\d+\.mlp\.dense_(h_to_4h|4h_to_h)$",
        ),
        ("hidden_dropout", "attention_dropout"),
    ),
    "bloom": Family(
        (
            r"h\.\d+\.self_attention\.(query_key_value|dense)$",
            r"h\.\d+\.mlp\.dense_(h_to_4h|4h_to_h)$",
        ),
        ("hidden_dropout", "attention_dropout"),
    ),
}

# Linear layers of a repeated block have its number in their name.
DEFAULT_FAMILY = Family(
    (r"\.\d+\.",),
    (
        "dropout",
        "attention_dropout",
        "hidden_dropout",
        "activation_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
    ),
)


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`; an unknown one gets all layers of its blocks."""
    return FAMILIES.get(model_type, DEFAULT_FAMILY)


def position_arguments(model: nn.Module, attention_mask: Tensor) -> dict[str, Tensor]:
    """`position_ids` `(batch, seq)` counted over real tokens, for models that take them.

    So left padding changes no position. BLOOM takes none: it biases attention by the mask itself.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": (attention_mask.long().cumsum(dim=1) - 1).clamp(min=0)}
