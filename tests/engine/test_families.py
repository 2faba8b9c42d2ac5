"""Each file of engine/families, held against the models of transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from test_planning_shapes import TINY, build

from engine.families import KNOWN_FAMILIES, family_of
from engine.generation.cache import KeyValueCache
from engine.generation.packed import PackedDecoder, unsupported_reason
from engine.planning import ModelShape

CONFIGS = {config["model_type"]: config for config in TINY.values()}


def test_no_file_needs_torch():
    code = "import sys, engine.families; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_are_named_after_model_types_and_shapes_of_all_are_compared():
    assert [family.model_type for family in KNOWN_FAMILIES.values()] == list(KNOWN_FAMILIES)
    assert CONFIGS.keys() == KNOWN_FAMILIES.keys()
    assert family_of("phi3").model_type == ""


@pytest.mark.parametrize("name", KNOWN_FAMILIES)
def test_lora_targets_are_the_linear_layers_of_the_blocks(name):
    shape = ModelShape.from_config(CONFIGS[name])
    assert shape.lora_layers(KNOWN_FAMILIES[name].lora_targets) == shape.lora_layers()


@pytest.mark.parametrize("name", [n for n, family in KNOWN_FAMILIES.items() if family.packed])
def test_packed_layouts_compute_what_the_model_computes(name):
    model = build(CONFIGS[name]).eval()
    if name == "mistral":
        model.config.sliding_window = None
    assert unsupported_reason(model) is None
    ids = torch.randint(2, 96, (3, 9), generator=torch.Generator().manual_seed(1))
    decoder = PackedDecoder(model, rows=3)
    positions = torch.arange(9).expand(3, 9)
    cache = KeyValueCache()
    cache.start(3, 9)
    with torch.no_grad():
        expected = model(ids).logits[:, -1]
        logits = decoder.step(ids, positions, None, cache)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
