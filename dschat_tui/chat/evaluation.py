"""A list of prompts over several models, as the original's prompt_eval."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from dschat_tui.chat.events import Table
from dschat_tui.chat.session import Session


def evaluate(session: Session, prompts: list[str], note: Callable[[str], None]) -> Table:
    """Ask every prompt of every model, each in a conversation of its own.

    Args:
        session: its model, its relatives, its settings and its system message.
        prompts: the questions.
        note: called with the model at work.

    Returns:
        a row per prompt and model, with the reward where there is a reward model.
    """
    relatives = session.relatives
    loaders = relatives.generators or {session.generator.name: lambda: session.generator}
    judge = relatives.judge() if relatives.judge else None
    settings = session.generation()
    rows = []
    # One model at a time, so that only one more is in memory.
    for name, load in loaders.items():
        note(f"{name}: {len(prompts)} prompts")
        generator = session.generator if name == session.generator.name else load()
        for number, prompt in enumerate(prompts, 1):
            conversation = session.open_with(prompt)
            answer = session.whole_answer(generator, conversation, settings)
            row: dict[str, object] = {"prompt": prompt, "model": name, "answer": answer}
            if judge:
                turn = {"role": "assistant", "content": answer}
                row["reward"] = round(judge.score([*conversation, turn]), 4)
            rows.append((number, row))
    rows.sort(key=lambda each: each[0])
    return Table("evaluation", [row for _, row in rows])


def write_table(table: Table, path: Path) -> None:
    """Write the rows of a table, as CSV if the file is named so, else as JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, list(table.rows[0]))
            writer.writeheader()
            writer.writerows(table.rows)
        else:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in table.rows)
