"""The sixteen data sets that DeepSpeed-Chat knows by name: what they are, what their columns hold.

A source is one of them by its name on the Hub, or by a path that holds this name
(`/data/Dahoas/rm-static`), as in the original. Needs neither torch nor datasets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

LOCAL_FILES = "local/jsonfile"
"""The name that stands for data/train.json and data/eval.json."""

HH_MARK = re.compile(r"(?:^|\n\n)\s*(Human|Assistant):")
INLINE_MARK = re.compile(r"(?:^|\s)\s*(Human|Assistant):")
VICUNA_MARK = re.compile(r"(?:^|\s)\s*(USER|ASSISTANT):")
_CITATION = re.compile(r" ?\[\d+(?:, ?\d+)*\]")
_ANSWER_MARK = re.compile(r"^\s*Assistant:")


@dataclass(frozen=True)
class Entry:
    """One data set: a row of the table.

    `prompt`, `chosen` and `rejected` are paths into a row: names of columns, with dots into
    objects and numbers into lists (`answers.ja.0.text`). Which of the two answers is the better
    one may depend on the row: by the greater of two `scores` (the first at a tie), or by a column
    `first_if` that holds 1 where `chosen` is. `turn_mark` splits a prompt that is a dialogue as
    text. `held_out` is the part of the Hub's set for evaluation; None: rows are held out of train.
    `licence` and `size` are what the card on the Hub said, or "not stated" and "unknown".
    """

    name: str
    language: str
    prompt: str
    chosen: str
    rejected: str | None = None
    scores: tuple[str, str] | None = None
    first_if: str | None = None
    turn_mark: re.Pattern[str] | None = None
    citations: bool = False
    hub_id: str | None = None
    held_out: str | None = None
    licence: str = "not stated"
    size: str = "unknown"

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that it serves; pairs serve all."""
        return (1, 2, 3) if self.rejected else (1,)

    def fitted(self, columns: Iterable[str]) -> Entry | None:
        """The entry for rows with values in these columns; None: the rows are of another data set.

        Without rejected answers the rows serve only step 1, as in the original.
        """
        depends = self._depends()
        there = set(columns)
        if not {_root(self.prompt), _root(self.chosen)} | depends <= there:
            return None
        if self.rejected and _root(self.rejected) not in there:
            return None if depends else replace(self, rejected=None)
        return self

    def columns(self) -> set[str]:
        """The columns that it reads."""
        paths = (self.prompt, self.chosen, *([self.rejected] if self.rejected else []))
        return {*map(_root, paths), *self._depends()}

    def _depends(self) -> set[str]:
        """Columns that say which answer is the better one."""
        return {*(self.scores or ()), *([self.first_if] if self.first_if else [])}

    def describe(self) -> str:
        """The mapping in words, as `prompt 'history', chosen 'human_ref_A'`."""
        if not self.rejected:
            return f"prompt {self.prompt!r}, answer {self.chosen!r}"
        text = f"prompt {self.prompt!r}, chosen {self.chosen!r}, rejected {self.rejected!r}"
        if self.scores:
            text += f", the better by {self.scores[0]!r} and {self.scores[1]!r}"
        if self.first_if:
            text += f", the other way round where {self.first_if!r} is 0"
        return text

    def read(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of this data set as `prompt` (text or messages), `chosen` and `rejected`.

        What a row lacks is None.
        """
        prompt, chosen = _at(row, self.prompt), _at(row, self.chosen)
        rejected = _at(row, self.rejected) if self.rejected else None
        if isinstance(prompt, str) and self.turn_mark:
            prompt = _dialogue(prompt, self.turn_mark)
        first_is_better = self._first_is_better(row)
        if first_is_better is None:
            chosen = rejected = None
        elif not first_is_better:
            chosen, rejected = rejected, chosen
        return {"prompt": prompt, "chosen": self._text(chosen), "rejected": self._text(rejected)}

    def _first_is_better(self, row: dict[str, Any]) -> bool | None:
        try:
            if self.scores:
                first, second = (float(row[name]) for name in self.scores)
                return first >= second
            return int(row[self.first_if]) == 1 if self.first_if else True
        except (KeyError, TypeError, ValueError):
            return None

    def _text(self, answer: Any) -> Any:
        if not isinstance(answer, str):
            return answer
        answer = _CITATION.sub("", answer) if self.citations else answer
        return _ANSWER_MARK.sub("", answer) if self.turn_mark else answer


def _root(path: str) -> str:
    return path.split(".")[0]


def _at(row: Any, path: str) -> Any:
    for part in path.split("."):
        if isinstance(row, list):
            row = row[int(part)] if len(row) > int(part) else None
        else:
            row = row.get(part) if isinstance(row, dict) else None
    return row


def _dialogue(text: str, mark: re.Pattern[str]) -> list[dict[str, str]]:
    """Messages of a dialogue given as text; what precedes the first mark is the system turn."""
    before, *pieces = mark.split(text)
    if not pieces:
        return [{"role": "user", "content": text}]
    roles = {"human": "user", "user": "user", "assistant": "assistant"}
    turns = [
        {"role": roles[name.lower()], "content": content.strip()}
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    if turns[-1] == {"role": "assistant", "content": ""}:
        turns.pop()
    return [{"role": "system", "content": before.strip()}, *turns]


class _Columns(TypedDict):
    """Columns that several data sets share, as fields of `Entry`."""

    prompt: str
    chosen: str
    rejected: str


_PAIR: _Columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
_MIRACL: _Columns = {
    "prompt": "query",
    "chosen": "positive_passages.0.text",
    "rejected": "negative_passages.0.text",
}

DATA_SETS = (
    Entry(
        "Dahoas/rm-static",
        "en",
        **_PAIR,
        turn_mark=HH_MARK,
        held_out="test",
        size="76,256 + 5,103 rows, 73 MB",
    ),
    Entry(
        "Dahoas/full-hh-rlhf",
        "en",
        **_PAIR,
        turn_mark=HH_MARK,
        held_out="test",
        size="112,052 + 12,451 rows, 136 MB",
    ),
    Entry("Dahoas/synthetic-instruct-gptj-pairwise", "en", **_PAIR),
    Entry(
        "yitingxie/rlhf-reward-datasets",
        "en",
        **_PAIR,
        turn_mark=HH_MARK,
        held_out="test",
        size="81 thousand rows, 57 MB",
    ),
    Entry(
        "openai/webgpt_comparisons",
        "en",
        prompt="question.full_text",
        chosen="answer_0",
        rejected="answer_1",
        scores=("score_0", "score_1"),
        citations=True,
        size="19,578 rows",
    ),
    Entry(
        "stanfordnlp/SHP",
        "en",
        prompt="history",
        chosen="human_ref_A",
        rejected="human_ref_B",
        first_if="labels",
        held_out="validation",
        size="348,718 + 18,436 rows",
    ),
    Entry(
        "pvduy/sharegpt_alpaca_oa_vicuna_format",
        "en",
        prompt="prompt",
        chosen="label",
        turn_mark=VICUNA_MARK,
        held_out="test",
        size="324 + 1.5 thousand rows, 263 MB",
    ),
    Entry(
        LOCAL_FILES,
        "yours",
        **_PAIR,
        turn_mark=INLINE_MARK,
        licence="yours",
        size="data/train.json, data/eval.json",
    ),
    Entry(
        "wangrui6/Zhihu-KOL",
        "zh",
        prompt="INSTRUCTION",
        chosen="RESPONSE",
        size="1.01 million rows",
    ),
    Entry(
        "Cohere/miracl-zh-queries-22-12",
        "zh",
        **_MIRACL,
        held_out="dev",
        licence="apache-2.0",
        size="1.3 thousand + 393 rows",
    ),
    Entry(
        "Hello-SimpleAI/HC3-Chinese",
        "zh",
        prompt="question",
        chosen="human_answers.0",
        licence="cc-by-sa-4.0",
        size="22 MB",
    ),
    Entry(
        "mkqa-Chinese",
        "zh",
        prompt="queries.zh_cn",
        chosen="answers.zh_cn.0.text",
        hub_id="apple/mkqa",
        licence="cc-by-3.0",
    ),
    Entry(
        "mkqa-Japanese",
        "ja",
        prompt="queries.ja",
        chosen="answers.ja.0.text",
        hub_id="apple/mkqa",
        licence="cc-by-3.0",
    ),
    Entry("Cohere/miracl-ja-queries-22-12", "ja", **_MIRACL, held_out="dev", licence="unknown"),
    Entry(
        "lmqg/qg_jaquad",
        "ja",
        prompt="question",
        chosen="sentence",
        held_out="validation",
        licence="cc-by-sa-3.0",
        size="27.8 + 3.9 thousand rows",
    ),
    Entry(
        "lmqg/qag_jaquad",
        "ja",
        prompt="questions.0",
        chosen="paragraph",
        held_out="validation",
        licence="cc-by-sa-4.0",
        size="9.5 + 1.4 thousand rows",
    ),
)


def entry_for(path: str) -> Entry | None:
    """The data set that a source's name or path names, or None."""
    parts = Path(path).parts
    for entry in DATA_SETS:
        name = tuple(entry.name.split("/"))
        if any(parts[i : i + len(name)] == name for i in range(len(parts) - len(name) + 1)):
            return entry
    return None


def local_files(path: str) -> list[Path] | None:
    """Train and eval file where a path ends in `local/jsonfile`; None elsewhere.

    As in the original, they are in the folder `data` next to `local`.
    """
    root = Path(path).expanduser()
    if root.parts[-2:] != tuple(LOCAL_FILES.split("/")) or root.exists():
        return None
    return [root.parent.parent / "data" / name for name in ("train.json", "eval.json")]
