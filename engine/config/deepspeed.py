"""DeepSpeed's own configuration, made from ours. Brings in no torch."""

from __future__ import annotations

from typing import Any, TypedDict

from engine.config.schema import RoleConfig, RunConfig
from engine.config.steps import RoleName

EngineConfig = dict[str, Any]
"""DeepSpeed's own configuration, whose keys and types are DeepSpeed's."""


class RoleLayout(TypedDict):
    """How a trained model is laid out, as arguments of `deepspeed_config`."""

    zero_stage: int
    offload: bool
    nvme_path: str | None
    zero_options: EngineConfig


def deepspeed_config(
    *,
    zero_stage: int,
    offload: bool,
    dtype: str,
    micro_batch_size: int,
    accumulation: int,
    ranks: int,
    max_gradient_norm: float | None = None,
    zero_options: EngineConfig | None = None,
    nvme_path: str | None = None,
    monitor: tuple[str, str] | None = None,
) -> EngineConfig:
    """The configuration of one engine.

    Args:
        zero_stage: 0 to 3.
        offload: optimizer states in host memory, and parameters too under ZeRO-3.
        dtype: fp32, bf16 or fp16.
        micro_batch_size: rows per rank at a time.
        accumulation: micro batches per optimizer step.
        ranks: data-parallel ranks.
        max_gradient_norm: clips gradients; None for an engine that is not trained.
        zero_options: further keys of its section zero_optimization.
        nvme_path: folder for what is offloaded, in place of host memory.
        monitor: folder and job name of TensorBoard events, written by rank 0.
    """
    zero: EngineConfig = {"stage": zero_stage}
    place = {"device": "cpu"} if nvme_path is None else {"device": "nvme", "nvme_path": nvme_path}
    if zero_stage == 3:
        # Shards of small parameters cost more to gather than they save.
        zero |= {"stage3_param_persistence_threshold": 10_000}
        zero["offload_param"] = place if offload else {"device": "none"}
    if offload and max_gradient_norm is not None:
        zero["offload_optimizer"] = place
    zero |= zero_options or {}
    config: EngineConfig = {
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


def role_layout(config: RunConfig, role: RoleName) -> RoleLayout:
    """How a role's model is laid out; MixZ concerns only the actor."""
    options: RoleConfig = getattr(config, role)
    zero_options: EngineConfig = {}
    mixz = role == "actor" and config.mixz.enabled
    if options.zero_quantized_weights:
        zero_options["zero_quantized_weights"] = True
    if options.zero_quantized_gradients:
        zero_options["zero_quantized_gradients"] = True
    if mixz:
        zero_options["zero_quantized_nontrainable_weights"] = True
        # When several are gathered at once, DeepSpeed 0.19.8 leaves quantised weights as integers.
        zero_options["stage3_allgather_sequential"] = True
    if mixz or options.hierarchical_partition:
        zero_options["zero_hpz_partition_size"] = _devices_of_a_node(config)
    return {
        "zero_stage": options.zero_stage,
        "offload": options.offload,
        "nvme_path": options.nvme_path,
        "zero_options": zero_options,
    }


def _devices_of_a_node(config: RunConfig) -> int:
    """The size of a secondary partition: 1, which is none, unless there are several nodes."""
    several = config.launch.deployment == "multi_node"
    return config.mixz.hpz_partition_size or (config.launch.num_accelerators if several else 1)
