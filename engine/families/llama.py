"""Llama 1 to 3, SmolLM2, TinyLlama; the architecture that many others vary."""

from __future__ import annotations

from engine.families.family import Family, LinearLayer, PackedLayout, Sizes


class Llama(Family):
    """Rotary positions, RMS norms before attention and a gated feed-forward network."""

    model_type = "llama"
    lora_targets = (
        r"layers\.\d+\.self_attn\.(q|k|v|o)_proj$",
        r"layers\.\d+\.mlp\.(gate|up|down)_proj$",
    )
    activation = "silu"
    gated = True
    rms_norms = 2
    rotary = True
    packed: PackedLayout | None = PackedLayout(
        decoder="model",
        attention="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="o_proj",
        up=("mlp.gate_proj", "mlp.up_proj"),
        down="mlp.down_proj",
        activation="mlp.act_fn",
        attention_norm="input_layernorm",
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
    )

    def query_bias(self, sizes: Sizes) -> bool:
        """Whether queries, keys and values have a bias."""
        return sizes.flag("attention_bias")

    def output_bias(self, sizes: Sizes) -> bool:
        """Whether the output of attention has a bias."""
        return self.query_bias(sizes)

    def mlp_bias(self, sizes: Sizes) -> bool:
        """Whether the feed-forward network has biases."""
        return sizes.flag("mlp_bias")

    def block(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        hidden, inner, prefix = sizes.hidden, sizes.inner, "model.layers.{layer}."
        query_bias, mlp_bias = self.query_bias(sizes), self.mlp_bias(sizes)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return (
            LinearLayer(attention + "q_proj", hidden, sizes.queries, query_bias),
            LinearLayer(attention + "k_proj", hidden, sizes.keys, query_bias),
            LinearLayer(attention + "v_proj", hidden, sizes.keys, query_bias),
            LinearLayer(attention + "o_proj", sizes.queries, hidden, self.output_bias(sizes)),
            LinearLayer(mlp + "gate_proj", hidden, inner, mlp_bias),
            LinearLayer(mlp + "up_proj", hidden, inner, mlp_bias),
            LinearLayer(mlp + "down_proj", inner, hidden, mlp_bias),
        )


FAMILY = Llama()
