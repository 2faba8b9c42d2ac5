"""The shape of a language model, read from its `config.json`: its layers and parameter counts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.families import KNOWN_FAMILIES
from engine.families.family import Family, LinearLayer

Head = Literal["lm", "score"]


class UnknownFamilyError(ValueError):
    """A model family whose layers the planner does not know; it trains all the same."""

    def __init__(self, family: str) -> None:
        known = ", ".join(KNOWN_FAMILIES)
        super().__init__(f"the planner does not know models of type {family!r}, only {known}")


@dataclass(frozen=True)
class ModelShape:
    """Sizes of one decoder-only transformer.

    `block` are the linear layers of one of `layers` equal blocks, `projections` those outside of
    the blocks (OPT-350M has two). `block_norms` and `outer_norms` count the elements of the
    normalisations. `head_inputs` is the width of the embeddings and of the head's input.
    `position_rows` counts the rows of a table of learned positions, 0 for rotary and ALiBi.
    """

    family: Family
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    inner: int
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
        name = str(config.get("model_type"))
        if name not in KNOWN_FAMILIES:
            raise UnknownFamilyError(name)
        family = KNOWN_FAMILIES[name]
        sizes = family.sizes(config)
        return cls(
            family=family,
            layers=sizes.layers,
            hidden=sizes.hidden,
            heads=sizes.heads,
            key_value_heads=sizes.key_value_heads,
            head_size=sizes.head_size,
            inner=sizes.inner,
            activation=str(sizes.config.get(family.activation_key) or family.activation),
            vocabulary=sizes.vocabulary,
            positions=sizes.positions,
            position_rows=family.position_rows(sizes),
            head_inputs=family.head_inputs(sizes),
            tied=sizes.flag("tie_word_embeddings"),
            block=family.block(sizes),
            projections=family.projections(sizes),
            block_norms=family.block_norms(sizes),
            outer_norms=family.outer_norms(sizes),
            dropout=family.dropout(config),
            attention_dropout=family.attention_dropout(config),
        )

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
    def gated(self) -> bool:
        """Whether the feed-forward network has a gate."""
        return self.family.gated

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
                f"lora.targets {patterns} match no linear layer of the {self.family.model_type} "
                f"model; its layers end in: {names}"
            )
        return found

    def lora_parameters(self, rank: int, targets: Iterable[str] = ()) -> int:
        """Elements of the adapters: `rank * (inputs + outputs)` a layer (Hu et al. 2021, 4.1)."""
        if rank == 0:
            return 0
        return sum(rank * (layer.inputs + layer.outputs) for layer in self.lora_layers(targets))
