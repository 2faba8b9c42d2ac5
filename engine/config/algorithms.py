"""The algorithms of step 3 as presets over a few independent choices. Imports no torch.

A preset is what an option of `rlhf` or `ppo` means where it is left empty. A new baseline is its
name here and a file of that name in `engine/rlhf/advantages/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal[
    "ppo", "grpo", "dr_grpo", "dapo", "bnpo", "gspo", "cispo", "rloo", "reinforce++",
    "reinforce++-baseline",
]  # fmt: skip
Baseline = Literal["critic", "group", "leave_one_out", "none"]
Scale = Literal["none", "group", "batch"]
Ratio = Literal["token", "sequence_mean", "sequence_sum"]
Surrogate = Literal["clipped", "cispo"]
Aggregation = Literal["token", "answer", "constant"]
KlPlace = Literal["reward", "loss"]
KlEstimator = Literal["k1", "k2", "k3"]

# Those that compare an answer with the others to its prompt.
GROUP_BASELINES = ("group", "leave_one_out")


@dataclass(frozen=True)
class Algorithm:
    """What decides how step 3 learns; docs/algorithms.md says what each choice means.

    The values here are GRPO's (arXiv 2402.03300), as TRL has them.

    Attributes:
        answers_per_prompt: answers that are sampled for each prompt, G.
        baseline: what an answer's reward is compared with.
        scale: what advantages are divided by.
        whiten: advantages have mean 0 and standard deviation 1 over the tokens of a rollout batch.
        ratio: of the new policy to the one that answered.
        surrogate: how the ratio enters the loss.
        clip_low: the ratio is held above 1 - clip_low.
        clip_high: the ratio is held below 1 + clip_high.
        aggregation: what the loss is a mean over.
        kl_coef: weight of the KL to the reference.
        kl_in: the reward or the loss.
        kl_estimator: of that KL.
        resampling_tries: how often groups without spread are replaced.
        overlong_buffer: share of an answer's longest length over which the reward falls by 1.
    """

    answers_per_prompt: int = 8
    baseline: Baseline = "group"
    scale: Scale = "group"
    whiten: bool = False
    ratio: Ratio = "token"
    surrogate: Surrogate = "clipped"
    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: Aggregation = "answer"
    kl_coef: float = 0.0
    kl_in: KlPlace = "loss"
    kl_estimator: KlEstimator = "k3"
    resampling_tries: int = 0
    overlong_buffer: float = 0.0

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.baseline == "critic"

    @property
    def has_groups(self) -> bool:
        """Whether answers to one prompt are compared with each other."""
        return self.baseline in GROUP_BASELINES


PRESETS: dict[AlgorithmName, Algorithm] = {
    "ppo": Algorithm(
        answers_per_prompt=1,
        baseline="critic",
        scale="none",
        whiten=True,
        aggregation="token",
        kl_coef=0.1,
        kl_in="reward",
        kl_estimator="k1",
    ),
    "grpo": Algorithm(),
    # arXiv 2503.20783
    "dr_grpo": Algorithm(scale="none", aggregation="constant"),
    # arXiv 2503.14476; the number of tries is that of verl's recipe
    "dapo": Algorithm(
        clip_high=0.28, aggregation="token", resampling_tries=10, overlong_buffer=0.2
    ),
    "bnpo": Algorithm(aggregation="token"),
    # arXiv 2507.18071
    "gspo": Algorithm(ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4),
    # arXiv 2506.13585; the bound of 5 is that of ScaleRL (arXiv 2510.13786)
    "cispo": Algorithm(surrogate="cispo", clip_high=4.0, aggregation="token"),
    # arXiv 2402.14740
    "rloo": Algorithm(
        answers_per_prompt=2,
        baseline="leave_one_out",
        scale="none",
        ratio="sequence_sum",
        kl_coef=0.05,
        kl_in="reward",
        kl_estimator="k1",
    ),
    # arXiv 2501.03262
    "reinforce++": Algorithm(
        answers_per_prompt=1,
        baseline="none",
        scale="none",
        whiten=True,
        aggregation="token",
        kl_coef=0.01,
        kl_in="reward",
        kl_estimator="k1",
    ),
    "reinforce++-baseline": Algorithm(scale="none", whiten=True, aggregation="token", kl_coef=0.01),
}
