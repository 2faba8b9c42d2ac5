"""Conversations and preferences on disk, in the format that training reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from dschat_tui.chat.session import Message
from engine.data.files import lines_of


def append_line(path: Path, row: Mapping[str, object]) -> None:
    """Append one JSON document as a line, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def read_last_conversation(path: Path) -> tuple[list[Message], str]:
    """Read the last conversation of a JSONL file.

    Returns:
        its turns, which end with an answer, and its system message or "".

    Raises:
        ValueError: the file has no conversation, or turns of another shape.
        OSError: the file cannot be read.
    """
    lines = lines_of(path.read_text(encoding="utf-8"))
    if not lines:
        raise ValueError(f"{path} is empty; /save writes conversations.")
    where = f"The last line of {path}"
    try:
        row = json.loads(lines[-1])
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}).") from None
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(_is_message(each) for each in messages):
        raise ValueError(
            f'{where} has no list "messages" of {{"role": ..., "content": ...}}; '
            "/save writes that format."
        )
    turns = [{"role": each["role"], "content": each["content"]} for each in messages]
    system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else ""
    roles = [turn["role"] for turn in turns]
    if roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError(f"{where} has the roles {roles}; user and assistant must take turns.")
    return turns, system


def read_prompts(path: Path) -> list[str]:
    """Read a list of prompts: a JSON list, JSONL rows with "prompt", or plain lines.

    Raises:
        ValueError: no prompts, or rows without one.
        OSError: the file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        rows = json.loads(text)
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in lines_of(text)]
    else:
        rows = list(lines_of(text))
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path} holds no list of prompts; give one per line, or a JSON list.")
    return [_prompt(row, f"Row {number} of {path}") for number, row in enumerate(rows, 1)]


def _prompt(row: object, where: str) -> str:
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if isinstance(prompt, list) and prompt and _is_message(prompt[-1]):
        prompt = prompt[-1]["content"]
    if not isinstance(prompt, str):
        raise ValueError(f'{where} is no text and has no "prompt".')
    return prompt


def _is_message(value: object) -> TypeGuard[Message]:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
    )
