"""The table of steps: what every part of the program needs to know about them. Imports nothing.

A new step is a row here, its section in `engine.config.schema`, its trainer and its entry in
`engine.steps`, and what its own figures and charts need on the person's side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StepName = Literal["sft", "reward", "ppo", "dpo"]
RoleName = Literal["actor", "critic"]
Phase = Literal["sft", "reward", "ppo"]
"""Kinds of rows: prompts with answers, pairs of answers, prompts alone."""


@dataclass(frozen=True)
class Step:
    """One step of training.

    Attributes:
        name: in the configuration, in run.json and in logs.
        number: its place in a run, from 1; that of --steps.
        title: in tables and messages.
        short_title: where space is short.
        folder: its folder inside the run's.
        phase: the kind of rows that it learns from.
        needs: the steps whose models it begins with.
        models: the model folders that it leaves in its folder, beside `actor_ema`.
        chat_models: those that can be talked with, the preferred one first.
        roles: whose options decide the layout of the models that it trains.
        learning_rates: the options of its learning rates.
        live_metrics: what a line of progress shows.
        headline: the label of its main figure, and the name of that figure in the final metrics.
        replaced_by: the option that names a finished model in its place.
        averages_actor: `ema.enabled` makes it leave `actor_ema`, too.
    """

    name: StepName
    number: int
    title: str
    short_title: str
    folder: str
    phase: Phase
    needs: tuple[StepName, ...]
    models: tuple[str, ...]
    chat_models: tuple[str, ...]
    roles: tuple[RoleName, ...]
    learning_rates: tuple[str, ...]
    live_metrics: tuple[str, ...]
    headline: tuple[str, str]
    replaced_by: str | None = None
    averages_actor: bool = False

    def model_name(self, folder: str) -> str:
        """What the model in one of its folders is called: sft, reward, actor, actor_ema ..."""
        return self.name if folder == "model" else folder

    def model_folders(self, ema: bool, critic: bool = True) -> tuple[str, ...]:
        """The model folders that it must leave, complete, to be done.

        Args:
            ema: the actor's average is kept.
            critic: step 3 trains one.
        """
        models = tuple(name for name in self.models if critic or name != "critic")
        return (*models, "actor_ema") if ema and self.averages_actor else models


STEPS = (
    Step(
        name="sft",
        number=1,
        title="SFT",
        short_title="SFT",
        folder="step1-sft",
        phase="sft",
        needs=(),
        models=("model",),
        chat_models=("model",),
        roles=("actor",),
        learning_rates=("sft.learning_rate",),
        live_metrics=("loss",),
        headline=("perplexity", "ppl_after"),
        replaced_by="models.sft",
    ),
    Step(
        name="reward",
        number=2,
        title="reward model",
        short_title="reward model",
        folder="step2-reward",
        phase="reward",
        # unless models.reward names another base
        needs=("sft",),
        models=("model",),
        chat_models=(),
        roles=("critic",),
        learning_rates=("reward.learning_rate",),
        live_metrics=("loss", "accuracy", "margin"),
        headline=("accuracy", "accuracy"),
        replaced_by="models.trained_reward",
    ),
    Step(
        name="ppo",
        number=3,
        title="RLHF (PPO)",
        short_title="RLHF",
        folder="step3-rlhf",
        phase="ppo",
        needs=("sft", "reward"),
        models=("actor", "critic"),
        chat_models=("actor_ema", "actor"),
        roles=("actor", "critic"),
        learning_rates=("actor.learning_rate", "critic.learning_rate"),
        live_metrics=("reward", "kl", "actor_loss", "critic_loss"),
        headline=("reward", "reward_last"),
        averages_actor=True,
    ),
    Step(
        name="dpo",
        number=2,
        title="DPO",
        short_title="DPO",
        folder="step2-dpo",
        phase="reward",
        needs=("sft",),
        models=("model",),
        chat_models=("model",),
        roles=("actor",),
        learning_rates=("dpo.learning_rate",),
        live_metrics=("loss", "accuracy", "margin"),
        headline=("accuracy", "accuracy"),
    ),
)

BY_NAME: dict[str, Step] = {step.name: step for step in STEPS}
BY_FOLDER = {step.folder: step for step in STEPS}

# The steps of a run, by its `alignment`.
PIPELINES: dict[str, tuple[StepName, ...]] = {
    "ppo": ("sft", "reward", "ppo"),
    "dpo": ("sft", "dpo"),
}


def pipeline(alignment: str, reward_model: bool = True) -> tuple[Step, ...]:
    """The steps that an `alignment` leads through; without step 2 where it trains none."""
    names = PIPELINES[alignment]
    return tuple(BY_NAME[name] for name in names if reward_model or name != "reward")
