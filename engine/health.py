"""Where training is healthy: the one table of its limits, for trainer, dashboard and help alike.

Imports no torch, as the dashboard reads it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """The values at which a quantity is healthy, bounds included.

    Attributes:
        name: the quantity's name in metrics.jsonl, or what is derived from it.
        why: what a value outside means, or why the bound is where it is.
        unit: of the bounds.
        lowest: minus infinity if there is no lower bound.
        highest: infinity if there is no upper bound.
    """

    name: str
    why: str
    unit: str = ""
    lowest: float = -math.inf
    highest: float = math.inf

    def holds(self, value: float) -> bool:
        """Whether a value is healthy; NaN is not."""
        return self.lowest <= value <= self.highest

    def __str__(self) -> str:
        unit = f" {self.unit}" if self.unit else ""
        if self.lowest == -math.inf:
            return f"at most {self.highest:g}{unit}"
        if self.highest == math.inf:
            return f"at least {self.lowest:g}{unit}"
        return f"between {self.lowest:g} and {self.highest:g}{unit}"


KL = Limit(
    "kl",
    "below, sampling and scoring disagree, since a KL is at least 0 up to its noise; "
    "above, the actor is far from the SFT model, where the reward model was not trained",
    unit="nats",
    lowest=-0.5,
    highest=20,
)
REWARD_AT_CLIP = Limit(
    "reward_at_clip_share",
    "answers at the bound no longer differ; with a third of them there, the mean reward stays "
    "the same while answers get better or worse",
    highest=0.3,
)
ANSWER_LENGTH = Limit(
    "answer_length",
    "shorter answers (EOS counts as a token) are empty: the policy has collapsed",
    unit="tokens",
    lowest=3,
)
ANSWER_LENGTH_CHANGE = Limit(
    "answer_length_change",
    "answers that grow or shrink may please the reward model without being better",
    unit="of the first half",
    lowest=-0.5,
    highest=0.5,
)
EOS_SHARE = Limit(
    "eos_share",
    "below, most answers are cut at ppo.max_answer_length: the model has not learnt to write EOS",
    lowest=0.2,
)
CUT_OFF = Limit(
    "completions/clipped_ratio",
    "of answers that ppo.max_answer_length cuts off the end is never rewarded, and nothing is "
    "learnt: allow longer ones, or check that the end token is learnt",
    highest=0.5,
)
NO_SPREAD = Limit(
    "frac_reward_zero_std",
    "groups whose rewards are all equal teach nothing: prompts are too easy or too hard for the "
    "model, or the reward is too coarse; rlhf.resampling_tries replaces them",
    highest=0.8,
)
FIRST_RATIO = Limit(
    "first_ratio_mean",
    "before any update the ratio is 1 up to rounding, if sampling and training agree",
    lowest=0.99,
    highest=1.01,
)
RATIO = Limit(
    "ratio_mean",
    "outside, the updates of one step move far from the policy that wrote the answers",
    lowest=0.9,
    highest=1.1,
)
CLIP_FRACTION = Limit(
    "clip_fraction",
    "below, updates are too small for the clip to act at all; above, they are too large",
    lowest=0.001,
    highest=0.4,
)
EXPLAINED_VARIANCE = Limit(
    "explained_variance",
    "below 0 the critic predicts worse than a constant, as a new one does for some steps",
    lowest=-0.2,
)
FLAT_REWARD = Limit(
    "reward_change",
    "nothing is learnt, or the reward model does not distinguish answers",
    unit="standard deviations of the scores",
    lowest=0.02,
)
PLATEAU = Limit(
    "last_quarter_change",
    "2 * sqrt(2 / 10), twice the standard error of the difference of two means of 10 values",
    unit="standard deviations",
    lowest=0.9,
)
ACCURACY = Limit(
    "accuracy",
    "0.5 is chance; on human preferences reward models reach 0.6 to 0.75",
    lowest=0.55,
)
GENERATION_SHARE = Limit(
    "generation_share",
    "the hybrid engine (hybrid_engine.enabled) reduces it",
    unit="of the step",
    highest=0.85,
)
OVERFLOW_SHARE = Limit(
    "overflow_share",
    "steps of fp16 that overflow are skipped; a few are normal at the start",
    unit="of the steps",
    highest=0.1,
)
LOSS_SCALE_FLOOR = Limit(
    "loss_scale_floor",
    "at the smallest loss scale every step is skipped, and nothing is learnt",
    unit="times",
    highest=2,
)
SILENT_STEPS = Limit(
    "silent_steps", "a step writes a line when it ends", unit="median steps", highest=10
)
SILENT_SECONDS = Limit(
    "silent_s", "short steps may wait for an evaluation or a disk", unit="s", highest=60
)
