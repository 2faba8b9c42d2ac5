"""DeepSpeed engines around our models: one that trains, one that only computes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import nn
from transformers import get_scheduler
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from engine.distributed import world_size


@dataclass(frozen=True)
class OptimizerPlan:
    """How one model is optimised: parameter groups carry learning rate and weight decay."""

    groups: list[dict[str, Any]]
    betas: tuple[float, float]
    eps: float
    scheduler: str
    warmup_steps: int
    total_steps: int


@contextmanager
def zero3_loading(config: dict[str, Any]) -> Iterator[None]:
    """Let transformers load a model into ZeRO-3 shards, if the configuration asks for ZeRO-3.

    No rank ever holds the whole model then.
    """
    if config["zero_optimization"]["stage"] != 3:
        yield
        return
    # transformers keeps a weak reference alone: the object must live as long as the loading.
    keep_alive = HfDeepSpeedConfig(config)
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


def training_engine(
    model: nn.Module, config: dict[str, Any], plan: OptimizerPlan
) -> deepspeed.DeepSpeedEngine:
    """Wrap a model for training with AdamW and a learning-rate schedule."""
    optimizer = _adamw(plan, offload="offload_optimizer" in config["zero_optimization"])
    scheduler = get_scheduler(
        plan.scheduler,
        optimizer,
        num_warmup_steps=plan.warmup_steps,
        num_training_steps=plan.total_steps,
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    # Models are loaded in evaluation mode.
    engine.train()
    return engine


def frozen_engine(model: nn.Module, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
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
    engine.backward(loss_sum * (world_size() / total), scale_wrt_gas=False)


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
        # DeepSpeed clips here without telling the norm.
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
    engine.step()
    if norm is None:
        norm = engine.get_global_grad_norm()
    return math.nan if norm is None else float(norm)


def _adamw(plan: OptimizerPlan, offload: bool) -> torch.optim.Optimizer:
    """DeepSpeed's kernels on a GPU where they build, else torch's fused AdamW.

    On a CPU torch's is as fast as DeepSpeed's and needs no compiler.
    """
    arguments: dict[str, Any] = {"betas": plan.betas, "eps": plan.eps}
    if get_accelerator().device_name() != "cpu":
        compatible = deepspeed.ops.__compatible_ops__
        if offload and compatible.get("cpu_adam"):
            return deepspeed.ops.adam.DeepSpeedCPUAdam(plan.groups, **arguments)
        if not offload and compatible.get("fused_adam"):
            return deepspeed.ops.adam.FusedAdam(plan.groups, **arguments)
    return torch.optim.AdamW(plan.groups, fused=True, **arguments)
