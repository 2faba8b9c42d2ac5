"""Load tokenizers and causal language models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from engine.families import family_of
from engine.models.folders import ModelError
from engine.models.names import is_local, resolve_model

__all__ = [
    "ModelError",
    "load_causal_lm",
    "load_config",
    "load_tokenizer",
    "resize_for",
    "resolve_model",
]


def load_tokenizer(
    path: str, trust_remote_code: bool = False, end_of_conversation_token: str | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer whose EOS ends an answer and that has a pad token.

    Padding is the tokenizer's own token, else its EOS, by id. An end-of-conversation token
    becomes the EOS, and is added to the vocabulary if it is missing there.

    Raises:
        ModelError: not found, not readable, or without any EOS.
    """
    with explained(path, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=is_local(path)
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if end_of_conversation_token is not None:
        tokenizer.add_special_tokens({"eos_token": end_of_conversation_token})
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of {path!r} has no EOS token, so no answer would ever end; set "
            "data.end_of_conversation_token, for example to <|im_end|>"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_causal_lm(
    path: str,
    dtype: torch.dtype,
    dropout: float | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """A causal language model in `dtype`, in evaluation mode.

    Under an active `HfDeepSpeedConfig` of ZeRO-3 its parameters are partitioned while loading.

    Args:
        path: local folder or Hub id.
        dtype: format of the weights.
        dropout: probability for every dropout field of its config; None leaves them.
        trust_remote_code: run Python code that comes with the model.
        options: more of `from_pretrained`, such as its quantization_config.

    Raises:
        ModelError: not found, not readable, or with weights missing.
    """
    config = load_config(path, dropout, trust_remote_code)
    model, loading = load_weights(
        AutoModelForCausalLM, path, config, dtype, trust_remote_code, **options
    )
    if loading["missing_keys"]:
        raise ModelError(
            f"the weights in {path!r} lack {sorted(loading['missing_keys'])[:3]}, which would "
            "start at random; give a complete causal language model"
        )
    return model


def load_config(
    path: str, dropout: float | None = None, trust_remote_code: bool = False
) -> PretrainedConfig:
    """The config of a model, with `dropout` in every dropout field of its family.

    Raises:
        ModelError: not found or not readable.
    """
    with explained(path, "config"):
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=is_local(path)
        )
    if dropout is not None:
        for field in family_of(config.model_type).dropout_fields:
            if hasattr(config, field):
                setattr(config, field, dropout)
    return config


def load_weights(
    auto_class: Any,
    path: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    **options: Any,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of an Auto class, and transformers' report on keys missing and unexpected.

    Raises:
        ModelError: not found or not readable.
    """
    with explained(path, "model"):
        return auto_class.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=is_local(path),
            weights_only=True,
            output_loading_info=True,
            **options,
        )


def resize_for(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Enlarge the vocabulary to the next multiple of 8 where the tokenizer has more tokens."""
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)


@contextmanager
def explained(path: str, what: str) -> Iterator[None]:
    """Turn transformers' long errors of loading into a `ModelError` with the way out."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        way_out = (
            "check that the folder is a complete Hugging Face checkpoint"
            if is_local(path)
            else "check the name and the network, or give a local folder"
        )
        raise ModelError(f"cannot load the {what} of {path!r}: {reason}; {way_out}") from error
