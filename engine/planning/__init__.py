"""Arithmetic of parameters, operations and memory, from a model's config alone. No torch."""

from engine.planning.flops import (
    forward_flops,
    generation_flops,
    kv_cache_bytes,
    training_flops,
    weight_bytes_read_per_token,
)
from engine.planning.shapes import Head, LinearLayer, ModelShape

__all__ = [
    "Head",
    "LinearLayer",
    "ModelShape",
    "forward_flops",
    "generation_flops",
    "kv_cache_bytes",
    "training_flops",
    "weight_bytes_read_per_token",
]
