"""Tiny models of about one million parameters, built on this machine; nothing is downloaded."""

from __future__ import annotations

import functools
import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.models.folders import ModelError, cache_folder, is_complete_model, new_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARY = 1024
_SHARED = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
# The configurations as in config.json, without the ids of special tokens.
CONFIGS: dict[str, dict[str, Any]] = {
    "tiny-llama": {
        "model_type": "llama",
        "intermediate_size": 352,
        "initializer_range": 0.05,
        **_SHARED,
    },
    "tiny-opt": {
        "model_type": "opt",
        "ffn_dim": 512,
        "word_embed_proj_dim": 128,
        "dropout": 0.0,
        "init_std": 0.05,
        **_SHARED,
    },
}
_EOS, _PAD = "<|endoftext|>", "<|pad|>"
# Part of the key of the cache: raise it with any change of what is built.
_VERSION = "2"


def build(name: str, texts: Iterable[str] | None = None) -> Path:
    """The folder of an embedded model with random weights, built at its first use.

    Args:
        name: one of `CONFIGS`.
        texts: what the tokenizer is trained on; None means the embedded corpus of facts.

    Raises:
        ModelError: unknown name.
    """
    if name not in CONFIGS:
        known = ", ".join(f"embedded:{known}" for known in CONFIGS)
        raise ModelError(f"no embedded model {name!r}; there are {known}")
    texts = _texts() if texts is None else tuple(texts)
    folder = _folder(name, texts)
    if folder.exists() and not is_complete_model(folder):
        # Folders appear whole, so this one was damaged since.
        shutil.rmtree(folder)
    if not folder.exists():
        _build(name, texts, folder)
    return folder


def built_folder(name: str) -> Path | None:
    """The folder of an embedded model, without torch; None if it is not built yet."""
    folder = _folder(name, _texts())
    return folder if is_complete_model(folder) else None


@functools.cache
def _texts() -> tuple[str, ...]:
    from engine.data import facts

    return tuple(facts.texts())


def _folder(name: str, texts: tuple[str, ...]) -> Path:
    digest = hashlib.sha256("\0".join([_VERSION, name, *texts]).encode()).hexdigest()
    return cache_folder() / f"{name}-{digest[:16]}"


def _build(name: str, texts: tuple[str, ...], folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from engine.data.templates import install_template

    tokenizer = _train_tokenizer(texts)
    install_template(tokenizer, "human_assistant")
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = AutoConfig.for_model(**CONFIGS[name], **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with new_folder(folder, replace=False) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _train_tokenizer(texts: tuple[str, ...]) -> PreTrainedTokenizerBase:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[_EOS, _PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=_EOS, eos_token=_EOS, pad_token=_PAD
    )
