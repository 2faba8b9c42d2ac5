"""The shape of a language model, read from its `config.json`: its layers and parameter counts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Head = Literal["lm", "score"]


class UnknownFamilyError(ValueError):
    """A model family whose layers the planner does not know; it trains all the same."""

    def __init__(self, family: str) -> None:
        known = ", ".join(KNOWN_FAMILIES)
        super().__init__(f"the planner does not know models of type {family!r}, only {known}")


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
class ModelShape:
    """Sizes of one decoder-only transformer.

    `block` are the linear layers of one of `layers` equal blocks, `projections` those outside of
    the blocks (OPT-350M has two). `block_norms` and `outer_norms` count the elements of the
    normalisations. `head_inputs` is the width of the embeddings and of the head's input.
    `position_rows` counts the rows of a table of learned positions, 0 for rotary and ALiBi.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
    gated: bool
    activation: str
    vocabulary: int
    positions: int
    position_rows: int
    head_inputs: int
    tied: bool
    block: tuple[LinearLayer, ...]
    projections: tuple[LinearLayer, ...]
    block_norms: int
    outer_norms: int
    dropout: float
    attention_dropout: float

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read the content of a `config.json`.

        Raises UnknownFamilyError for a family that is not known, ValueError for a missing size.
        """
        family = str(config.get("model_type"))
        if family == "opt":
            return _opt(config)
        if family == "gpt2":
            return _gpt2(config)
        if family == "gpt_neox":
            return _gpt_neox(config)
        if family == "bloom":
            return _bloom(config)
        if family in _LLAMA_LIKE:
            return _llama_like(config, family)
        raise UnknownFamilyError(family)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelShape:
        """Read `config.json` of a model's folder; weights are not needed.

        Raises FileNotFoundError without that file, else as `from_config`.
        """
        file = Path(path) / "config.json"
        return cls.from_config(json.loads(file.read_text(encoding="utf-8")))

    @classmethod
    def if_known(cls, config: Mapping[str, Any]) -> ModelShape | None:
        """As `from_config`, but None for a family that is not known."""
        try:
            return cls.from_config(config)
        except UnknownFamilyError:
            return None

    @property
    def block_parameters(self) -> int:
        """Elements of one transformer block."""
        return sum(layer.parameters for layer in self.block) + self.block_norms

    @property
    def embedding_parameters(self) -> int:
        """Elements of the tables that are looked up: tokens and learned positions."""
        return self.vocabulary * self.head_inputs + self.position_rows * self.hidden

    @property
    def backbone_parameters(self) -> int:
        """Elements of the model without a head."""
        return (
            self.embedding_parameters
            + self.layers * self.block_parameters
            + sum(layer.parameters for layer in self.projections)
            + self.outer_norms
        )

    @property
    def parameters(self) -> int:
        """Elements of the language model; a tied head counts once."""
        return self.parameters_with("lm")

    def parameters_with(self, head: Head) -> int:
        """Elements of the model with a language-model head or with a score a token (critic)."""
        if head == "score":
            return self.backbone_parameters + self.head_inputs
        untied = 0 if self.tied else self.vocabulary * self.head_inputs
        return self.backbone_parameters + untied

    @property
    def matmul_parameters(self) -> int:
        """Elements that every token is multiplied by, with the head's matrix, even if tied."""
        return self.backbone_weights + self.vocabulary * self.head_inputs

    @property
    def backbone_weights(self) -> int:
        """Elements of all matrices but the head's and the tables'."""
        in_blocks = self.layers * sum(layer.weights for layer in self.block)
        return in_blocks + sum(layer.weights for layer in self.projections)

    def linear_layers(self) -> list[LinearLayer]:
        """All linear layers but the head, with their full names."""
        in_blocks = [
            LinearLayer(layer.name.format(layer=number), layer.inputs, layer.outputs, layer.bias)
            for number in range(self.layers)
            for layer in self.block
        ]
        return in_blocks + list(self.projections)

    def lora_layers(self, targets: Iterable[str] = ()) -> list[LinearLayer]:
        """Linear layers whose names a pattern of `targets` is found in; all of the blocks if none.

        Raises ValueError where the patterns match no layer.
        """
        patterns = list(targets)
        layers = self.linear_layers()
        if not patterns:
            return layers[: self.layers * len(self.block)]
        found = [layer for layer in layers if any(re.search(item, layer.name) for item in patterns)]
        if not found:
            names = ", ".join(sorted({layer.name.rsplit(".", 1)[-1] for layer in layers}))
            raise ValueError(
                f"lora.targets {patterns} match no linear layer of the {self.family} model; "
                f"its layers end in: {names}"
            )
        return found

    def lora_parameters(self, rank: int, targets: Iterable[str] = ()) -> int:
        """Elements of the adapters: `rank * (inputs + outputs)` a layer (Hu et al. 2021, 4.1)."""
        if rank == 0:
            return 0
        return sum(rank * (layer.inputs + layer.outputs) for layer in self.lora_layers(targets))


# What transformers assumes where a config.json is silent.
_LLAMA_LIKE: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
}

KNOWN_FAMILIES = ("opt", "gpt2", "gpt_neox", "bloom", *_LLAMA_LIKE)


def _size(config: Mapping[str, Any], *names: str) -> int:
    """The first of `names` that is set; families spell the same size differently."""
    for name in names:
        if config.get(name) is not None:
            return int(config[name])
    raise ValueError(f"config.json of model_type {config.get('model_type')!r} lacks {names[0]}")


def _chance(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name)
    return default if value is None else float(value)


def _llama_like(config: Mapping[str, Any], family: str) -> ModelShape:
    settings = {**_LLAMA_LIKE[family], **config}
    hidden = _size(settings, "hidden_size")
    heads = _size(settings, "num_attention_heads")
    key_value_heads = int(settings.get("num_key_value_heads") or heads)
    head_size = int(settings.get("head_dim") or hidden // heads)
    inner = _size(settings, "intermediate_size")
    query_bias = family == "qwen2" or bool(settings.get("attention_bias", False))
    output_bias = family != "qwen2" and query_bias
    if family == "mistral":
        query_bias = output_bias = False
    mlp_bias = family in ("llama", "smollm3") and bool(settings.get("mlp_bias", False))
    keys = key_value_heads * head_size
    prefix = "model.layers.{layer}."
    block = (
        LinearLayer(prefix + "self_attn.q_proj", hidden, heads * head_size, query_bias),
        LinearLayer(prefix + "self_attn.k_proj", hidden, keys, query_bias),
        LinearLayer(prefix + "self_attn.v_proj", hidden, keys, query_bias),
        LinearLayer(prefix + "self_attn.o_proj", heads * head_size, hidden, output_bias),
        LinearLayer(prefix + "mlp.gate_proj", hidden, inner, mlp_bias),
        LinearLayer(prefix + "mlp.up_proj", hidden, inner, mlp_bias),
        LinearLayer(prefix + "mlp.down_proj", inner, hidden, mlp_bias),
    )
    norms = (4 if family == "gemma3_text" else 2) * hidden
    if family in ("qwen3", "gemma3_text"):
        norms += 2 * head_size
    return ModelShape(
        family=family,
        layers=_size(settings, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=key_value_heads,
        head_size=head_size,
        inner=inner,
        gated=True,
        activation=str(settings.get("hidden_act") or "silu"),
        vocabulary=_size(settings, "vocab_size"),
        positions=_size(settings, "max_position_embeddings"),
        position_rows=0,
        head_inputs=hidden,
        tied=bool(settings.get("tie_word_embeddings", False)),
        block=block,
        projections=(),
        block_norms=norms,
        outer_norms=hidden,
        dropout=0.0,
        attention_dropout=_chance(settings, "attention_dropout", 0.0),
    )


def _opt(config: Mapping[str, Any]) -> ModelShape:
    hidden = _size(config, "hidden_size")
    inner = _size(config, "ffn_dim")
    width = _size(config, "word_embed_proj_dim", "hidden_size")
    positions = _size(config, "max_position_embeddings")
    heads = _size(config, "num_attention_heads")
    bias = bool(config.get("enable_bias", True))
    prefix = "model.decoder.layers.{layer}."
    attention = tuple(
        LinearLayer(prefix + "self_attn." + name, hidden, hidden, bias)
        for name in ("k_proj", "v_proj", "q_proj", "out_proj")
    )
    mlp = (
        LinearLayer(prefix + "fc1", hidden, inner, bias),
        LinearLayer(prefix + "fc2", inner, hidden, bias),
    )
    projections = (
        (
            LinearLayer("model.decoder.project_out", hidden, width),
            LinearLayer("model.decoder.project_in", width, hidden),
        )
        if width != hidden
        else ()
    )
    norm = 2 * hidden if config.get("layer_norm_elementwise_affine", True) else 0
    final_norm = config.get("do_layer_norm_before", True) and not config.get(
        "_remove_final_layer_norm", False
    )
    return ModelShape(
        family="opt",
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        inner=inner,
        gated=False,
        activation=str(config.get("activation_function") or "relu"),
        vocabulary=_size(config, "vocab_size"),
        positions=positions,
        # OPT's table starts with two rows that no position uses.
        position_rows=positions + 2,
        head_inputs=width,
        tied=bool(config.get("tie_word_embeddings", True)),
        block=attention + mlp,
        projections=projections,
        block_norms=2 * norm,
        outer_norms=norm if final_norm else 0,
        dropout=_chance(config, "dropout", 0.1),
        attention_dropout=_chance(config, "attention_dropout", 0.0),
    )


def _gpt2(config: Mapping[str, Any]) -> ModelShape:
    hidden = _size(config, "n_embd", "hidden_size")
    heads = _size(config, "n_head", "num_attention_heads")
    positions = _size(config, "n_positions", "max_position_embeddings")
    inner = int(config.get("n_inner") or 4 * hidden)
    prefix = "transformer.h.{layer}."
    return ModelShape(
        family="gpt2",
        layers=_size(config, "n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        inner=inner,
        gated=False,
        activation=str(config.get("activation_function") or "gelu_new"),
        vocabulary=_size(config, "vocab_size"),
        positions=positions,
        position_rows=positions,
        head_inputs=hidden,
        tied=bool(config.get("tie_word_embeddings", True)),
        block=(
            LinearLayer(prefix + "attn.c_attn", hidden, 3 * hidden, True),
            LinearLayer(prefix + "attn.c_proj", hidden, hidden, True),
            LinearLayer(prefix + "mlp.c_fc", hidden, inner, True),
            LinearLayer(prefix + "mlp.c_proj", inner, hidden, True),
        ),
        projections=(),
        block_norms=4 * hidden,
        outer_norms=2 * hidden,
        dropout=_chance(config, "resid_pdrop", 0.1),
        attention_dropout=_chance(config, "attn_pdrop", 0.1),
    )


def _gpt_neox(config: Mapping[str, Any]) -> ModelShape:
    hidden = _size(config, "hidden_size")
    heads = _size(config, "num_attention_heads")
    inner = _size(config, "intermediate_size")
    bias = bool(config.get("attention_bias", True))
    prefix = "gpt_neox.layers.{layer}."
    return ModelShape(
        family="gpt_neox",
        layers=_size(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        inner=inner,
        gated=False,
        activation=str(config.get("hidden_act") or "gelu"),
        vocabulary=_size(config, "vocab_size"),
        positions=_size(config, "max_position_embeddings"),
        position_rows=0,
        head_inputs=hidden,
        tied=bool(config.get("tie_word_embeddings", False)),
        block=(
            LinearLayer(prefix + "attention.query_key_value", hidden, 3 * hidden, bias),
            LinearLayer(prefix + "attention.dense", hidden, hidden, bias),
            LinearLayer(prefix + "mlp.dense_h_to_4h", hidden, inner, True),
            LinearLayer(prefix + "mlp.dense_4h_to_h", inner, hidden, True),
        ),
        projections=(),
        block_norms=4 * hidden,
        outer_norms=2 * hidden,
        dropout=_chance(config, "hidden_dropout", 0.0),
        attention_dropout=_chance(config, "attention_dropout", 0.0),
    )


def _bloom(config: Mapping[str, Any]) -> ModelShape:
    hidden = _size(config, "hidden_size", "n_embed")
    heads = _size(config, "n_head", "num_attention_heads")
    prefix = "transformer.h.{layer}."
    return ModelShape(
        family="bloom",
        layers=_size(config, "n_layer", "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        key_value_heads=heads,
        head_size=hidden // heads,
        inner=4 * hidden,
        gated=False,
        activation="gelu",
        vocabulary=_size(config, "vocab_size"),
        # ALiBi has no table and no bound; the length of pretraining is the useful one.
        positions=int(config.get("seq_length") or 2048),
        position_rows=0,
        head_inputs=hidden,
        tied=bool(config.get("tie_word_embeddings", True)),
        block=(
            LinearLayer(prefix + "self_attention.query_key_value", hidden, 3 * hidden, True),
            LinearLayer(prefix + "self_attention.dense", hidden, hidden, True),
            LinearLayer(prefix + "mlp.dense_h_to_4h", hidden, 4 * hidden, True),
            LinearLayer(prefix + "mlp.dense_4h_to_h", 4 * hidden, hidden, True),
        ),
        projections=(),
        block_norms=4 * hidden,
        outer_norms=4 * hidden,
        dropout=_chance(config, "hidden_dropout", 0.0),
        attention_dropout=_chance(config, "attention_dropout", 0.0),
    )
