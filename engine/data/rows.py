"""One row of any schema in the normalised form that all steps read.

It has `prompt` (messages ending in a user turn), `chosen` and `rejected` (answers), or `text`;
beside them `all_answers` (the assistant turns inside the prompt are learnt too) and what a data
set may carry: `references`, `preferred_style`, `kind`, `phases`. Its other columns go only to
reward functions.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.data.files import DataError, Row
from engine.data.schemas import PHASES, TURN_MARK, Schema

Reason = Literal["empty", "unusable"]

REASONS: dict[Reason, str] = {
    "empty": "without an answer",
    "unusable": "no dialogue of a question and its answer",
}

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


class UnusableRow(Exception):
    """A row that is dropped and counted under `reason`; `detail` says what it lacks."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass
class Dropped:
    """Rows left out, counted by reason, and where the first of each is."""

    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(REASONS, 0)))
    first: dict[str, str] = field(default_factory=dict)

    def add(self, row: UnusableRow, where: str) -> None:
        """Count a row; `where` names its file and place."""
        self.counts[row.reason] += 1
        self.first.setdefault(row.reason, f"{where}: {row.detail}")

    def describe(self) -> str:
        """What was left out, with the first of each, in words; empty if nothing was."""
        return "; ".join(
            f"{self.counts[reason]} {REASONS[reason]}, first {self.first[reason]}"
            for reason in REASONS
            if self.counts[reason]
        )


def normalise(row: Row, schema: Schema, where: str) -> Row:
    """One row in the normalised form; `where` names file and place in errors.

    Raises:
        UnusableRow: no answer, or no dialogue that ends in a question and its answer.
        DataError: a value of the wrong type.
    """
    if schema.text:
        text = _text(row.get(schema.text), schema.text, where)
        if not text.strip():
            raise UnusableRow("empty", _nothing_in(row, schema.text))
        return {"text": text}
    if schema.entry:
        plain = Schema(
            prompt=schema.prompt and "prompt",
            chosen=schema.chosen and "chosen",
            rejected=schema.rejected and "rejected",
        )
        return normalise(schema.entry.read(row), plain, where)
    chosen = rejected = None
    all_answers = False
    if schema.prompt:
        prompt = _prompt(row, schema, where)
    elif schema.dialogue:
        prompt = _turns(row.get(schema.dialogue), schema.dialogue, where)
        if not schema.chosen:
            prompt, chosen = _split_answer(_until_last_answer(prompt))
            all_answers = True
    else:
        assert schema.chosen
        assert schema.rejected
        prompt, chosen = _split_answer(_turns(row.get(schema.chosen), schema.chosen, where))
        other, rejected = _split_answer(_turns(row.get(schema.rejected), schema.rejected, where))
        if other != prompt:
            raise UnusableRow("unusable", "the answers belong to two different dialogues")
    if schema.chosen and chosen is None:
        chosen = _answer(row.get(schema.chosen), schema.chosen, where)
    if schema.rejected and rejected is None:
        rejected = _answer(row.get(schema.rejected), schema.rejected, where)
    extras = _extras(row, where)
    serves = set(extras.get("phases", PHASES))
    # A row that says which phases it serves needs only their answers.
    if chosen == "" and serves & {"sft", "reward"}:
        raise UnusableRow("empty", _nothing_in(row, schema.chosen or schema.dialogue))
    if rejected == "" and "reward" in serves:
        raise UnusableRow("empty", _nothing_in(row, schema.rejected))
    prompt = tidy_turns(prompt)
    if not prompt or prompt[-1]["role"] != "user":
        raise UnusableRow("unusable", "the prompt is empty or does not end in a question")
    normalised = {"prompt": prompt, "chosen": chosen or None, "rejected": rejected or None}
    return {**normalised, "all_answers": all_answers, **extras}


def further_columns(row: Row, schema: Schema) -> str | None:
    """What a reward function gets of a row, as a JSON string, since columns differ between sources.

    These are `prompt`, where it is plain text in the data and no dialogue, and all columns but
    those of prompt and pairs. None of plain text, which has no prompts.
    """
    if schema.text:
        return None
    parts = {schema.prompt, schema.input, schema.dialogue, schema.rejected}
    if schema.rejected:
        parts.add(schema.chosen)
    columns = {name: value for name, value in row.items() if name not in {*parts, "phases"}}
    prompt = row.get(schema.prompt) if schema.prompt and not schema.entry else None
    if isinstance(prompt, str):
        columns["prompt"] = prompt
    return json.dumps(columns, ensure_ascii=False, default=str)


def _nothing_in(row: Row, column: str | None) -> str:
    return f"column {column!r} is {'empty' if column in row else 'missing'}"


def tidy_turns(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Strip and drop empty turns, join neighbours of one role, begin with the person's turn.

    Chat templates refuse dialogues whose roles do not alternate.
    """
    tidy: list[dict[str, str]] = []
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if not content:
            continue
        if tidy and tidy[-1]["role"] == role:
            tidy[-1]["content"] += f"\n\n{content}"
        elif role != "assistant" or any(turn["role"] == "user" for turn in tidy):
            tidy.append({"role": role, "content": content})
    return tidy


def _text(value: Any, column: str, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}, not text; write text "
            "there, or map another column"
        )
    return value


def _prompt(row: Row, schema: Schema, where: str) -> list[dict[str, str]]:
    assert schema.prompt
    value = row.get(schema.prompt)
    if isinstance(value, list):
        return _turns(value, schema.prompt, where)
    text = _text(value, schema.prompt, where).strip()
    if text.startswith("Human:") and text.endswith("\n\nAssistant:"):
        return _turns(text, schema.prompt, where)[:-1]
    system = _text(row.get("system"), "system", where)
    if schema.input:
        extra = _text(row.get(schema.input), schema.input, where).strip()
        text = f"{text}\n\n{extra}" if extra else text
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def _turns(value: Any, column: str, where: str) -> list[dict[str, str]]:
    """Messages from a list of `role`/`content` or `from`/`value`, or from 'Human: ...' text."""
    if isinstance(value, str):
        pieces = TURN_MARK.split(value)
        if len(pieces) < 3:
            raise UnusableRow("unusable", f"no 'Human:' and 'Assistant:' in column {column!r}")
        roles = [_ROLES[name.lower()] for name in pieces[1::2]]
        contents = [content.strip() for content in pieces[2::2]]
        return [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
    if not value:
        raise UnusableRow("empty", f"column {column!r} is empty or missing")
    if not isinstance(value, list):
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}, not a list of messages"
        )
    return [_message(turn, column, where) for turn in value]


def _message(turn: Any, column: str, where: str) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: a turn in {column!r} is a {type(turn).__name__}, not a message")
    name = turn.get("role", turn.get("from"))
    if name is None:
        raise DataError(
            f"{where}: a turn in {column!r} has {', '.join(turn)}; expected role and content, "
            "or from and value"
        )
    role = _ROLES.get(str(name).lower())
    if role is None:
        raise UnusableRow("unusable", f"a turn of {str(name)!r} in column {column!r}")
    return {"role": role, "content": _text(turn.get("content", turn.get("value")), column, where)}


def _until_last_answer(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    while turns and turns[-1]["role"] != "assistant":
        turns = turns[:-1]
    return turns


def _split_answer(turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], str]:
    if not turns or turns[-1]["role"] != "assistant":
        raise UnusableRow("unusable", "the dialogue does not end in an answer")
    return tidy_turns(turns[:-1]), turns[-1]["content"].strip()


def _answer(value: Any, column: str, where: str) -> str:
    if isinstance(value, list):
        value = value[-1] if value else None
    if isinstance(value, dict):
        message = _message(value, column, where)
        if message["role"] != "assistant":
            raise UnusableRow("unusable", f"column {column!r} holds no turn of the assistant")
        return message["content"].strip()
    return _text(value, column, where).strip()


def _extras(row: Row, where: str) -> Row:
    """The optional fields of a row besides prompt and answers, those of the right type."""
    extras: Row = {}
    for name in ("references", "phases"):
        value = row.get(name)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            extras[name] = value
    for name in ("preferred_style", "kind"):
        if isinstance(row.get(name), str):
            extras[name] = row[name]
    unknown = set(extras.get("phases", [])) - set(PHASES)
    if unknown:
        raise DataError(
            f"{where}: phases holds {', '.join(sorted(unknown))}; known are {', '.join(PHASES)}"
        )
    return extras
