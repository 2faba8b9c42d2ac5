"""One row of any schema in the normalised form that all steps read.

It has `prompt` (messages ending in a user turn), `chosen` and `rejected` (answers), or `text`;
beside them `more_rejected` (further answers, each a pair with `chosen`), `label` (False: `chosen`
is an answer that is not wanted), `learnt_turns` (for each message of the prompt whether step 1
learns it; None: none) and what a data set may carry: `references`, `preferred_style`, `kind`,
`phases`. Its other columns go only to reward functions.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from engine.data.files import DataError, Row, is_missing
from engine.data.schemas import (
    MEDIA,
    PHASES,
    SYSTEM,
    TURN_MARK,
    Schema,
    is_list,
    is_several,
    is_unwanted,
    label_of,
)

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
# What a cell with a message as text begins with; a key of it follows.
_CALLS = ("tool_calls", "function_call")
_MESSAGE_AS_TEXT = re.compile(r"""\s*\[?\s*\{\s*['"]\w+['"]\s*:""")
_ROLE_KEY = re.compile(r"""['"](?:role|from)['"]\s*:""")


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


def read(
    rows: Iterable[tuple[str, Row]], schema: Schema, dropped: Dropped
) -> Iterator[tuple[Row, Row]]:
    """Each usable row with its normalised form; the others are counted.

    Answers that their label calls unwanted count as dropped and are given all the same, for what
    learns from labels.

    Args:
        rows: with the place of each, for errors.
        schema: of the rows.
        dropped: where rows are counted.

    Raises:
        DataError: a value of the wrong type.
    """
    for where, row in rows:
        try:
            found = normalise(row, schema, where)
        except UnusableRow as unusable:
            dropped.add(unusable, where)
            continue
        if found.get("label") is False:
            dropped.add(UnusableRow("unwanted", f"{schema.label!r} is False"), where)
        yield row, found


def normalise(row: Row, schema: Schema, where: str) -> Row:
    """One row in the normalised form; `where` names file and place in errors.

    Raises:
        UnusableRow: no answer, or no dialogue that ends in a question and its answer.
        DataError: a value of the wrong type.
    """
    if schema.entry:
        plain = Schema(
            prompt=schema.prompt and "prompt",
            chosen=schema.chosen and "chosen",
            rejected=schema.rejected and "rejected",
        )
        return normalise(schema.entry.read(row), plain, where)
    if mark := is_unwanted(row):
        raise UnusableRow("unwanted", f"{mark!r} is {row[mark]!r}")
    if schema.text:
        text = _text(row.get(schema.text), schema.text, where)
        if not text.strip():
            raise UnusableRow("empty", _nothing_in(row, schema.text))
        return {"text": text}
    _refuse_media(row)
    prompt, chosen, rejected = _dialogue(row, schema, where)
    extras = _extras(row, where)
    serves = set(extras.get("phases", PHASES))
    # A row that says which phases it serves needs only their answers.
    if chosen == "" and serves & {"sft", "reward"}:
        raise UnusableRow("empty", _nothing_in(row, schema.chosen or schema.dialogue))
    if schema.rejected and not rejected and "reward" in serves:
        raise UnusableRow("empty", _nothing_in(row, schema.rejected))
    prompt = [*_tools(row, where), *tidy_turns(prompt)]
    if not prompt or prompt[-1]["role"] != "user":
        raise UnusableRow("unusable", "the prompt is empty or does not end in a question")
    learns_turns = schema.dialogue is not None and schema.chosen is None
    return {
        "prompt": [{"role": turn["role"], "content": turn["content"]} for turn in prompt],
        "chosen": chosen or None,
        "rejected": rejected[0] if rejected else None,
        "more_rejected": rejected[1:] or None,
        "label": label_of(schema.label, row.get(schema.label)) if schema.label else None,
        "learnt_turns": [_is_learnt(turn) for turn in prompt] if learns_turns else None,
        **extras,
    }


def _dialogue(row: Row, schema: Schema, where: str) -> tuple[list[Turn], str | None, list[str]]:
    """A row's prompt, its answer ("": an empty one; None: no column of it), and rejected ones."""
    if schema.prompt:
        prompt = _prompt(row, schema.prompt, schema.input, where)
    elif schema.dialogue:
        prompt = _turns(row.get(schema.dialogue), schema.dialogue, where)
        if not schema.chosen:
            prompt, chosen = _split_answer(_until_last_answer(prompt))
            return _with_system(row, prompt, where), chosen, []
    else:
        prompt = []
    if not schema.chosen:
        return _with_system(row, prompt, where), None, []
    if is_several(row.get(schema.chosen)):
        raise UnusableRow("unusable", f"column {schema.chosen!r} holds several answers")
    dialogue, chosen = _answer(row.get(schema.chosen), schema.chosen, prompt, where)
    rejected = []
    if schema.rejected:
        cell = row.get(schema.rejected)
        for value in cell if is_several(cell) else [cell]:
            other, answer = _answer(value, schema.rejected, prompt, where)
            # An empty cell says nothing of its dialogue.
            if answer and chosen and tidy_turns(other) != tidy_turns(dialogue):
                raise UnusableRow("unusable", "the answers belong to two different dialogues")
            if answer:
                rejected.append(answer)
    return _with_system(row, dialogue, where), chosen, rejected


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


def _is_empty(value: Any) -> bool:
    return is_missing(value) or value in ("", [], {}, "[]")


def _refuse_media(row: Row) -> None:
    for name in MEDIA:
        if not _is_empty(row.get(name)):
            raise UnusableRow("unusable", f"it needs {name!r}, which is not read")


def _with_system(row: Row, turns: list[Turn], where: str) -> list[Turn]:
    """Turns below the row's own column of a system turn, unless they say the same."""
    said = {turn["content"].strip() for turn in turns if turn["role"] == "system"}
    texts = [_text(row.get(name), name, where).strip() for name in SYSTEM]
    return [*(_turn("system", text) for text in texts if text and text not in said), *turns]


def _tools(row: Row, where: str) -> list[Turn]:
    """What a row says of its tools: their JSON in a turn of its own, before all others."""
    value = row.get("tools")
    if _is_empty(value):
        return []
    found = _parsed(value, "tools", where) if isinstance(value, str) else value
    if not isinstance(found, list):
        raise UnusableRow("unusable", "column 'tools' holds no list")
    return [_turn("tools", json.dumps(_without_missing(found), ensure_ascii=False))]


def _without_missing(value: Any) -> Any:
    """A value without the empty fields that Parquet adds to objects of different keys."""
    if isinstance(value, dict):
        return {k: _without_missing(v) for k, v in value.items() if not is_missing(v)}
    return [_without_missing(item) for item in value] if isinstance(value, list) else value


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


def _prompt(row: Row, column: str, more: str | None, where: str) -> list[Turn]:
    """The turns of a prompt: its own, or those of the history and a question."""
    value = _messages_in(row.get(column), column, where)
    if isinstance(value, list):
        return _turns(value, column, where)
    text = _text(value, column, where).strip()
    if text.startswith("Human:") and text.endswith("\n\nAssistant:"):
        return _turns(text, column, where)[:-1]
    if more:
        extra = _text(row.get(more), more, where).strip()
        text = f"{text}\n\n{extra}" if extra else text
    earlier = None if column == "history" else row.get("history")
    return [*_history(earlier, where), _turn("user", text)]


def _history(value: Any, where: str) -> list[Turn]:
    """Earlier rounds: messages, or pairs of a question and its answer."""
    if not is_list(value):
        return []
    if isinstance(value, str):
        value = _parsed(value, "history", where) or []
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
    if isinstance(value, str) and is_list(value):
        value = _parsed(value, column, where) or value
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


def _messages_in(value: Any, column: str, where: str) -> Any:
    """The messages of a cell as a list, also of one that holds them as text; else the value."""
    if isinstance(value, dict) and ("role" in value or "from" in value):
        return [value]
    if not isinstance(value, str) or not _MESSAGE_AS_TEXT.match(value):
        return value
    found = _parsed(value, column, where)
    if found is None and _ROLE_KEY.search(value):
        raise UnusableRow(
            "unusable",
            f"column {column!r} holds messages as text, but neither as JSON nor as "
            "Python writes a list",
        )
    turns = [found] if isinstance(found, dict) else found
    is_messages = isinstance(turns, list) and all(
        isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in turns
    )
    return turns if is_messages else value


def _parsed(text: str, column: str, where: str) -> Any:
    """What a cell holds as JSON, or as Python prints lists; None if it holds neither."""
    for parse in (json.loads, ast.literal_eval):
        try:
            found = parse(text)
            json.dumps(found, ensure_ascii=False).encode()
            return found
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: column {column!r} holds half of a character (a surrogate), which is no "
                "text; replace it or remove the row"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise DataError(
                f"{where}: column {column!r} holds values nested too deeply to be read; flatten "
                "or remove it"
            ) from error
        except (ValueError, SyntaxError, TypeError):
            continue
    return None


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
        raise UnusableRow(
            "unusable",
            f"a turn of the role {str(name)!r} in column {column!r}; read are {', '.join(_ROLES)}",
        )
    for key in _CALLS:
        if not _is_empty(turn.get(key)):
            raise UnusableRow("unusable", f"a turn in column {column!r} has {key!r}: not read")
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
    if isinstance(value, list) and value and not isinstance(value[0], dict):
        value = value[0]
    value = _messages_in(value, column, where)
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
