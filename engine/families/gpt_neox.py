"""GPT-NeoX and Pythia."""

from __future__ import annotations

from engine.families.family import Config, Family, LinearLayer, Sizes, chance


class GPTNeoX(Family):
    """Rotary positions on a fused projection; attention and feed-forward network in parallel."""

    model_type = "gpt_neox"
    lora_targets = (
        r"layers\.\d+\.attention\.(query_key_value|dense)$",
        r"layers\.\d+\.mlp\.dense_(h_to_4h|4h_to_h)$",
    )
    dropout_fields = ("hidden_dropout", "attention_dropout")
    fused_qkv = True
    rotary = True

    def block(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        hidden, inner, prefix = sizes.hidden, sizes.inner, "gpt_neox.layers.{layer}."
        bias = sizes.flag("attention_bias", True)
        return (
            LinearLayer(prefix + "attention.query_key_value", hidden, 3 * hidden, bias),
            LinearLayer(prefix + "attention.dense", hidden, hidden, bias),
            LinearLayer(prefix + "mlp.dense_h_to_4h", hidden, inner, True),
            LinearLayer(prefix + "mlp.dense_4h_to_h", inner, hidden, True),
        )

    def dropout(self, config: Config) -> float:
        return chance(config, "hidden_dropout", 0.0)


FAMILY = GPTNeoX()
