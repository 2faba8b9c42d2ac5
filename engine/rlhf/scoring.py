"""What reward functions say of answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.data.phases import PromptColumns
from engine.rlhf.experience import Experience
from engine.rlhf.report import decoded


class Functions(Protocol):
    """Reward functions by name; `engine.rewards` has them."""

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[list[int]],
        columns: Mapping[str, Sequence[Any]],
    ) -> dict[str, list[float | None]]:
        """A reward of each function for each answer; None where it cannot say."""


class FunctionRewards:
    """Gives functions the answers of an experience in the form that TRL's users know.

    Attributes:
        names: of the functions, in the order of the columns of their rewards.

    Args:
        functions: what to ask.
        names: of all functions.
        columns: of the data.
        tokenizer: that decodes answers.
    """

    def __init__(
        self,
        functions: Functions,
        names: Sequence[str],
        columns: PromptColumns,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.names = tuple(names)
        self._functions = functions
        self._columns = columns
        self._tokenizer = tokenizer

    def __call__(self, experience: Experience, numbers: Sequence[int]) -> Tensor:
        """The rewards, fp32 `(batch, functions)`; NaN where a function cannot say.

        Args:
            experience: the answers.
            numbers: `row` in the data of each answer's prompt.
        """
        _, answers = decoded(experience, self._tokenizer)
        rows = [self._columns.of(number) for number in numbers]
        prompts = [row.pop("prompt") for row in rows]
        is_dialogue = [isinstance(prompt, list) for prompt in prompts]
        completions = [
            [{"role": "assistant", "content": answer}] if dialogue else answer
            for answer, dialogue in zip(answers, is_dialogue, strict=True)
        ]
        lengths = [length for _, length in experience.lengths]
        ids = [
            row[:length] for row, length in zip(experience.answers.tolist(), lengths, strict=True)
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        found = self._functions.score(prompts, completions, ids, columns)
        values = [[math.nan if x is None else x for x in found[name]] for name in self.names]
        return torch.tensor(values, dtype=torch.float32, device=experience.ids.device).T
