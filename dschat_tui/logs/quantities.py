"""The title, meaning and normal range of each quantity of a log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.health import (
    ACCURACY,
    ANSWER_LENGTH,
    CLIP_FRACTION,
    CUT_OFF,
    EOS_SHARE,
    EXPLAINED_VARIANCE,
    FIRST_RATIO,
    GENERATION_SHARE,
    KL,
    NO_SPREAD,
    RATIO,
    REWARD_AT_CLIP,
    Limit,
)


class Quantity(NamedTuple):
    """A quantity of a log, under the name that metrics.jsonl has for it.

    `normal` is in words where `limit` has the numbers.
    """

    name: str
    title: str
    unit: str
    meaning: str
    normal: str
    limit: Limit | None = None

    @property
    def help(self) -> str:
        """Meaning, normal range and, where a verdict uses a limit, the limit with its reason."""
        text = f"{self.meaning} Normally {self.normal}."
        if self.limit is None:
            return text
        why = self.limit.why
        return f"{text} Healthy: {self.limit}. {why[0].upper()}{why[1:]}."


_OF_GROUPS = (
    Quantity("reward_std", "reward spread", "", "Standard deviation of rewards.", "above 0"),
    Quantity(
        "frac_reward_zero_std",
        "groups without spread",
        "",
        "Share of prompts whose answers are all rewarded alike.",
        "rising as the task is learnt",
        NO_SPREAD,
    ),
    Quantity("resampled_groups", "replaced groups", "", "Of other prompts.", "few"),
    Quantity("completions/mean_length", "answer length", "tokens", "Mean.", "steady"),
    Quantity("completions/min_length", "shortest answer", "tokens", "Of a step.", "above 1"),
    Quantity("completions/max_length", "longest answer", "tokens", "Of a step.", "below the limit"),
    Quantity(
        "completions/mean_terminated_length",
        "length of ended answers",
        "tokens",
        "Mean of those that were not cut off.",
        "steady",
    ),
    Quantity(
        "completions/clipped_ratio",
        "cut off",
        "",
        "Share of answers that the length limit cuts off.",
        "near 0",
        CUT_OFF,
    ),
    Quantity("clip_ratio/low_mean", "clipped below", "", "Share of ratios.", "below 0.2"),
    Quantity("clip_ratio/high_mean", "clipped above", "", "Share of ratios.", "below 0.2"),
    Quantity("clip_ratio/region_mean", "clipped", "", "Share of ratios, both sides.", "below 0.4"),
    Quantity(
        "policy_loss",
        "policy loss",
        "",
        "As actor_loss. Advantages of a group have mean 0, so it is 0 before the first update.",
        "near 0, also while rewards rise",
    ),
    Quantity("num_tokens", "tokens", "tokens", "Of all prompts and answers so far.", "rising"),
)
_TABLE = (
    Quantity("loss", "loss", "", "Mean loss over the trained tokens or pairs.", "falling"),
    Quantity("epoch_loss", "epoch mean", "", "Mean training loss of an epoch.", "falling"),
    Quantity("eval_loss", "held out", "", "Loss on held-out rows.", "near the training loss"),
    Quantity(
        "ppl", "perplexity", "", "exp(loss) on held-out rows.", "falling; 5 to 20 on dialogue"
    ),
    Quantity("learning_rate", "learning rate", "", "Of the first parameter group.", "as scheduled"),
    Quantity(
        "gradient_norm", "gradient norm", "", "Norm before clipping.", "0.1 to 10, without spikes"
    ),
    Quantity(
        "trained_token_share",
        "trained tokens",
        "",
        "Share of the tokens that the loss is on.",
        "0.2 to 0.8; near 0 little is learnt from",
    ),
    Quantity("tokens_per_s", "tokens/s", "/s", "Tokens per second over all devices.", "steady"),
    Quantity("samples_per_s", "samples/s", "/s", "Samples per second.", "steady"),
    Quantity("tflops", "TFLOPs", "", "Arithmetic per second.", "30 to 60 % of the device's peak"),
    Quantity("generate_tflops", "generation", "", "TFLOPs of generation.", "far below training's"),
    Quantity("train_tflops", "training", "", "TFLOPs of training.", "30 to 60 % of the peak"),
    Quantity("latency_s", "micro batch", "s", "Seconds per micro batch.", "steady"),
    Quantity(
        "accuracy",
        "accuracy",
        "",
        "Share of pairs whose chosen answer scores higher.",
        "rising",
        ACCURACY,
    ),
    Quantity("eval_accuracy", "held out", "", "Accuracy on held-out pairs.", "rising", ACCURACY),
    Quantity(
        "margin", "margin", "", "Chosen minus rejected score, mean over pairs.", "above 0, growing"
    ),
    Quantity("eval_margin", "held out", "", "Margin on held-out pairs.", "above 0, growing"),
    Quantity(
        "chosen",
        "chosen",
        "",
        "Mean score of chosen answers; in DPO how much likelier they are than before, times beta.",
        "above rejected; in DPO it may fall, if rejected falls more",
    ),
    Quantity("rejected", "rejected", "", "Mean score of rejected answers.", "below chosen"),
    Quantity("eval_chosen", "chosen", "", "Chosen scores, held out.", "above rejected"),
    Quantity("eval_rejected", "rejected", "", "Rejected scores, held out.", "below chosen"),
    Quantity("reward", "reward", "", "Mean reward of the answers.", "rising slowly"),
    Quantity("reward_ema", "EMA", "", "Moving average of the reward.", "rising slowly"),
    Quantity("score_mean", "score", "", "Reward model's score before shaping.", "rising slowly"),
    Quantity(
        "score_std", "score std", "", "Standard deviation of the scores.", "not shrinking to 0"
    ),
    Quantity(
        "reward_at_clip_share",
        "at the clip",
        "",
        "Share of answers whose reward is at its clip bound.",
        "near 0",
        REWARD_AT_CLIP,
    ),
    Quantity("actor_loss", "actor", "", "Policy loss.", "near 0; in the first inner epoch 0"),
    Quantity("critic_loss", "critic", "", "Error of the value head.", "falling, then steady"),
    Quantity("unsupervised_loss", "unsupervised", "", "Loss of the text mixture.", "steady"),
    Quantity(
        "kl", "KL", "nats", "Actor from reference, summed over an answer.", "rising slowly", KL
    ),
    Quantity("kl_coef", "KL weight", "", "Weight of the KL in the reward.", "0.01 to 0.2"),
    Quantity("entropy", "entropy", "nats", "Of a token's distribution.", "falling slowly"),
    Quantity("approx_kl", "update KL", "nats", "How far one step's updates move.", "below 0.05"),
    Quantity(
        "clip_fraction", "clipped", "", "Share of tokens that PPO clips.", "steady", CLIP_FRACTION
    ),
    Quantity("value_clip_fraction", "value clipped", "", "Clipped values.", "below 0.5"),
    Quantity("ratio_mean", "ratio", "", "New over old probability.", "near 1", RATIO),
    Quantity(
        "first_ratio_mean", "first ratio", "", "Ratio of the first minibatch.", "1", FIRST_RATIO
    ),
    Quantity("ratio_max", "ratio max", "", "The largest of them.", "below 10"),
    Quantity(
        "explained_variance",
        "explained variance",
        "",
        "How much of the returns the critic foresees.",
        "rising towards 1",
        EXPLAINED_VARIANCE,
    ),
    Quantity(
        "answer_length", "answer length", "tokens", "Mean of the answers.", "steady", ANSWER_LENGTH
    ),
    Quantity(
        "eos_share",
        "ended",
        "",
        "Share of answers that end by themselves.",
        "nearly all",
        EOS_SHARE,
    ),
    Quantity(
        "empty_answers",
        "empty answers",
        "",
        "Answers whose only token is the end token.",
        "0",
    ),
    Quantity("actor_gradient_norm", "actor gradient", "", "Norm.", "0.1 to 10"),
    Quantity("critic_gradient_norm", "critic gradient", "", "Norm.", "0.1 to 10"),
    Quantity("actor_learning_rate", "actor rate", "", "Learning rate.", "as scheduled"),
    Quantity("critic_learning_rate", "critic rate", "", "Learning rate.", "as scheduled"),
    *_OF_GROUPS,
    Quantity("e2e_s", "step", "s", "Seconds per step.", "steady"),
    Quantity(
        "generate_s",
        "generate",
        "s",
        "Of these, generating answers.",
        "about half of the step",
        GENERATION_SHARE,
    ),
    Quantity("train_s", "train", "s", "Of these, updating.", "15 to 50 %"),
    Quantity("other_s", "other", "s", "Of these, scoring and the rest.", "below 30 %"),
    Quantity("memory_gb", "memory", "GB", "Device memory.", "steady, below the device's"),
)

NOT_MEASURED = "not measured"

QUANTITIES = {quantity.name: quantity for quantity in _TABLE}


def title(name: str) -> str:
    """The title of a quantity; names without a description are shown as they are."""
    return QUANTITIES[name].title if name in QUANTITIES else name.replace("_", " ")


def as_markdown() -> str:
    """The whole of docs/metrics.md, one table for each kind of step."""
    # here, since the dashboard's first paint does not wait for what it does not need
    from engine.log.entries import PairStep, PPOStep, SFTStep, quantity_names

    lines = [
        "# Metrics",
        "",
        "Made by `python -m dschat_tui.logs.quantities` from the table there; not edited by hand.",
        "The names are those of metrics.jsonl and of the `Metrics =>` lines of training.log, the",
        "titles those of the dashboard.",
    ]
    named: dict[str, list[str]] = {
        "Step 1: SFT": quantity_names(SFTStep),
        "Step 2: reward model and DPO": quantity_names(PairStep),
        "Step 3": quantity_names(PPOStep),
        "Step 3 without a critic, or with reward functions": [q.name for q in _OF_GROUPS],
    }
    of_steps = {name for names in named.values() for name in names}
    others = [name for name in QUANTITIES if name not in of_steps]
    named["Evaluations, and lines of the log without metrics"] = others
    for heading, names in named.items():
        lines += ["", f"## {heading}", "", "| name | title | unit | what it is |"]
        lines += ["| --- | --- | --- | --- |", *_rows(names)]
    return "\n".join(lines) + "\n"


def _rows(names: Sequence[str]) -> list[str]:
    described = (QUANTITIES[name] for name in names if name in QUANTITIES)
    return [f"| `{q.name}` | {q.title} | {q.unit} | {q.help} |" for q in described]


if __name__ == "__main__":
    print(as_markdown(), end="")
