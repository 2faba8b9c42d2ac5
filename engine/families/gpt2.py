"""GPT-2."""

from __future__ import annotations

from engine.families.family import Config, Family, LinearLayer, Sizes, chance


class GPT2(Family):
    """Learned positions; its layers are `Conv1D`, which stores a matrix the other way round."""

    model_type = "gpt2"
    lora_targets = (r"h\.\d+\.attn\.c_(attn|proj)$", r"h\.\d+\.mlp\.c_(fc|proj)$")
    dropout_fields = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    names = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    }
    defaults = {"tie_word_embeddings": True}
    activation_key = "activation_function"
    activation = "gelu_new"
    fused_qkv = True

    def block(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        hidden, inner, prefix = sizes.hidden, sizes.inner, "transformer.h.{layer}."
        return (
            LinearLayer(prefix + "attn.c_attn", hidden, 3 * hidden, True),
            LinearLayer(prefix + "attn.c_proj", hidden, hidden, True),
            LinearLayer(prefix + "mlp.c_fc", hidden, inner, True),
            LinearLayer(prefix + "mlp.c_proj", inner, hidden, True),
        )

    def inner(self, config: Config, hidden: int) -> int:
        return int(config.get("n_inner") or 4 * hidden)

    def position_rows(self, sizes: Sizes) -> int:
        return sizes.positions

    def dropout(self, config: Config) -> float:
        return chance(config, "resid_pdrop", 0.1)

    def attention_dropout(self, config: Config) -> float:
        return chance(config, "attn_pdrop", 0.1)


FAMILY = GPT2()
