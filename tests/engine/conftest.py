"""Tiny random models of every verified family, built once a session."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import configuration
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

_LLAMA_SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_LLAMA_SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
_LLAMA_SHAPE |= {"max_position_embeddings": 64}
_NEOX_SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_NEOX_SHAPE |= {"max_position_embeddings": 64}

_FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {
        **_NEOX_SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 24, "dropout": 0.0, "init_std": 0.1
    },
    "llama": {**_LLAMA_SHAPE, "tie_word_embeddings": True},
    "mistral": {**_LLAMA_SHAPE, "head_dim": 8},
    "qwen2": _LLAMA_SHAPE,
    "qwen3": {**_LLAMA_SHAPE, "head_dim": 8},
    "qwen3_moe": {
        **_LLAMA_SHAPE, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "decoder_sparse_step": 1,
    },
    "gemma3_text": {**_LLAMA_SHAPE, "head_dim": 8, "layer_types": ["full_attention"] * 2},
    "smollm3": _LLAMA_SHAPE,
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.1,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    },
    "gpt_neox": {**_NEOX_SHAPE, "intermediate_size": 48, "initializer_range": 0.1},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.1},
    # unknown to the table of families and to the planner: fused projections, and a config that
    # names no size as the others do
    "phi3": _LLAMA_SHAPE,
    "mpt": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 128,
        "initializer_range": 0.1,
    },
}  # fmt: skip
VOCABULARY = 264


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 264 tokens; EOS is 0, pad is 1."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["Human: one and two and three. Assistant: that is six."] * 9, trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<eos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )


@pytest.fixture(scope="session")
def tiny_model(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """From a family (a `model_type` of transformers) to the folder of a tiny fp32 model."""
    root = tmp_path_factory.mktemp("tiny-models")

    def build(family: str) -> str:
        folder: Path = root / family
        if not folder.exists():
            ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
            shape = _FAMILIES[family]
            config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **ids, **shape)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tiny_tokenizer.save_pretrained(folder)
        return str(folder)

    return build


@pytest.fixture(scope="session")
def group():
    """A process group of this process alone, as the launcher would make it."""
    patch = pytest.MonkeyPatch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        patch.setenv(name, value)
    from engine.distributed import process_group

    with process_group():
        yield
    patch.undo()


@pytest.fixture(scope="session")
def finished_steps(tmp_path_factory, group) -> Path:
    """A run whose steps 1 and 2 are done."""
    from engine.trainers.context import StepContext
    from engine.trainers.reward import RewardTrainer
    from engine.trainers.sft import SFTTrainer

    folder = tmp_path_factory.mktemp("run")
    for trainer_type, step in ((SFTTrainer, "sft"), (RewardTrainer, "reward")):
        trainer = trainer_type(StepContext.create(configuration(), folder, step))
        trainer.train()
        trainer.save()
    return folder


@pytest.fixture
def run(finished_steps, tmp_path_factory) -> Path:
    """A folder of one's own whose steps 1 and 2 are done, for step 3 to begin with."""
    folder = tmp_path_factory.mktemp("run")
    for step in finished_steps.iterdir():
        (folder / step.name).symlink_to(step)
    return folder


@pytest.fixture(scope="session")
def nothing_held_out(tmp_path_factory) -> str:
    """Pairs whose held-out ones do not fit into any step."""
    folder = tmp_path_factory.mktemp("data") / "pairs"
    folder.mkdir()
    for part, words, count in (("train", "", 160), ("test", "word " * 150, 2)):
        pairs = [
            {"prompt": f"Say {number}. {words}", "chosen": str(number), "rejected": "no"}
            for number in range(count)
        ]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(folder)
