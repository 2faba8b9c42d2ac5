"""Which model a path means."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path

import pytest

from dschat_tui.chat.paths import PathError, find_model, relatives


def model(folder: Path, architecture: str = "LlamaForCausalLM", tokenizer: bool = True) -> Path:
    """A folder that looks like a model."""
    folder.mkdir(parents=True)
    config = {"architectures": [architecture], "model_type": "llama", "_name_or_path": "org/base"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    if tokenizer:
        (folder / "tokenizer_config.json").write_text("{}")
    return folder


def test_a_run_means_its_ema_else_its_actor_else_its_sft_model(tmp_path) -> None:
    run = tmp_path / "run"
    for place, name in (
        ("step1-sft/model", "sft"),
        ("step3-rlhf/actor", "actor"),
        ("step3-rlhf/actor_ema", "actor_ema"),
    ):
        model(run / place)
        found = find_model(str(run))
        assert (found.name, Path(found.location), found.run) == (name, run / place, run)
        step = find_model(str(run / place.split("/")[0]))
        assert (step.name, step.run) == (name, run)
        exact = find_model(str(run / place))
        assert (exact.name, exact.run) == (name, run)
    model(run / "step2-reward/model", "LlamaForSequenceClassification")
    assert set(relatives(run)) == {"sft", "actor", "actor_ema", "reward"}


def test_unfinished_runs_are_refused(tmp_path) -> None:
    (tmp_path / "step1-sft" / "model").mkdir(parents=True)
    with pytest.raises(PathError, match="no finished model"):
        find_model(str(tmp_path))


def test_reward_models_are_refused_with_the_reason(tmp_path) -> None:
    folder = model(tmp_path / "run/step2-reward/model", "LlamaForSequenceClassification")
    for path in (folder, folder.parent):
        with pytest.raises(PathError, match="cannot talk"):
            find_model(str(path))


def original(folder: Path, names: list[str]) -> Path:
    """The layout of the original's checkpoints: a zip of pickles, names in data.pkl."""
    model(folder, "OPTForCausalLM", tokenizer=False)
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(dict.fromkeys(names, 0)))
    return folder


def test_the_original_reward_model_is_known_by_its_value_head(tmp_path) -> None:
    folder = original(tmp_path / "reward", ["rwtransformer.x", "v_head.weight"])
    with pytest.raises(PathError, match="reward model"):
        find_model(str(folder), tokenizer="org/base")


def test_the_original_actor_needs_a_tokenizer(tmp_path) -> None:
    folder = original(tmp_path / "actor", ["model.decoder.x"])
    with pytest.raises(PathError, match="--tokenizer org/base"):
        find_model(str(folder))
    assert find_model(str(folder), tokenizer="org/base").location == str(folder)


def test_names_are_left_to_the_hub_but_paths_are_not(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_model("facebook/opt-125m") is None
    assert find_model("smollm2-135m") is None
    for path in ("./nowhere", "/nowhere/at/all", "a/b/c", "~/nowhere-at-all"):
        with pytest.raises(PathError, match="no folder"):
            find_model(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no weights"),
    ],
)
def test_incomplete_folders_are_refused(tmp_path, damage, reason) -> None:
    folder = model(tmp_path / "model")
    damage(folder)
    with pytest.raises(PathError, match=reason):
        find_model(str(folder))


def test_a_file_is_refused(tmp_path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(PathError, match="is a file"):
        find_model(str(tmp_path / "model.bin"))
