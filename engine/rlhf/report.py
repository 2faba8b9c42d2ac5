"""What step 3 reports of a generation step, as functions of what happened: nothing is kept here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.algorithms.advantages import group_means
from engine.algorithms.averages import mean
from engine.algorithms.masks import masked_std
from engine.algorithms.policy import explained_variance
from engine.distributed import max_over_ranks, sum_over_ranks, world_size
from engine.log.entries import PPOSpeed
from engine.planning.flops import forward_flops, weight_bytes_read_per_token
from engine.rlhf.experience import Experience
from engine.rlhf.models import RLHFEngine
from engine.rlhf.rewards import moments
from engine.rlhf.rollouts import GenerationCost


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a generation step: all of it, its answers, its updates."""

    e2e_s: float
    generate_s: float
    train_s: float


class AnswerMetrics(TypedDict):
    """What a step's answers were like, by the names of metrics.jsonl."""

    reward: float
    score_mean: float
    score_std: float
    reward_at_clip_share: float
    kl: float
    entropy: float
    explained_variance: float | None
    answer_length: float
    eos_share: float
    empty_answers: int


def answer_metrics(experience: Experience, rewards: Tensor, at_bound: Tensor) -> AnswerMetrics:
    """What a step's answers were like, over all ranks; a collective of all ranks.

    Args:
        experience: with its returns, where there is a critic.
        rewards: of the answers, `(batch,)`; NaN where one has none.
        at_bound: whose score is at its bound, bool `(batch,)`.
    """
    lengths, ended = experience.mask.sum(dim=1), experience.ended
    count = len(experience) * world_size()
    tokens, ended_count, empty, kl, entropies, clipped = sum_over_ranks(
        lengths.sum(),
        ended.sum(),
        ((lengths == 1) & ended).sum(),
        experience.kl.sum(),
        (experience.entropies * experience.mask).sum(),
        at_bound.sum(),
    )
    reward, _ = moments(rewards)
    score_mean, score_variance = moments(
        rewards if experience.scores is None else experience.scores
    )
    explained = None
    if experience.values is not None and experience.returns is not None:
        explained = float(
            explained_variance(experience.values, experience.returns, experience.mask)
        )
    return {
        "reward": float(reward),
        "score_mean": float(score_mean),
        "score_std": math.sqrt(score_variance),
        "reward_at_clip_share": clipped / count,
        "kl": kl / count,
        "entropy": entropies / tokens,
        "explained_variance": explained,
        "answer_length": tokens / count,
        "eos_share": ended_count / count,
        "empty_answers": int(empty),
    }


def group_metrics(experience: Experience, rewards: Tensor, size: int) -> dict[str, float | None]:
    """What a step's answers and rewards were like, by TRL's names; a collective of all ranks.

    Args:
        experience: of this rank.
        rewards: of the answers, `(batch,)`; NaN where one has none.
        size: answers of a group.
    """
    lengths, ended = experience.mask.sum(dim=1).float(), experience.ended
    groups, flat, count, tokens, ended_count, ended_tokens = sum_over_ranks(
        len(rewards) // size,
        (group_means(rewards.double(), size)[1] == 0).sum(),
        len(rewards),
        lengths.sum(),
        ended.sum(),
        (lengths * ended).sum(),
    )
    found: dict[str, float | None] = {"reward_std": _finite(masked_std(rewards, ~rewards.isnan()))}
    if size > 1:
        found["frac_reward_zero_std"] = flat / groups
    found["completions/mean_length"] = tokens / count
    found["completions/min_length"] = -max_over_ranks(-lengths.min())
    found["completions/max_length"] = max_over_ranks(lengths.max())
    found["completions/clipped_ratio"] = 1.0 - ended_count / count
    found["completions/mean_terminated_length"] = mean(ended_tokens, ended_count)
    return found


def function_metrics(experience: Experience, names: Sequence[str]) -> dict[str, float | None]:
    """Mean and standard deviation of each function's rewards; a collective of all ranks.

    Each by itself, as a small one is lost in a sum. None where a function could say nothing.

    Args:
        experience: with the rewards of functions.
        names: of the functions.
    """
    assert experience.function_rewards is not None
    found: dict[str, float | None] = {}
    for name, values in zip(names, experience.function_rewards.T, strict=True):
        (known,) = sum_over_ranks((~values.isnan()).sum())
        average, _ = moments(values)
        found[f"rewards/{name}/mean"] = float(average) if known else None
        found[f"rewards/{name}/std"] = _finite(masked_std(values, ~values.isnan()))
    return found


def _finite(value: Tensor) -> float | None:
    return None if value.isnan() else float(value)


def step_speed(
    engine: RLHFEngine,
    experience: Experience,
    update_flops: float,
    cost: GenerationCost,
    times: StepTimes,
    dtype: torch.dtype,
) -> PPOSpeed:
    """What a generation step took, on this rank."""
    rows, length = experience.ids.shape
    width = experience.mask.shape[1]
    # Actor and reference, critic and reward model read each answer once.
    scoring = 2 * forward_flops(engine.actor_shape, rows, length, logits_tokens=width)
    for model, shape in (
        (engine.critic, engine.critic_shape),
        (engine.reward, engine.reward_shape),
    ):
        if model is not None:
            scoring += forward_flops(shape, rows, length, head="score")
    element = torch.finfo(dtype).bits // 8
    moved = weight_bytes_read_per_token(engine.actor_shape, element) * cost.passes
    critic_parameters = engine.critic_parameters
    return PPOSpeed(
        batch_size=len(experience) * world_size(),
        sequence_length=length,
        answer_length_limit=width,
        tflops=(cost.flops + update_flops + scoring) / times.e2e_s / 1e12,
        generate_tflops=cost.flops / times.generate_s / 1e12,
        train_tflops=update_flops / times.train_s / 1e12,
        bandwidth_gb_s=moved / times.generate_s / 1e9,
        actor_parameters_b=engine.actor_parameters / 1e9,
        critic_parameters_b=None if critic_parameters is None else critic_parameters / 1e9,
    )


def decoded(
    experience: Experience, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[str], list[str]]:
    """The texts of the prompts and of the answers, without special tokens."""
    start = experience.ids.shape[1] - experience.mask.shape[1]
    prompts: list[str] = []
    answers: list[str] = []
    for ids, (prompt, answer) in zip(experience.ids.tolist(), experience.lengths, strict=True):
        prompts.append(tokenizer.decode(ids[start - prompt : start], skip_special_tokens=True))
        answers.append(tokenizer.decode(ids[start : start + answer], skip_special_tokens=True))
    return prompts, answers


def rollout_records(
    step: int,
    experience: Experience,
    rewards: Tensor,
    prompts: list[str],
    answers: list[str],
    group_size: int,
    functions: Sequence[str] = (),
) -> Iterator[Mapping[str, Any]]:
    """A record of rollouts.jsonl for each answer; those to a prompt follow each other."""
    scores = rewards if experience.scores is None else experience.scores
    columns = {
        "reward": _known(rewards),
        "score": _known(scores),
        "kl": experience.kl.tolist(),
        "length": [answer for _, answer in experience.lengths],
        "ended": experience.ended.tolist(),
    }
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        figures = {name: values[row] for name, values in columns.items()}
        if experience.function_rewards is not None:
            rewarded = _known(experience.function_rewards[row])
            figures["rewards"] = dict(zip(functions, rewarded, strict=True))
        if group_size > 1:
            figures["group"] = row // group_size
        yield {"step": step, "prompt": prompt, "answer": answer, **figures}


def _known(values: Tensor) -> list[float | None]:
    """The numbers; None, which JSON has, for NaN, which it does not have."""
    return [None if math.isnan(value) else value for value in values.tolist()]
