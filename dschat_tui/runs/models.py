"""Which models a run begins with, by its configuration."""

from __future__ import annotations

from typing import NamedTuple

from engine.config.schema import ModelsConfig


class Origin(NamedTuple):
    """A model that a run begins with: the option that names it, and the name."""

    key: str
    name: str


def actor_of(models: ModelsConfig) -> Origin:
    """The finished SFT model, else the base model."""
    return Origin("models.sft", models.sft) if models.sft else Origin("models.actor", models.actor)


def reward_of(models: ModelsConfig) -> Origin | None:
    """The finished reward model, else its base; None where that is what step 1 makes."""
    if models.trained_reward:
        return Origin("models.trained_reward", models.trained_reward)
    return None if models.reward == "sft" else Origin("models.reward", models.reward)
