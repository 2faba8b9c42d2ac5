"""One row of any schema in the normalised form that all steps read.

It has `prompt` (messages ending in a user turn), `chosen` and `rejected` (answers), or `text`;
beside them `learnt_turns` (for each message of the prompt whether step 1 learns it; None: none)
and what a data set may carry: `references`, `preferred_style`, `kind`, `phases`. Its other columns
go only to reward functions.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from engine.data.files import DataError, Row, is_missing
from engine.data.schemas import MEDIA, PHASES, TURN_MARK, Schema, is_several, is_unwanted

Reason = Literal["empty", "unusable", "unwanted"]

REASONS: dict[Reason, str] = {
    "empty": "without an answer",
    "unusable": "no dialogue of a question and its answer",
    "unwanted": "marked as not to be learnt",
}

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


class _Message(TypedDict):
    role: str
    content: str


class Turn(_Message, total=False):
    """A message; `learnt` is False for a turn of the assistant that is marked as context."""

    learnt: bool


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
    _refuse_media(row)
    has_answers = schema.chosen or schema.dialogue
    if has_answers and not schema.rejected and (mark := is_unwanted(row)):
        raise UnusableRow("unwanted", f"{mark!r} is {row[mark]!r}")
    chosen = rejected = None
    if schema.prompt:
        prompt = _prompt(row, schema, where)
    elif schema.dialogue:
        prompt = _with_system(row, _turns(row.get(schema.dialogue), schema.dialogue, where), where)
        if not schema.chosen:
            prompt, chosen = _split_answer(_until_last_answer(prompt))
    else:
        prompt = []
    learns_turns = schema.dialogue is not None and schema.chosen is None
    if schema.chosen and chosen is None:
        if is_several(row.get(schema.chosen)):
            raise UnusableRow("unusable", f"column {schema.chosen!r} holds several answers")
        before = prompt
        prompt, chosen = _answer(row.get(schema.chosen), schema.chosen, before, where)
        if schema.rejected:
            other, rejected = _answer(row.get(schema.rejected), schema.rejected, before, where)
            # An empty cell says nothing of its dialogue.
            if rejected and chosen and tidy_turns(other) != tidy_turns(prompt):
                raise UnusableRow("unusable", "the answers belong to two different dialogues")
        if not schema.prompt and not schema.dialogue:
            prompt = _with_system(row, prompt, where)
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
    return {
        "prompt": [{"role": turn["role"], "content": turn["content"]} for turn in prompt],
        "chosen": chosen or None,
        "rejected": rejected or None,
        "learnt_turns": [_is_learnt(turn) for turn in prompt] if learns_turns else None,
        **extras,
    }


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


def tidy_turns(messages: list[Turn]) -> list[Turn]:
    """Strip and drop empty turns, join neighbours of one role, begin with the person's turn.

    Chat templates refuse dialogues whose roles do not alternate.
    """
    tidy: list[Turn] = []
    for message in messages:
        role, content = message["role"], message["content"].strip()
        if not content:
            continue
        if tidy and tidy[-1]["role"] == role:
            tidy[-1]["content"] += f"\n\n{content}"
            tidy[-1]["learnt"] = _is_learnt(tidy[-1]) and _is_learnt(message)
        elif role != "assistant" or any(turn["role"] == "user" for turn in tidy):
            tidy.append({**message, "content": content})
    return tidy


def _is_learnt(turn: Turn) -> bool:
    return turn["role"] == "assistant" and turn.get("learnt", True)


def _refuse_media(row: Row) -> None:
    for name in MEDIA:
        value = row.get(name)
        if not is_missing(value) and value not in ("", [], {}):
            raise UnusableRow("unusable", f"it needs {name!r}, which is not read")


def _with_system(row: Row, turns: list[Turn], where: str) -> list[Turn]:
    """Turns below the row's own column of a system turn, unless they say the same."""
    system = _text(row.get("system"), "system", where).strip()
    said = {turn["content"].strip() for turn in turns if turn["role"] == "system"}
    return turns if not system or system in said else [_turn("system", system), *turns]


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


def _text(value: Any, column: str, where: str) -> str:
    if is_missing(value):
        return ""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}, not text; write text "
            "there, or map another column"
        )
    return value


def _prompt(row: Row, schema: Schema, where: str) -> list[Turn]:
    assert schema.prompt
    value = row.get(schema.prompt)
    if isinstance(value, list):
        turns = _turns(value, schema.prompt, where)
    else:
        text = _text(value, schema.prompt, where).strip()
        if text.startswith("Human:") and text.endswith("\n\nAssistant:"):
            turns = _turns(text, schema.prompt, where)[:-1]
        else:
            if schema.input:
                extra = _text(row.get(schema.input), schema.input, where).strip()
                text = f"{text}\n\n{extra}" if extra else text
            earlier = None if schema.prompt == "history" else row.get("history")
            turns = [*_history(earlier, where), _turn("user", text)]
    return _with_system(row, turns, where)


def _history(value: Any, where: str) -> list[Turn]:
    """Earlier rounds: messages, or pairs of a question and its answer."""
    if not isinstance(value, list):
        return []
    if all(isinstance(entry, dict) for entry in value):
        return _turns(value, "history", where) if value else []
    turns = []
    for pair in value:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise DataError(f"{where}: column 'history' holds no pairs of question and answer")
        question, answer = (_text(text, "history", where) for text in pair)
        turns += [_turn("user", question), _turn("assistant", answer)]
    return turns


def _turns(value: Any, column: str, where: str) -> list[Turn]:
    """Messages from a list of `role`/`content` or `from`/`value`, or from 'Human: ...' text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _from_json(value)
    if isinstance(value, str):
        pieces = TURN_MARK.split(value)
        if len(pieces) < 3:
            raise UnusableRow("unusable", f"no 'Human:' and 'Assistant:' in column {column!r}")
        roles = [_ROLES[name.lower()] for name in pieces[1::2]]
        contents = [content.strip() for content in pieces[2::2]]
        return [_turn(role, content) for role, content in zip(roles, contents, strict=True)]
    if is_missing(value) or not value:
        raise UnusableRow("empty", f"column {column!r} is empty or missing")
    if not isinstance(value, list):
        raise DataError(
            f"{where}: column {column!r} holds a {type(value).__name__}, not a list of messages"
        )
    return [_message(turn, column, where) for turn in value]


def _from_json(text: str) -> Any:
    """The list that a cell holds as JSON, as CSV files write it; else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _message(turn: Any, column: str, where: str) -> Turn:
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
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _joined_parts(content, column)
    message = _turn(role, _text(content, column, where))
    return message if is_unwanted(turn) is None else {**message, "learnt": False}


def _joined_parts(parts: list[Any], column: str) -> str:
    """The text of a message in parts, as multimodal data sets write it."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise UnusableRow("unusable", f"a turn in column {column!r} has parts that are no text")
    return "".join(map(str, texts))


def _until_last_answer(turns: list[Turn]) -> list[Turn]:
    """Turns up to the last answer that is learnt."""
    answers = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    learnt = [index for index in answers if _is_learnt(turns[index])]
    if answers and not learnt:
        raise UnusableRow("unwanted", "every answer is")
    return turns[: learnt[-1] + 1] if learnt else []


def _split_answer(turns: list[Turn]) -> tuple[list[Turn], str]:
    if not turns or turns[-1]["role"] != "assistant":
        raise UnusableRow("unusable", "the dialogue does not end in an answer")
    return tidy_turns(turns[:-1]), turns[-1]["content"].strip()


def _answer(value: Any, column: str, before: list[Turn], where: str) -> tuple[list[Turn], str]:
    """The dialogue that leads to an answer, and the answer.

    Args:
        value: the answer's text, or turns that end in it: a whole dialogue, or what comes after
            `before`.
        column: its name.
        before: what the row's other columns say comes before the answer.
        where: place, for errors.
    """
    if isinstance(value, dict):
        value = [value]
    if isinstance(value, list) and value and not isinstance(value[0], dict):
        value = value[0]
    is_text = isinstance(value, str)
    if is_text and before and not value.lstrip().startswith("Human:"):
        return before, value.strip()
    if not is_text and not isinstance(value, list):
        return before, _text(value, column, where).strip()
    if not value:
        return before, ""
    turns, answer = _split_answer(_turns(value, column, where))
    if not turns:
        return before, answer
    given = [turn for turn in tidy_turns(before) if turn["role"] != "system"]
    own = [turn for turn in turns if turn["role"] != "system"]
    if own[: len(given)] == given or not given:
        systems = [turn for turn in tidy_turns(before) if turn["role"] == "system"]
        return [*(turn for turn in systems if turn not in turns), *turns], answer
    raise UnusableRow("unusable", f"column {column!r} is a dialogue that begins otherwise")


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
