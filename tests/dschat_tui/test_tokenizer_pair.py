"""Actor and reward model with different tokenizers are refused before the start, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dschat_tui.runs.preflight import Refusal, prepare
from engine.config.loading import resolve
from engine.models import embedded


def write_model(folder: Path, *words: str) -> Path:
    """A complete model folder by its files' names, with a tokenizer of these words."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text("{}")
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def told(tmp_path: Path, **models: object) -> str:
    named = {key: str(name) for key, name in models.items()}
    try:
        prepare(resolve({"models": named}, "test"), tmp_path / "run", None)
    except Refusal as refusal:
        return "\n".join(refusal.reasons)
    return ""


def test_both_models_are_named(tmp_path):
    actor, reward = write_model(tmp_path / "a", "x", "y"), write_model(tmp_path / "b", "y", "x")
    message = told(tmp_path, actor=actor, reward=reward)
    assert f"models.actor={actor} and models.reward={reward} have different tokenizers" in message
    assert "Fix: models.reward=sft" in message


def test_finished_models_are_the_ones_compared(tmp_path):
    sft, reward = write_model(tmp_path / "a", "x", "y"), write_model(tmp_path / "b", "y", "x")
    message = told(tmp_path, sft=sft, trained_reward=reward)
    assert f"models.sft={sft} and models.trained_reward={reward}" in message
    same = write_model(tmp_path / "c", "x", "y")
    assert told(tmp_path, sft=sft, trained_reward=same) == ""


def test_downloaded_models_are_compared_too(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, words in (("one", ("x", "y")), ("two", ("y", "x")), ("three", ("x", "y"))):
        folder = tmp_path / "hub" / f"models--org--{name}"
        write_model(folder / "snapshots" / "abc", *words)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
    assert "models.actor=org/one and models.reward=org/two" in told(
        tmp_path, actor="org/one", reward="org/two"
    )
    assert told(tmp_path, actor="org/one", reward="org/three") == ""
    assert told(tmp_path, actor="org/one", reward="org/not-here") == ""


@pytest.mark.parametrize("words", [("x", "y"), ("y", "x")])
def test_an_embedded_model_is_compared_once_it_is_built(tmp_path, monkeypatch, words):
    built, other = write_model(tmp_path / "built", "x", "y"), write_model(tmp_path / "b", *words)
    monkeypatch.setattr(embedded, "built_folder", lambda _: built)
    message = told(tmp_path, actor="embedded:tiny-llama", reward=other)
    assert ("have different tokenizers" in message) == (words != ("x", "y"))
