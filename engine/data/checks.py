"""What can be checked of a configuration's data before anything starts. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from engine.config.schema import DataSource, RunConfig
from engine.data.files import DataError, is_local, local_parts, read_rows
from engine.data.rows import REASONS, Dropped, read
from engine.data.schemas import EMBEDDED, Phase, Schema, schema_of

ROWS_CHECKED = 5000
"""Rows of a local source that are read and normalised before a run starts."""


@dataclass(frozen=True)
class Reading:
    """What reading a source's rows found: how many, whether those are all, and what is left out."""

    rows: int
    complete: bool
    dropped: Dropped

    @property
    def usable(self) -> int:
        """Rows that a step can use."""
        return self.rows - self.dropped.counts.total()


def check_rows(source: DataSource, schema: Schema, most_rows: int = ROWS_CHECKED) -> Reading:
    """Read and normalise the first rows of each file of a local source.

    Raises:
        DataError: a row that is broken, or all that were read are unusable; the message names the
            file and the line.
    """
    dropped = Dropped()
    count, complete = 0, True
    for file in itertools.chain.from_iterable(local_parts(source.path).values()):
        rows = read_rows(file)
        first = [(f"{file}, {place}", row) for place, row in itertools.islice(rows, most_rows)]
        count += len(first)
        for _ in read(first, schema, dropped):
            pass
        complete &= next(rows, None) is None
    if count == dropped.counts.total() and complete:
        raise DataError(no_usable_row(source, schema, dropped))
    return Reading(count, complete, dropped)


def no_usable_row(source: DataSource, schema: Schema, dropped: Dropped) -> str:
    """The error message for a source without any usable row."""
    advice = {
        "empty": "fill these columns, or map others: columns: {prompt: COLUMN, chosen: COLUMN}",
        "unusable": "bring the rows into a form that is read, or leave such columns and turns out",
        "unwanted": "give answers that are not marked so",
    }
    found = [advice[reason] for reason in REASONS if dropped.counts[reason]]
    return (
        f"data {source.path!r}: no usable row ({schema.describe()}); {dropped.describe()}; "
        + "; ".join(found)
    )


def refusals(config: RunConfig, steps: Iterable[int]) -> list[str]:
    """Why the data of a configuration cannot serve these steps: one line per reason, or none.

    Reads at most `ROWS_CHECKED` rows of each file of a local source.
    """
    steps = set(steps)
    found: list[str] = []
    schemas: dict[str, Schema | None] = {}
    data = config.data
    for source in [*data.sources, *data.sft_only_sources, *data.unsupervised_sources]:
        try:
            schema = schemas[source.path] = schema_of(source)
            if schema is not None and is_local(source.path):
                check_rows(source, schema)
        except DataError as error:
            found.append(str(error))
    if found:
        return found
    for source in data.unsupervised_sources:
        schema = schemas[source.path]
        if 3 in steps and schema is not None and not schema.text:
            found.append(
                f"data.unsupervised_sources: {source.path} is no plain text "
                f"({schema.describe()}); map its text: columns: {{text: COLUMN}}"
            )

    def serving(phase: Phase) -> bool:
        sources = [*data.sources, *(data.sft_only_sources if phase == "sft" else [])]
        loaded = [schemas[source.path] for source in sources]
        return any(schema is None or phase in schema.phases for schema in loaded)

    names = ", ".join(source.path for source in data.sources) or "data.sources (empty)"
    unread = dict.fromkeys(name for s in schemas.values() if s is not None for name in s.unread)
    hint = f"; columns not read: {', '.join(unread)}" if unread else ""
    if hint:
        hint += "; map those that hold answers: columns: {chosen: COLUMN, rejected: COLUMN}"
    if 1 in steps and not serving("sft"):
        found.append(f"{names}: no answers to learn from: step 1 needs prompts with answers{hint}")
    learns_scores = config.needs_reward_model and not config.models.trained_reward
    needs_pairs = steps & ({2, 3} if learns_scores else {2})
    if needs_pairs and not serving("reward"):
        found.append(
            f"{names}: no rejected answers: steps 2 and 3 need pairs of a chosen and a rejected "
            f"answer; run --steps 1, or give a data set with pairs{hint}"
        )
    elif 3 in steps and not serving("ppo"):
        found.append(f"{names}: no prompts: step 3 needs them")
    split_is_used = any(source.path not in EMBEDDED for source in data.sources)
    for step, share in zip((1, 2, 3), data.split, strict=True):
        has_other_rows = step == 1 and data.sft_only_sources
        if step in steps and share == 0 and split_is_used and not has_other_rows:
            found.append(f"data.split gives step {step} a share of 0: raise it, or leave it out")
    return found
