"""Saving a file at a time: the files that transformers would write, and little memory."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import deepspeed
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from engine.config.schema import LoraConfig
from engine.models import save as save_module
from engine.models.load import load_causal_lm, load_tokenizer
from engine.models.lora import add_lora
from engine.models.reward import RewardModel
from engine.models.save import save_model

SHARD = 20_000
INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(save_module, "_SHARD_BYTES", SHARD)


def weights(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by their name, by the name of the file that holds them."""
    return {file.name: load_file(file) for file in sorted(folder.glob("*.safetensors"))}


def assert_same_files(folder: Path, expected: Path) -> None:
    ours, theirs = weights(folder), weights(expected)
    assert ours.keys() == theirs.keys()
    for file, tensors in theirs.items():
        assert ours[file].keys() == tensors.keys()
        assert all(torch.equal(ours[file][name], value) for name, value in tensors.items())
    assert (folder / INDEX).exists() == (expected / INDEX).exists()
    if (expected / INDEX).exists():
        assert json.loads((folder / INDEX).read_text()) == json.loads(
            (expected / INDEX).read_text()
        )


# Tied embeddings, a projection, layers stored transposed.
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("size", [SHARD, 10**9])
def test_files_are_those_of_transformers(family, size, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(save_module, "_SHARD_BYTES", size)
    path = tiny_model(family)
    model = load_causal_lm(path, torch.float32)
    save_model(model, load_tokenizer(path), tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    assert (len(weights(tmp_path / "ours")) > 1) == (size == SHARD)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    before = model.state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in again.items())


def test_experts_are_written_apart_as_their_family_has_them(tiny_model, tmp_path):
    path = tiny_model("qwen3_moe")
    model = load_causal_lm(path, torch.float32)
    save_model(model, load_tokenizer(path), tmp_path / "ours")
    files = weights(tmp_path / "ours")
    assert len(files) > 1
    held = {name: value for tensors in files.values() for name, value in tensors.items()}
    # transformers counts parts of one tensor in memory as one, and cuts elsewhere.
    expected = load_file(Path(path) / "model.safetensors")
    assert held.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in held.items())
    index = json.loads((tmp_path / "ours" / INDEX).read_text())
    assert index["weight_map"] == {name: file for file in files for name in files[file]}
    for tensors in files.values():
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= SHARD


def test_a_reward_model_is_written_in_several_files_too(tiny_model, tmp_path):
    path = tiny_model("llama")
    model = RewardModel.from_pretrained(path, torch.bfloat16, seed=1)
    save_model(model, load_tokenizer(path), tmp_path / "ours")
    model.model.save_pretrained(tmp_path / "theirs", max_shard_size=SHARD)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def tensors_in(objects: list) -> list[torch.Tensor]:
    """The tensors among objects that take memory, which those on the meta device do not."""
    tensors = [each for each in objects if issubclass(type(each), torch.Tensor)]
    return [tensor for tensor in tensors if not tensor.is_meta]


def bytes_held(tensors: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages of tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("rank", [0, 4])
def test_no_more_than_a_file_and_a_tensor_is_held(rank, tiny_model, tmp_path, group, monkeypatch):
    path = tiny_model("qwen2")
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    keep_alive = HfDeepSpeedConfig(settings)
    try:
        model = load_causal_lm(path, torch.float32)
    finally:
        unset_hf_deepspeed_config()
    del keep_alive
    if rank:
        add_lora(model, LoraConfig(rank=rank))
    # A gathered tensor, the copy that is kept or merged of it, and a file.
    sizes = [4 * getattr(each, "ds_numel", each.numel()) for each in model.parameters()]
    allowed = SHARD + 2 * max(sizes)
    assert sum(sizes) > 1.4 * allowed
    tokenizer = load_tokenizer(path)
    seen = []
    # Without collections, what is made from here on stays in the youngest generation, which is
    # far quicker to look through than all objects of the process.
    gc.collect()
    older = tensors_in(gc.get_objects())

    class Watched(deepspeed.zero.GatheredParameters):
        def __exit__(self, *exception):
            seen.append(bytes_held([*older, *tensors_in(gc.get_objects(generation=0))]))
            return super().__exit__(*exception)

    monkeypatch.setattr(deepspeed.zero, "GatheredParameters", Watched)
    before = bytes_held(older)
    gc.disable()
    try:
        save_model(model, tokenizer, tmp_path / "model")
    finally:
        gc.enable()
    assert len(weights(tmp_path / "model")) > 4
    assert max(seen) - before <= allowed
