"""The contract that each verified model family keeps, and families that no table knows."""

from __future__ import annotations

import socket

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from engine.config.schema import LoraConfig
from engine.families import KNOWN_FAMILIES, family_of
from engine.families.generic import GENERIC
from engine.models.folders import missing_parts
from engine.models.load import load_causal_lm, load_tokenizer
from engine.models.lora import add_lora, lora_layers
from engine.models.positions import position_arguments
from engine.models.reward import RewardModel
from engine.models.save import save_model

LAYERS_A_BLOCK = {"opt": 6, "gpt2": 4, "gpt_neox": 4, "bloom": 4, "phi3": 4, "mpt": 4}
UNKNOWN = ("phi3", "mpt")


@pytest.fixture(params=[*sorted(KNOWN_FAMILIES), *UNKNOWN])
def family(request) -> str:
    return request.param


@pytest.fixture
def path(family, tiny_model) -> str:
    return tiny_model(family)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("a local model touched the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows of 7, 3 and 5 real tokens between padding on one side."""
    ids = torch.randint(2, 264, (3, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros_like(ids)
    rows = torch.ones_like(ids)
    for row, length in enumerate((7, 3, 5)):
        part = slice(0, length) if side == "right" else slice(7 - length, 7)
        mask[row, part] = 1
        rows[row, part] = ids[row, :length]
    return rows.masked_fill(mask == 0, 1), mask


def perturb(model: torch.nn.Module) -> None:
    """Give the adapters, whose second half starts at 0, an effect."""
    generator = torch.Generator().manual_seed(2)
    for layer in lora_layers(model):
        weight = layer.lora_B["default"].weight
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.1)


def assert_same_weights(one: torch.nn.Module, other: torch.nn.Module) -> None:
    """Bit for bit. Logits are not: where a file's header puts tensors decides over last bits."""
    ones, others = one.state_dict(), other.state_dict()
    assert ones.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in ones.items())


def test_the_table_names_all_linear_layers_of_the_blocks(family, path):
    by_family = add_lora(load_causal_lm(path, torch.float32), LoraConfig(rank=2))
    by_default = add_lora(
        load_causal_lm(path, torch.float32),
        LoraConfig(rank=2, targets=list(GENERIC.lora_targets)),
    )
    assert len(lora_layers(by_family)) == 2 * LAYERS_A_BLOCK.get(family, 7)
    assert by_family.state_dict().keys() == by_default.state_dict().keys()


def test_saved_and_loaded_again_without_network_is_the_same_model(path, tmp_path, no_network):
    model = load_causal_lm(path, torch.float32)
    tokenizer = load_tokenizer(path)
    save_model(model, tokenizer, tmp_path / "model")
    assert missing_parts(tmp_path / "model") == []
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids, mask = batch("right")
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask).logits
        logits = again(input_ids=ids, attention_mask=mask).logits
    assert_same_weights(again, model)
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)
    assert again.generation_config.eos_token_id == 0
    assert again.generation_config.pad_token_id == 1
    assert AutoTokenizer.from_pretrained(tmp_path / "model").chat_template
    ids, mask = batch("left")
    answers = again.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    assert answers.shape[0] == 3
    assert 7 < answers.shape[1] <= 11


def test_saving_merges_adapters_and_leaves_the_model_alone(path, tmp_path):
    model = add_lora(load_causal_lm(path, torch.float32), LoraConfig(rank=2, alpha=6, only=True))
    ids, mask = batch("right")
    with torch.no_grad():
        without_effect = model(input_ids=ids, attention_mask=mask).logits
        perturb(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        expected = model(input_ids=ids, attention_mask=mask).logits
    assert (expected - without_effect).abs().max() > 1e-2
    save_model(model, load_tokenizer(path), tmp_path / "model")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = load_causal_lm(str(tmp_path / "model"), torch.float32)
    assert again.state_dict().keys() == load_causal_lm(path, torch.float32).state_dict().keys()
    with torch.no_grad():
        merged = again(input_ids=ids, attention_mask=mask).logits
    real = mask.bool()
    torch.testing.assert_close(merged[real], expected[real], atol=2e-5, rtol=1e-4)


def test_padding_on_either_side_gives_the_same_values_and_scores(path):
    model = RewardModel.from_pretrained(path, torch.float32).eval()
    (left, left_mask), (right, right_mask) = batch("left"), batch("right")
    with torch.no_grad():
        left_values = model.values(left, left_mask)
        right_values = model.values(right, right_mask)
        scores = model.scores(left, left_mask)
        alone = torch.cat([model.scores(right[i : i + 1, :n], right_mask[i : i + 1, :n])
                           for i, n in enumerate((7, 3, 5))])  # fmt: skip
        right_scores = model.scores(right, right_mask)
    assert left_values.shape == (3, 7)
    assert left_values.dtype == torch.float32
    for row, length in enumerate((7, 3, 5)):
        torch.testing.assert_close(
            left_values[row, 7 - length :], right_values[row, :length], atol=1e-5, rtol=1e-4
        )
        assert scores[row] == left_values[row, -1]
    torch.testing.assert_close(scores, right_scores, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(scores, alone, atol=1e-5, rtol=1e-4)
    assert scores.std() > 1e-3


def test_other_tools_score_a_saved_reward_model_alike(path, tmp_path, no_network):
    model = RewardModel.from_pretrained(path, torch.float32, seed=3).eval()
    save_model(model, load_tokenizer(path), tmp_path / "model")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    assert again.config.num_labels == 1
    assert again.score.bias is None
    ids, mask = batch("left")
    with torch.no_grad():
        ours = model.scores(ids, mask)
        theirs = again(
            input_ids=ids, attention_mask=mask, **position_arguments(again, mask)
        ).logits.squeeze(-1)
    reloaded = RewardModel.from_pretrained(str(tmp_path / "model"), torch.float32)
    assert_same_weights(reloaded, model)
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-4)


def test_reward_model_with_only_lora_trains_head_and_adapters(path):
    model = add_lora(
        RewardModel.from_pretrained(path, torch.float32), LoraConfig(rank=2, only=True)
    )
    model.model.activation_checkpointing_enable()
    model.train()
    perturb(model)
    model(*batch("right")).square().sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {"model.score.weight"}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == trained
    assert all(gradient.abs().sum() > 0 for gradient in gradients.values())


def test_dropout_reaches_the_family(family, path):
    if family == "mpt":
        pytest.skip("transformers reads MPT's dropout from a field that takes whole numbers alone")
    ids, mask = batch("right")

    def differs(dropout: float) -> bool:
        model = load_causal_lm(path, torch.float32, dropout=dropout).train()
        with torch.no_grad():
            one, two = (model(input_ids=ids, attention_mask=mask).logits for _ in range(2))
        return not torch.equal(one, two)

    assert differs(0.5)
    assert not differs(0.0)
    config = load_causal_lm(path, torch.float32, dropout=0.3).config
    fields = family_of(family).dropout_fields
    present = [name for name in fields if hasattr(config, name)]
    assert family in UNKNOWN or len(present) == len(fields)
    assert {getattr(config, name) for name in present} == {0.3}


def test_the_unknown_are_in_no_table():
    assert not {*UNKNOWN} & {*KNOWN_FAMILIES}
