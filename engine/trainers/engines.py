"""DeepSpeed engines around our models: one that trains, one that only computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn
from transformers import get_scheduler
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from engine.config.deepspeed import EngineConfig
from engine.config.schema import StepConfig
from engine.distributed import world_size
from engine.models.quantization import describe_quantizer, install_quantizer
from engine.operators import why_not_loaded
from engine.planning.memory import LARGEST_REDUCE_BUCKET
from engine.report import Report
from engine.trainers.overflow import log_overflows, loss_scale, scale_updated_afterwards


@contextmanager
def zero3_loading(config: EngineConfig) -> Iterator[None]:
    """Let transformers load a model into ZeRO-3 shards, if the configuration asks for ZeRO-3.

    No rank ever holds the whole model then.

    Raises:
        ValueError: an option of ZeRO-3 that this device lacks.
    """
    zero = config["zero_optimization"]
    if zero["stage"] != 3:
        yield
        return
    _check_device(zero)
    if _quantizes_weights(zero):
        install_quantizer()
    # transformers keeps only a weak reference: the object must outlive the loading.
    keep_alive = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


def training_engine(
    model: nn.Module,
    config: EngineConfig,
    groups: list[dict[str, Any]],
    options: StepConfig,
    total_steps: int,
    report: Report,
    eps: float = 1e-8,
) -> deepspeed.DeepSpeedEngine:
    """Wrap a model for training with AdamW and a learning-rate schedule.

    Args:
        model: whose parameters the groups hold.
        config: DeepSpeed's.
        groups: parameters with their learning rate and weight decay.
        options: the step's betas, schedule and warm-up.
        total_steps: optimizer steps of the whole schedule.
        report: gets a note of which optimizer is used.
        eps: Adam's epsilon.
    """
    zero = config["zero_optimization"]
    trained = sum(getattr(p, "ds_numel", p.numel()) for group in groups for p in group["params"])
    # DeepSpeed allocates the whole bucket at once, by default 5e8 elements.
    zero["reduce_bucket_size"] = min(LARGEST_REDUCE_BUCKET, trained)
    offload = "offload_optimizer" in zero
    optimizer = _adamw(groups, offload, report, betas=options.adam_betas, eps=eps)
    scheduler = get_scheduler(
        options.scheduler,
        optimizer,
        num_warmup_steps=options.warmup_steps,
        # The polynomial schedule divides by the steps after warm-up once warm-up is over.
        num_training_steps=max(total_steps, options.warmup_steps + 1),
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    if not engine.zero_optimization() and (engine.fp16_enabled() or engine.bfloat16_enabled()):
        _undo_first_step(engine.optimizer)
    if engine.fp16_enabled():
        log_overflows()
    if _quantizes_weights(zero):
        report.note(describe_quantizer())
    # Models are loaded in evaluation mode.
    engine.train()
    return engine


def frozen_engine(model: nn.Module, config: EngineConfig) -> deepspeed.DeepSpeedEngine:
    """Wrap a model that only computes: the reference, or the reward model of step 3."""
    model.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    return engine


def backward(engine: deepspeed.DeepSpeedEngine, loss_sum: torch.Tensor, total: float) -> None:
    """Backward pass of one micro batch's summed loss, as a mean over the global `total`.

    DeepSpeed averages gradients over ranks: the factor undoes that, so that a mean over tokens of
    uneven rows is the same however they are cut into ranks and micro batches.
    """
    loss = loss_sum * (world_size() / total)
    if engine.fp16_enabled():
        scale = loss_scale(engine)
        # DeepSpeed 0.19 multiplies the loss by the scale only under ZeRO, though the wrappers of
        # stage 0 divide gradients by it as well. Set here, the factor is right in both cases.
        loss.register_hook(lambda gradient: torch.full_like(gradient, scale))
    engine.backward(loss, scale_wrt_gas=False)


def learning_rates(engine: deepspeed.DeepSpeedEngine) -> list[float]:
    """The current learning rates of an engine's parameter groups."""
    return [float(group["lr"]) for group in engine.optimizer.param_groups]


def engine_step(engine: deepspeed.DeepSpeedEngine) -> float:
    """Step the engine after a micro batch's backward pass.

    Returns:
        the global gradient norm before clipping at the last micro batch of an optimizer step;
        nan at the others.
    """
    if not engine.is_gradient_accumulation_boundary():
        engine.step()
        return math.nan
    norm = None
    if not (engine.zero_optimization() or engine.fp16_enabled() or engine.bfloat16_enabled()):
        # DeepSpeed clips here without returning the norm.
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
    scale = loss_scale(engine)
    with scale_updated_afterwards(engine):
        engine.step()
    if norm is None:
        norm = engine.get_global_grad_norm()
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            # Its norm is that of the scaled gradients.
            norm /= scale
    return math.nan if norm is None else float(norm)


def _undo_first_step(wrapper: FP16_Optimizer | FP16_UnfusedOptimizer) -> None:
    """Forget the step on gradients of zero by which DeepSpeed allocates Adam's states at stage 0.

    Adam would count it, which makes the first real steps a quarter smaller, and weight decay has
    already acted on the fp32 weights.
    """
    wrapper.refresh_fp32_params()
    wrapper.optimizer.state.clear()
    for group in wrapper.optimizer.param_groups:
        # FusedAdam counts its steps here, torch's AdamW in the state.
        group.pop("step", None)


def _quantizes_weights(zero: EngineConfig) -> bool:
    options = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")
    return any(zero.get(option) for option in options)


def _check_device(zero: EngineConfig) -> None:
    """Refuse options that need DeepSpeed kernels which do not load here."""
    if zero.get("zero_quantized_gradients"):
        missing = why_not_loaded("QuantizerBuilder")
        if missing:
            raise ValueError(
                "zero_quantized_gradients needs DeepSpeed's CUDA kernels, which do not load here "
                f"({missing}); set actor.zero_quantized_gradients=false and "
                "critic.zero_quantized_gradients=false"
            )
    if zero["offload_param"]["device"] == "nvme":
        missing = why_not_loaded("AsyncIOBuilder")
        if missing:
            raise ValueError(
                f"nvme_path={zero['offload_param']['nvme_path']} needs DeepSpeed's async_io, which "
                f"does not load here ({missing}); install a C++ compiler and libaio with its "
                "headers (libaio-dev), or set actor.nvme_path=null and critic.nvme_path=null"
            )


def _adamw(
    groups: list[dict[str, Any]], offload: bool, report: Report, **options: Any
) -> torch.optim.Optimizer:
    """DeepSpeed's AdamW where its kernel loads on all ranks, else torch's."""
    if get_accelerator().device_name() == "cpu":
        # As fast as DeepSpeed's on a CPU, and needs no compiler.
        report.note("optimizer: AdamW of torch")
        return torch.optim.AdamW(groups, fused=True, **options)
    kind = "DeepSpeedCPUAdam" if offload else "FusedAdam"
    missing = why_not_loaded("CPUAdamBuilder" if offload else "FusedAdamBuilder")
    if missing:
        report.warning(
            f"optimizer: AdamW of torch, since {kind} of DeepSpeed does not load: {missing}"
        )
        return torch.optim.AdamW(groups, fused=True, **options)
    report.note(f"optimizer: {kind} of DeepSpeed")
    return getattr(deepspeed.ops.adam, kind)(groups, **options)
