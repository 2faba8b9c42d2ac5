"""Arithmetic of parameters, operations and memory, from a model's config alone. No torch."""

from engine.planning.changes import Change, smallest_change
from engine.planning.flops import (
    forward_flops,
    generation_flops,
    kv_cache_bytes,
    training_flops,
    weight_bytes_read_per_token,
)
from engine.planning.known import known_config
from engine.planning.memory import Device, Item, Plan, StepPlan, plan_memory
from engine.planning.shapes import Head, ModelShape, UnknownFamilyError

__all__ = [
    "Change",
    "Device",
    "Head",
    "Item",
    "ModelShape",
    "Plan",
    "StepPlan",
    "UnknownFamilyError",
    "forward_flops",
    "generation_flops",
    "known_config",
    "kv_cache_bytes",
    "plan_memory",
    "smallest_change",
    "training_flops",
    "weight_bytes_read_per_token",
]
