"""Perplexity and ratings by plain transformers, row by row and without padding: for comparison."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

# From a text, and where its answer begins, to how good the answer is.
Rating = Callable[[list[int], int], float]


def log_probs(model: torch.nn.Module, ids: list[int], start: int) -> torch.Tensor:
    """Of the tokens from `start` on, each after all before it."""
    text = torch.tensor([ids])
    with torch.no_grad():
        logits = model(input_ids=text).logits[0].double()
    return logits.log_softmax(dim=-1)[range(start - 1, len(ids) - 1), ids[start:]]


def perplexity(folder: Path | str, rows: list[dict[str, Any]]) -> float:
    """Of the labelled tokens under the causal language model in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    losses = []
    for row in rows:
        every = log_probs(model, row["input_ids"], 1)
        losses += [-every[i - 1] for i, label in enumerate(row["labels"]) if i and label >= 0]
    return math.exp(sum(losses) / len(losses))


def rating_by_score(folder: Path | str) -> Rating:
    """The score of the reward model in `folder`."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def rate(ids: list[int], start: int) -> float:
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).logits)

    return rate


def rating_by_likelihood(folder: Path | str, reference: Path | str, beta: float) -> Rating:
    """How much likelier an answer is than under the reference, times beta."""
    model, before = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (folder, reference))

    def rate(ids: list[int], start: int) -> float:
        own, others = (log_probs(each, ids, start).sum() for each in (model, before))
        return beta * float(own - others)

    return rate


def ratings_of(rate: Rating, pairs: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Of the chosen and of the rejected answer of each pair."""
    return [
        (
            rate(row["chosen_ids"], row["prompt_length"]),
            rate(row["rejected_ids"], row["prompt_length"]),
        )
        for row in pairs
    ]
