"""What a family's file says, and what most families have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
"""The content of a config.json."""


@dataclass(frozen=True)
class LinearLayer:
    """One matrix: `name` as in the Hugging Face model, with `{layer}` for the block's number."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False

    @property
    def weights(self) -> int:
        """Elements of the matrix, without the bias."""
        return self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Elements of the matrix and its bias."""
        return self.weights + (self.outputs if self.bias else 0)


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model as its config.json gives them, and the rest of that config."""

    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
    vocabulary: int
    positions: int
    config: Config

    @property
    def queries(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.key_value_heads * self.head_size

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch of the config."""
        return bool(self.config.get(name, default))


@dataclass(frozen=True)
class PackedLayout:
    """Where the packed decoder finds the parts of a model: names of modules.

    Attributes:
        decoder: in the causal language model; it has `layers` and, if learned positions are
            `None`, `rotary_emb`.
        qkv: queries, keys and values in a block; one fused projection is not supported.
        out: the output of attention.
        up: into the inner width; of two, the first is the gate's.
        down: back from it.
        activation: in a block.
        attention_norm: in a block, and `mlp_norm`: LayerNorm or RMSNorm.
        final_norm: in the decoder.
        learned_positions: a table in the decoder; None: rotary.
    """

    decoder: str
    attention: str
    qkv: tuple[str, str, str]
    out: str
    up: tuple[str, ...]
    down: str
    activation: str
    attention_norm: str
    mlp_norm: str
    final_norm: str
    learned_positions: str | None = None

    def is_joined(self, layer: str) -> bool:
        """Whether the decoder copies this linear layer together with others into one matrix."""
        groups = [group for group in (self.qkv, self.up) if len(group) > 1]
        return any(layer.endswith(f".{name}") for group in groups for name in group)


class Family:
    """A decoder-only transformer as transformers builds it; the defaults are GPT's.

    Attributes:
        model_type: as in config.json.
        lora_targets: patterns, searched in module names, of the layers that get adapters.
        dropout_fields: fields of the config that set dropout; the first is that of hidden states
            unless `gated`.
        names: the family's own names of common config keys, as transformers' `attribute_map`.
        defaults: what transformers assumes where a config.json is silent.
        position_keys: config keys that limit the positions, the first that is set counts.
        activation: the default of `activation_key`.
        gated: the feed-forward network has a gate (SwiGLU), and RMS norms stand before it.
        rms_norms: per block; 0: two of LayerNorm with biases.
        head_norms: queries and keys are normalised per head.
        fp32_norm_weights: RMS norms multiply by their weight before they cast back.
        fused_qkv: queries, keys and values are views of one product.
        rotary: positions turn queries and keys.
        fused_attention: scaled_dot_product_attention; else scores are tensors of their own.
        activation_temporaries: tensors of the inner width that the activation makes and drops.
        packed: layout of the packed decoder; None: generation by the model's own forward pass.
    """

    model_type: str = ""
    lora_targets: tuple[str, ...] = ()
    dropout_fields: tuple[str, ...] = ("attention_dropout",)
    names: Mapping[str, str] = {}
    defaults: Config = {}
    position_keys: tuple[str, ...] = (
        "max_position_embeddings",
        "n_positions",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
    )
    activation_key: str = "hidden_act"
    activation: str = "gelu"
    gated: bool = False
    rms_norms: int = 0
    head_norms: bool = False
    fp32_norm_weights: bool = False
    fused_qkv: bool = False
    rotary: bool = False
    fused_attention: bool = True
    activation_temporaries: int = 0
    packed: PackedLayout | None = None

    def block(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        """The linear layers of one block."""
        raise NotImplementedError

    def projections(self, sizes: Sizes) -> tuple[LinearLayer, ...]:
        """Linear layers outside of the blocks, but for the head."""
        return ()

    def head_inputs(self, sizes: Sizes) -> int:
        """Width of the embeddings and of the head's input."""
        return sizes.hidden

    def block_norms(self, sizes: Sizes) -> int:
        """Elements of a block's norms."""
        if not self.rms_norms:
            return 4 * sizes.hidden
        return self.rms_norms * sizes.hidden + self.head_norms * 2 * sizes.head_size

    def outer_norms(self, sizes: Sizes) -> int:
        """Elements of the norms outside of the blocks."""
        return sizes.hidden if self.rms_norms else 2 * sizes.hidden

    def position_rows(self, sizes: Sizes) -> int:
        """Rows of a table of learned positions; 0 for rotary positions and ALiBi."""
        return 0

    def sizes(self, config: Config) -> Sizes:
        """Read the sizes of a config.json.

        Raises:
            ValueError: a size is missing.
        """
        config = {**self.defaults, **config}
        hidden = self._size(config, "hidden_size")
        inner = self.inner(config, hidden)
        heads = self._size(config, "num_attention_heads")
        return Sizes(
            layers=self._size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            key_value_heads=int(config.get("num_key_value_heads") or heads),
            head_size=int(config.get("head_dim") or hidden // heads),
            inner=inner,
            vocabulary=self._size(config, "vocab_size"),
            positions=self.positions(config),
            config=config,
        )

    def inner(self, config: Config, hidden: int) -> int:
        """Width of the feed-forward network."""
        return self._size(config, "intermediate_size")

    def positions(self, config: Config) -> int:
        """Tokens that the model was made for."""
        return self._size(config, "max_position_embeddings")

    def position_limit(self, config: Config) -> int | None:
        """The most tokens that the model can take; None without a bound."""
        limits = (config.get(key) for key in self.position_keys)
        return next((limit for limit in limits if isinstance(limit, int)), None)

    def dropout(self, config: Config) -> float:
        """Dropout of hidden states; gated families have none."""
        return 0.0

    def attention_dropout(self, config: Config) -> float:
        """Dropout of attention weights."""
        return chance(config, "attention_dropout", 0.0)

    def _size(self, config: Config, name: str) -> int:
        own = self.names.get(name, name)
        for key in (own, name):
            if config.get(key) is not None:
                return int(config[key])
        raise ValueError(f"config.json of model_type {config.get('model_type')!r} lacks {own}")


def chance(config: Config, name: str, default: float) -> float:
    """A probability of the config; the default also where it is null."""
    value = config.get(name)
    return default if value is None else float(value)
