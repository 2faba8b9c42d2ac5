"""OPT."""

from __future__ import annotations

from engine.families.family import Config, Family, LinearLayer, PackedLayout, Sizes, chance


class OPT(Family):
    """Learned positions; OPT-350M projects its embeddings and has its norms after the layers."""

    model_type = "opt"
    lora_targets = (r"layers\.\d+\.self_attn\.(q|k|v|out)_proj$", r"layers\.\d+\.fc[12]$")
    dropout_fields = ("dropout", "attention_dropout")
    names = {"intermediate_size": "ffn_dim"}
    defaults = {"tie_word_embeddings": True}
    activation_key = "activation_function"
    activation = "relu"
    packed = PackedLayout(
        decoder="model.decoder",
        attention="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        out="out_proj",
        up=("fc1",),
        down="fc2",
        activation="activation_fn",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        final_norm="final_layer_norm",
        learned_positions="embed_positions",
    )

    def block(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        hidden, inner, bias = sizes.hidden, sizes.inner, sizes.flag("enable_bias", True)
        prefix = "model.decoder.layers.{layer}."
        attention = tuple(
            LinearLayer(prefix + "self_attn." + name, hidden, hidden, bias)
            for name in ("k_proj", "v_proj", "q_proj", "out_proj")
        )
        return (
            *attention,
            LinearLayer(prefix + "fc1", hidden, inner, bias),
            LinearLayer(prefix + "fc2", inner, hidden, bias),
        )

    def projections(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        hidden, width = sizes.hidden, self.head_inputs(sizes)
        if width == hidden:
            return ()
        return (
            LinearLayer("model.decoder.project_out", hidden, width),
            LinearLayer("model.decoder.project_in", width, hidden),
        )

    def head_inputs(self, sizes: Sizes) -> int:
        return int(sizes.config.get("word_embed_proj_dim") or sizes.hidden)

    def block_norms(self, sizes: Sizes) -> int:
        return 4 * sizes.hidden if sizes.flag("layer_norm_elementwise_affine", True) else 0

    def outer_norms(self, sizes: Sizes) -> int:
        has_norm = sizes.flag("do_layer_norm_before", True) and not sizes.flag(
            "_remove_final_layer_norm"
        )
        return self.block_norms(sizes) // 2 if has_norm else 0

    def position_rows(self, sizes: Sizes) -> int:
        # The table starts with two rows that no position uses.
        return sizes.positions + 2

    def dropout(self, config: Config) -> float:
        return chance(config, "dropout", 0.1)


FAMILY = OPT()
