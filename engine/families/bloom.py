"""BLOOM."""

from __future__ import annotations

from engine.families.family import Config, Family, LinearLayer, Sizes, chance


class Bloom(Family):
    """ALiBi, whose bias needs the scores: attention is not fused. GELU is made of operations."""

    model_type = "bloom"
    lora_targets = (
        r"h\.\d+\.self_attention\.(query_key_value|dense)$",
        r"h\.\d+\.mlp\.dense_(h_to_4h|4h_to_h)$",
    )
    dropout_fields = ("hidden_dropout", "attention_dropout")
    names = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    defaults = {"tie_word_embeddings": True}
    # seq_length is that of its pretraining, not a limit
    position_keys = ()
    fused_attention = False
    activation_temporaries = 8

    def block(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        hidden, inner, prefix = sizes.hidden, sizes.inner, "transformer.h.{layer}."
        return (
            LinearLayer(prefix + "self_attention.query_key_value", hidden, 3 * hidden, True),
            LinearLayer(prefix + "self_attention.dense", hidden, hidden, True),
            LinearLayer(prefix + "mlp.dense_h_to_4h", hidden, inner, True),
            LinearLayer(prefix + "mlp.dense_4h_to_h", inner, hidden, True),
        )

    def sizes(self, config: Config) -> Sizes:
        # Old checkpoints call the hidden size n_embed.
        return super().sizes({"hidden_size": config.get("n_embed"), **config})

    def inner(self, config: Config, hidden: int) -> int:
        return 4 * hidden

    def positions(self, config: Config) -> int:
        # No table and no bound; the length of pretraining is the useful one.
        return int(config.get("seq_length") or 2048)

    def outer_norms(self, sizes: Sizes) -> int:
        return 4 * sizes.hidden

    def dropout(self, config: Config) -> float:
        return chance(config, "hidden_dropout", 0.0)


FAMILY = Bloom()
