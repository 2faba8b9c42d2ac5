"""Batches: rows of one global batch, distributed over ranks, padded to the longest row in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute
import torch
from datasets import Dataset
from torch import Tensor

from engine.data.encoding import IGNORED
from engine.data.files import Row
from engine.data.order import shuffled


def row_lengths(dataset: Dataset, *columns: str) -> np.ndarray:
    """Tokens of each row, int64 `(rows,)`: of the longest of the named columns."""
    # By Arrow: reading the rows would decode every token of the data set.
    table = dataset.with_format("arrow")[:]
    lengths = np.zeros(len(dataset), dtype=np.int64)
    for column in columns:
        counts = pyarrow.compute.list_value_length(table.column(column))
        lengths = np.maximum(lengths, counts.to_numpy())
    return lengths


class GlobalBatches:
    """The batches of each epoch as row indices over all ranks.

    Rows are shuffled anew by seed and epoch. Rows beyond the last full batch wait for another
    epoch; a data set smaller than one batch is one batch. Nothing depends on the number of ranks,
    so a position in the data is (epoch, index).

    Grouping by length happens inside a global batch, between its micro batches. Whole batches of
    short rows or of long ones would weigh tokens unevenly: the loss is a mean over a batch's
    tokens, so each token of a batch of short answers would count for more.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, batch_size: int, seed: int) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if not len(self.lengths):
            raise ValueError("There are no rows to make batches of; check the counts of the data.")
        self.batch_size = min(batch_size, len(self.lengths))
        self.seed = seed
        self._kept: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches of one epoch."""
        return len(self.lengths) // self.batch_size

    def epoch(self, epoch: int) -> np.ndarray:
        """The batches of an epoch (from 0): row indices, int64 `(batches, batch_size)`.

        The epoch asked for last is kept, so a step costs no sort of the whole data set.
        """
        if self._kept is None or self._kept[0] != epoch:
            order = shuffled(len(self.lengths), self.seed, epoch)[: len(self) * self.batch_size]
            order.setflags(write=False)
            self._kept = epoch, order.reshape(len(self), self.batch_size)
        return self._kept[1]

    def local_micro_batches(
        self,
        global_batch: Sequence[int],
        rank: int,
        ranks: int,
        micro_batch_size: int | None = None,
    ) -> list[list[int]]:
        """One rank's part of a global batch in micro batches; all ranks get equally many rows.

        Rows are distributed by length, so that ranks have about the same number of tokens and a
        micro batch has rows of about the same length. Rows that do not divide by the ranks (only
        in a data set smaller than one batch) are left out.

        Raises:
            ValueError: fewer rows than ranks.
        """
        if len(global_batch) < ranks:
            raise ValueError(
                f"A batch of {len(global_batch)} rows cannot be distributed over {ranks} ranks; "
                "use more data, a larger batch size or fewer ranks."
            )
        rows = np.asarray(global_batch)
        rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
        rows = rows[: len(rows) // ranks * ranks].reshape(-1, ranks)
        # Alternating directions: otherwise rank 0 would get the longest row every time.
        rows[1::2] = rows[1::2, ::-1].copy()
        mine = rows[:, rank].tolist()
        size = micro_batch_size or len(mine)
        return [mine[i : i + size] for i in range(0, len(mine), size)]


def _padded(rows: list[list[int]], value: int, left: bool = False) -> Tensor:
    width = max(len(row) for row in rows)
    batch = torch.full((len(rows), width), value, dtype=torch.long)
    for target, row in zip(batch, rows, strict=True):
        target[width - len(row) if left else 0 :][: len(row)] = torch.tensor(row, dtype=torch.long)
    return batch


def _mask(rows: list[list[int]], left: bool = False) -> Tensor:
    """1 at real tokens, found by length: the pad id may be a real token too, where pad is EOS."""
    return _padded([[1] * len(row) for row in rows], 0, left)


@dataclass(frozen=True)
class SftCollator:
    """Rows with `input_ids` (and `labels`, else all tokens are learnt) to right-padded tensors."""

    pad_token_id: int

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, `labels` (-100 on padding), each `(batch, seq)`."""
        ids = [row["input_ids"] for row in rows]
        labels = [row["labels"] if "labels" in row else row["input_ids"] for row in rows]
        return {
            "input_ids": _padded(ids, self.pad_token_id),
            "attention_mask": _mask(ids),
            "labels": _padded(labels, IGNORED),
        }


@dataclass(frozen=True)
class PairCollator:
    """Rows with `chosen_ids` and `rejected_ids` to right-padded tensors."""

    pad_token_id: int

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, each `(2 * pairs, seq)`: all chosen, then all rejected."""
        ids = [row["chosen_ids"] for row in rows] + [row["rejected_ids"] for row in rows]
        return {"input_ids": _padded(ids, self.pad_token_id), "attention_mask": _mask(ids)}


@dataclass(frozen=True)
class LabelledPairCollator(PairCollator):
    """Rows of pairs with their `prompt_length` to tensors that mark which tokens are answers."""

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """As `PairCollator`, and `labels` `(2 * pairs, seq)`: -100 on prompts and padding."""
        batch = super().__call__(rows)
        starts = torch.tensor([row["prompt_length"] for row in rows] * 2).unsqueeze(1)
        is_prompt = torch.arange(batch["input_ids"].shape[1]) < starts
        ignored = is_prompt | ~batch["attention_mask"].bool()
        return {**batch, "labels": batch["input_ids"].masked_fill(ignored, IGNORED)}


@dataclass(frozen=True)
class PromptCollator:
    """Rows with `prompt_ids` to left-padded tensors, ready for generation."""

    pad_token_id: int

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """`input_ids`, `attention_mask`, each `(batch, seq)`."""
        ids = [row["prompt_ids"] for row in rows]
        return {
            "input_ids": _padded(ids, self.pad_token_id, left=True),
            "attention_mask": _mask(ids, left=True),
        }
