"""A run of all three steps on the embedded model that takes seconds."""

from __future__ import annotations

from engine.config import RunConfig, apply_overrides, resolve

SMALL = {
    "models": {"actor": "embedded:tiny-llama"},
    "dtype": "fp32",
    "data": {"eval_rows": 16},
    "actor": {"learning_rate": 1e-3},
    "critic": {"learning_rate": 1e-3},
    "sft": {"max_steps": 2, "batch_size": 8, "learning_rate": 1e-3, "max_length": 96},
    "reward": {"max_steps": 2, "batch_size": 8, "learning_rate": 1e-3, "max_length": 96},
    "dpo": {"max_steps": 2, "batch_size": 8, "learning_rate": 1e-3, "max_length": 96},
    "ppo": {
        "max_steps": 2,
        "rollout_batch_size": 8,
        "batch_size": 4,
        "inner_epochs": 2,
        "max_prompt_length": 40,
        "max_answer_length": 12,
        "warmup_steps": 0,
        "scheduler": "constant",
    },
}


def configuration(*assignments: str) -> RunConfig:
    """The small run's configuration with `key=value` changes."""
    return resolve(apply_overrides(SMALL, list(assignments)), "test")
