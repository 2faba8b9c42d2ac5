"""The panels of each step: quantities of one scale share a panel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dschat_tui.dashboard.widgets.chart import Named
from dschat_tui.logs.quantities import title
from dschat_tui.logs.series import Series


class PanelSpec(NamedTuple):
    """A panel: its title and quantities, and those shown instead where a log has none of them."""

    title: str
    names: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    is_split: bool = False

    def heading(self, series: Mapping[str, Series]) -> str:
        """The title, or the names of what is shown instead."""
        if self.is_split or any(name in series for name in self.names):
            return self.title
        return ", ".join(title(name) for name in self.instead if name in series) or self.title

    def named(self, series: Mapping[str, Series]) -> Named:
        """The quantities that a log has, with the names of the legend."""
        for names in (self.names, self.instead):
            found = [(title(name), series[name]) for name in names if name in series]
            if found:
                return found
        return ()


_SPEED = (
    PanelSpec("Tokens/s", ("tokens_per_s",), ("samples_per_s",)),
    PanelSpec("TFLOPs", ("tflops",)),
)
PANELS: dict[str, tuple[PanelSpec, ...]] = {
    "sft": (
        PanelSpec("Loss", ("loss", "eval_loss"), ("epoch_loss",)),
        PanelSpec("Perplexity", ("ppl",)),
        *_SPEED,
        PanelSpec("Learning rate", ("learning_rate",)),
        PanelSpec("Gradient norm", ("gradient_norm",), ("latency_s",)),
    ),
    "reward": (
        PanelSpec("Scores", ("chosen", "rejected"), ("eval_chosen", "eval_rejected")),
        PanelSpec("Accuracy", ("accuracy", "eval_accuracy")),
        PanelSpec("Margin", ("margin", "eval_margin")),
        PanelSpec("Loss", ("loss", "epoch_loss"), ("eval_loss",)),
        *_SPEED,
    ),
    "ppo": (
        PanelSpec("Reward", ("reward", "reward_ema")),
        PanelSpec("Losses", ("actor_loss", "critic_loss")),
        PanelSpec(
            "KL, entropy", ("kl", "entropy"), ("actor_learning_rate", "critic_learning_rate")
        ),
        PanelSpec("Time of a step", is_split=True),
        PanelSpec("TFLOPs", ("tflops", "generate_tflops", "train_tflops")),
        PanelSpec("Samples/s", ("samples_per_s",), ("tokens_per_s",)),
    ),
    "dpo": (
        PanelSpec("Implicit rewards", ("chosen", "rejected"), ("eval_chosen", "eval_rejected")),
        # DeepSpeed-Chat logs no accuracy
        PanelSpec("Accuracy", ("accuracy", "eval_accuracy"), ("learning_rate",)),
        PanelSpec("Margin", ("margin", "eval_margin")),
        PanelSpec("Loss", ("loss", "eval_loss"), ("epoch_loss",)),
        *_SPEED,
    ),
}
