"""DeepSpeed's own configuration, made from ours. Brings in no torch."""

from __future__ import annotations

from typing import Any

from engine.config.schema import MixzConfig


def deepspeed_config(
    *,
    zero_stage: int,
    offload: bool,
    dtype: str,
    micro_batch_size: int,
    accumulation: int,
    ranks: int,
    max_gradient_norm: float | None = None,
    mixz: MixzConfig | None = None,
    monitor: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """The configuration of one engine.

    Args:
        zero_stage: 0 to 3.
        offload: optimizer states in host memory, and parameters too under ZeRO-3.
        dtype: fp32, bf16 or fp16.
        micro_batch_size: rows a rank at once.
        accumulation: micro batches an optimizer step.
        ranks: data-parallel ranks.
        max_gradient_norm: clips gradients; None for an engine that is not trained.
        mixz: quantise frozen weights.
        monitor: folder and job name of TensorBoard events, written by rank 0.
    """
    zero: dict[str, Any] = {"stage": zero_stage}
    if zero_stage == 3:
        # Shards of small parameters cost more to gather than they save.
        zero |= {"stage3_param_persistence_threshold": 10_000}
        zero["offload_param"] = {"device": "cpu" if offload else "none"}
    if offload and max_gradient_norm is not None:
        zero["offload_optimizer"] = {"device": "cpu"}
    if mixz is not None and mixz.enabled:
        zero["zero_quantized_nontrainable_weights"] = True
        zero["zero_hpz_partition_size"] = mixz.hpz_partition_size or 1
    config: dict[str, Any] = {
        "train_batch_size": micro_batch_size * accumulation * ranks,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**9,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "wall_clock_breakdown": False,
    }
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale_window": 100}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if max_gradient_norm is not None:
        config["gradient_clipping"] = max_gradient_norm
    if monitor is not None:
        config["tensorboard"] = {
            "enabled": True,
            "output_path": monitor[0],
            "job_name": monitor[1],
        }
    return config
