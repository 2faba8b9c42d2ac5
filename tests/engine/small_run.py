"""A run of all three steps on the embedded model that takes seconds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.config.loading import apply_overrides, resolve
from engine.config.schema import RunConfig

if TYPE_CHECKING:
    from engine.generation.sampling import Generation
    from engine.rlhf.trainer import PPOTrainer

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


def with_empty_answers(trainer: PPOTrainer, rows: list[int]) -> None:
    """Let the trainer's actor end some of its answers with their first token."""
    generate, eos = trainer.rollouts.hybrid.generate, trainer.tokenizer.eos_token_id

    def ending(*arguments: Any) -> Generation:
        generation = generate(*arguments)
        answers, lengths = generation.answers.clone(), generation.lengths.clone()
        answers[rows, 0], answers[rows, 1:] = eos, trainer.tokenizer.pad_token_id
        lengths[rows] = 1
        return replace(generation, answers=answers, lengths=lengths)

    trainer.rollouts.hybrid.generate = ending  # type: ignore[method-assign]
