"""A model to chat with, placed to fit the available memory."""

from __future__ import annotations

import atexit
import importlib.util
import os
import socket
import warnings
from contextlib import ExitStack
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import CUDAMismatchException, MissingCUDAException
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from engine.config.deepspeed import deepspeed_config
from engine.config.placement import Machine, Placement
from engine.distributed import process_group
from engine.generation.chat import ChatGenerator, context_length
from engine.generation.decode import ModuleDecoder
from engine.generation.ragged import build_ragged_decoder
from engine.models.load import (
    ModelError,
    load_causal_lm,
    load_config,
    load_tokenizer,
    resize_for,
)
from engine.precision import dtype_name
from engine.trainers.engines import frozen_engine, zero3_loading

_PLAIN = Placement()
# What DeepSpeed-Inference raises for models that it does not know, and where its kernels do not
# build: its table of compatible operators does not look for a CUDA toolkit.
_CANNOT_LOAD = (
    ValueError,
    RuntimeError,
    AssertionError,
    AttributeError,
    ImportError,
    MissingCUDAException,
    CUDAMismatchException,
)


def this_machine() -> Machine:
    """Find out what this machine has for placements; no model is loaded."""
    operators = deepspeed.ops.__compatible_ops__
    return Machine(
        cuda=torch.cuda.is_available(),
        bitsandbytes=importlib.util.find_spec("bitsandbytes") is not None,
        async_io=bool(operators.get("async_io")),
        inference_kernels=importlib.util.find_spec("dskernels") is not None
        and bool(operators.get("ragged_device_ops")),
    )


def load_generator(
    path: str,
    name: str,
    dtype: torch.dtype,
    tokenizer: str | None = None,
    trust_remote_code: bool = False,
    placement: Placement = _PLAIN,
) -> ChatGenerator:
    """Load a model into a placement; `refusals` must have found nothing.

    Args:
        path: local folder or Hub id.
        name: what to call the model.
        dtype: format of the weights, or of what is computed with quantised ones.
        tokenizer: local folder or Hub id, where the model's own has none.
        trust_remote_code: run Python code that comes with the model.
        placement: where weights and cache are kept.

    Raises:
        ModelError: not found, not readable, or beyond what the placement's libraries can do.
    """
    if placement == _PLAIN:
        return ChatGenerator.from_pretrained(path, name, dtype, tokenizer, trust_remote_code)
    own_tokenizer = load_tokenizer(tokenizer or path, trust_remote_code)
    if placement.engine == "deepspeed":
        return _on_inference_engine(path, name, own_tokenizer, trust_remote_code)
    if placement.offload:
        model = _offloaded(path, dtype, own_tokenizer, trust_remote_code, placement)
    elif placement.load_in:
        model = _quantised(path, dtype, trust_remote_code, placement.load_in)
        resize_for(model, own_tokenizer)
    else:
        model = load_causal_lm(path, dtype, trust_remote_code=trust_remote_code)
        resize_for(model, own_tokenizer)
        model.to(_device())
    # The packed decoder copies weights, which would undo quantisation or offloading.
    decoder = ModuleDecoder(model) if placement.offload or placement.load_in else None
    return ChatGenerator(
        model, own_tokenizer, name, decoder=decoder, offload_cache=placement.offload_cache
    )


def _offloaded(
    path: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerBase,
    trust_remote_code: bool,
    placement: Placement,
) -> PreTrainedModel:
    """A model whose layers ZeRO-3 brings to the device one after another."""
    _join_alone()
    # DeepSpeed calls a collective that torch deprecates; the warning would interrupt a chat.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    config = deepspeed_config(
        zero_stage=3,
        offload=True,
        dtype=dtype_name(dtype),
        micro_batch_size=1,
        accumulation=1,
        ranks=1,
        nvme_path=placement.nvme_folder,
    )
    with zero3_loading(config):
        model = load_causal_lm(path, dtype, trust_remote_code=trust_remote_code)
        resize_for(model, tokenizer)
        return frozen_engine(model, config).module


def _quantised(
    path: str, dtype: torch.dtype, trust_remote_code: bool, load_in: str
) -> PreTrainedModel:
    from transformers import BitsAndBytesConfig

    if load_in == "8bit":
        quantisation = BitsAndBytesConfig(load_in_8bit=True)
    else:
        quantisation = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return load_causal_lm(
        path,
        dtype,
        trust_remote_code=trust_remote_code,
        quantization_config=quantisation,
        device_map={"": _device()},
    )


def _on_inference_engine(
    path: str, name: str, tokenizer: PreTrainedTokenizerBase, trust_remote_code: bool
) -> ChatGenerator:
    # DeepSpeed-Inference unpickles other formats without safeguards.
    if not list(Path(path).glob("*.safetensors")):
        raise ModelError(
            f"--engine deepspeed: {path} is no folder with *.safetensors, the one format of "
            "weights that it reads safely; use --engine hf"
        )
    _join_alone()
    config = load_config(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    try:
        decoder = build_ragged_decoder(path, context_length(shell, tokenizer), _device())
    except _CANNOT_LOAD as error:
        raise ModelError(
            f"--engine deepspeed: DeepSpeed-Inference cannot load {path} ({error}); use --engine hf"
        ) from error
    return ChatGenerator(shell, tokenizer, name, decoder=decoder)


def _join_alone() -> None:
    """Make the process group of one rank that DeepSpeed asks for, until the process ends."""
    if dist.is_initialized():
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    stack = ExitStack()
    stack.enter_context(process_group())
    atexit.register(stack.close)


def _device() -> torch.device:
    return torch.device(get_accelerator().current_device_name())
