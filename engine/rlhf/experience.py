"""The answers of one generation step, with all that step 3 learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from engine.algorithms.kl import k1


@dataclass(frozen=True)
class Experience:
    """Answers of this rank to its prompts.

    Attributes:
        ids: prompt left padded, answer right padded, `(batch, prompt + answer)`.
        attention_mask: 1 on real tokens, `(batch, prompt + answer)`.
        mask: bool, true on the answer's tokens up to and with its first EOS, `(batch, answer)`;
            every answer has a token.
        log_probs: of the actor that answered, `(batch, answer)`.
        ref_log_probs: of the reference, `(batch, answer)`.
        entropies: of the actor that answered, in nats, `(batch, answer)`.
        ended: bool, the answer has an EOS, `(batch,)`.
        scores: of the reward model, as it gave them, `(batch,)`; None without one.
        function_rewards: of each reward function, `(batch, functions)`, NaN where one cannot say;
            None without functions.
        learnt: bool, the answer is learnt from, `(batch,)`; None: all are.
        values: of the critic before the update, `(batch, answer)`; None without a critic.
        advantages: what the update moves towards, `(batch, answer)`; None until known.
        returns: what the critic learns, `(batch, answer)`; None until known, or without a critic.
    """

    ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    log_probs: Tensor
    ref_log_probs: Tensor
    entropies: Tensor
    ended: Tensor
    scores: Tensor | None = None
    function_rewards: Tensor | None = None
    learnt: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def answers(self) -> Tensor:
        """The answers' tokens, `(batch, answer)`."""
        return self.ids[:, -self.mask.shape[1] :]

    @property
    def loss_mask(self) -> Tensor:
        """`mask` without the answers that are not learnt from."""
        return self.mask if self.learnt is None else self.mask & self.learnt.unsqueeze(1)

    @property
    def kl(self) -> Tensor:
        """KL from the reference, estimator k1 summed over each answer, `(batch,)`."""
        return (k1(self.log_probs, self.ref_log_probs) * self.mask).sum(dim=1)

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """Tokens of each row's prompt and answer, read from the device once for all rows."""
        answers = self.mask.sum(dim=1)
        prompts = self.attention_mask.sum(dim=1) - answers
        return list(zip(prompts.tolist(), answers.tolist(), strict=True))

    @cached_property
    def learnt_lengths(self) -> list[int]:
        """Tokens of each row that the policy learns from, read once like `lengths`."""
        if self.learnt is None:
            return [answer for _, answer in self.lengths]
        learnt = self.learnt.tolist()
        return [answer * kept for (_, answer), kept in zip(self.lengths, learnt, strict=True)]

    def rows(self, index: Sequence[int]) -> Experience:
        """Some rows, without columns that are padding in all of them."""
        at = torch.as_tensor(index, device=self.ids.device)
        chosen = {
            field.name: value[at]
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }
        prompts, answers = zip(*(self.lengths[row] for row in index), strict=True)
        kept_answer = max(answers)
        prompt = self.ids.shape[1] - self.mask.shape[1]
        start, stop = prompt - max(prompts), prompt + kept_answer
        for name, value in chosen.items():
            if name in ("ids", "attention_mask"):
                chosen[name] = value[:, start:stop]
            elif name != "function_rewards" and value.dim() == 2:
                chosen[name] = value[:, :kept_answer]
        return Experience(**chosen)

    @staticmethod
    def concatenate(parts: Sequence[Experience], pad_id: int) -> Experience:
        """All rows of several batches, padded to the widest prompt and answer."""
        if len(parts) == 1:
            return parts[0]
        answer = max(part.mask.shape[1] for part in parts)
        prompt = max(part.ids.shape[1] - part.mask.shape[1] for part in parts)
        padded = [_pad(part, prompt, answer, pad_id) for part in parts]
        joined = {
            field.name: torch.cat([getattr(part, field.name) for part in padded])
            for field in fields(Experience)
            if getattr(padded[0], field.name) is not None
        }
        return Experience(**joined)


def _pad(part: Experience, prompt: int, answer: int, pad_id: int) -> Experience:
    left = prompt - (part.ids.shape[1] - part.mask.shape[1])
    right = answer - part.mask.shape[1]
    changes: dict[str, Tensor] = {}
    for field in fields(part):
        value = getattr(part, field.name)
        if value is None or value.dim() == 1 or field.name == "function_rewards":
            continue
        sides = (left, right) if field.name in ("ids", "attention_mask") else (0, right)
        filler = pad_id if field.name == "ids" else 0
        changes[field.name] = torch.nn.functional.pad(value, sides, value=filler)
    return replace(part, **changes)
