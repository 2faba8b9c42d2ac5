"""Random dialogues in every schema that is known: step 1 learns their answers and nothing else.

What is expected comes from the dialogue itself, rendered by hand; the product reads a file.
"""

from __future__ import annotations

import csv
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from test_data_phases import make_tokenizer

from engine.config.schema import DataSource, RunConfig
from engine.data.encoding import encode_row
from engine.data.inspection import learnt_pieces
from engine.data.sources import load_source
from engine.data.templates import install_template

CONFIG = RunConfig.model_validate(
    {
        "sft": {"max_length": 4096},
        "reward": {"max_length": 4096},
        "ppo": {"max_prompt_length": 4096},
    }
)
DIALOGUES = 12
Row = dict[str, Any]


@dataclass(frozen=True)
class Dialogue:
    """A system turn or none, and rounds of a question, its answer, and whether that is learnt."""

    system: str | None
    rounds: list[tuple[str, str, bool]]
    rejected: list[str]
    is_wanted: bool

    def messages(self, marks: bool = False, system: bool = True) -> list[Row]:
        """As role and content, the unlearnt answers marked with a weight if asked."""
        turns: list[Row] = []
        if system and self.system:
            turns.append({"role": "system", "content": self.system})
        for question, answer, learnt in self.rounds:
            weight = {"weight": int(learnt)} if marks else {}
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer, **weight})
        return turns

    def up_to_the_answer(self) -> list[Row]:
        return self.messages()[:-1]

    @property
    def question(self) -> str:
        return self.rounds[-1][0]

    @property
    def answer(self) -> str:
        return self.rounds[-1][1]

    @property
    def prompt_text(self) -> str:
        """Rendered by hand in the template human_assistant, up to where the last answer begins."""
        text = f"\n\nSystem: {self.system}" if self.system else ""
        for question, answer, _ in self.rounds[:-1]:
            text += f"\n\nHuman: {question}\n\nAssistant: {answer}<eos>"
        return f"{text}\n\nHuman: {self.question}\n\nAssistant:"


def dialogues(seed: int, **changes: Any) -> list[Dialogue]:
    """Random ones, each of whose texts is written once and never part of another."""
    rng = random.Random(seed)
    words = (f"{rng.choice(['apple', 'pear', 'Birne', '梨', 'poire 🍐'])}{n}" for n in range(10**6))
    ends = ["", "?", ".\nAnd more.", " \u2028 yes", ' "so"', "{x}", " [1]", " nan"]

    def text() -> str:
        return f"{next(words)} {rng.choice(ends)}".strip()

    made = []
    for _ in range(DIALOGUES):
        rounds = [(text(), text(), rng.random() < 0.6) for _ in range(rng.randint(1, 4))]
        rounds[-1] = (*rounds[-1][:2], True)
        made.append(
            Dialogue(
                system=text() if rng.random() < 0.5 else None,
                rounds=rounds[-1:] if changes.get("one_round") else rounds,
                rejected=[text() for _ in range(rng.randint(1, 3))],
                is_wanted=rng.random() < 0.6,
            )
        )
    # A column is seen in the rows that fill it.
    first = made[0]
    made[0] = Dialogue(next(words), first.rounds, [next(words), next(words)], False)
    made[1] = Dialogue(None, made[1].rounds, [next(words)], True)
    return made


def sharegpt(turns: list[Row]) -> list[Row]:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    return [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]


def parts(turns: list[Row]) -> list[Row]:
    return [{**t, "content": [{"type": "text", "text": t["content"]}]} for t in turns]


def as_text(turns: list[Row]) -> str:
    names = {"user": "Human", "assistant": "Assistant"}
    return "".join(f"\n\n{names[turn['role']]}: {turn['content']}" for turn in turns)


def answered(dialogue: Dialogue, answer: str, **options: Any) -> list[Row]:
    return [*dialogue.messages(**options)[:-1], {"role": "assistant", "content": answer}]


def history(dialogue: Dialogue) -> list[list[str]]:
    return [[question, answer] for question, answer, _ in dialogue.rounds[:-1]]


def beside(dialogue: Dialogue) -> Row:
    return {"system": dialogue.system, "history": history(dialogue)}


# Every answer of a dialogue is learnt, unless it is marked.
DIALOGUE_SCHEMAS: dict[str, Callable[[Dialogue], Row]] = {
    "messages": lambda d: {"messages": d.messages()},
    "conversations": lambda d: {"id": 7, "conversations": sharegpt(d.messages())},
    "conversation in parts": lambda d: {"conversation": parts(d.messages())},
    "messages as JSON": lambda d: {"messages": json.dumps(d.messages())},
    "messages as Python prints them": lambda d: {"messages": repr(d.messages())},
    "a system column": lambda d: {"system": d.system, "messages": d.messages(system=False)},
}
MARKED_SCHEMAS: dict[str, Callable[[Dialogue], Row]] = {
    "weights": lambda d: {"messages": d.messages(marks=True)},
    "train": lambda d: {
        "conversations": [
            {**turn, "train": bool(marked.get("weight", 1))}
            for turn, marked in zip(sharegpt(d.messages()), d.messages(marks=True), strict=True)
        ]
    },
    "weights as JSON": lambda d: {"messages": json.dumps(d.messages(marks=True))},
}
# The answer is learnt, and what comes before it is not.
ANSWER_SCHEMAS: dict[str, Callable[[Dialogue], Row]] = {
    "instruction": lambda d: {"instruction": d.question, "output": d.answer, **beside(d)},
    "question": lambda d: {**beside(d), "question": d.question, "answer": d.answer},
    "history as messages": lambda d: {
        "prompt": d.question,
        "response": d.answer,
        "system": d.system,
        "history": d.messages(system=False)[:-2],
    },
    "prompt as messages": lambda d: {"prompt": d.up_to_the_answer(), "completion": d.answer},
    "both as messages": lambda d: {
        "completion": d.messages()[-1:],
        "prompt": d.up_to_the_answer(),
    },
    "prompt as JSON": lambda d: {
        "prompt": json.dumps(d.up_to_the_answer()),
        "completion": json.dumps(d.messages()[-1:]),
    },
}
PAIR_SCHEMAS: dict[str, Callable[[Dialogue], Row]] = {
    "prompt as text": lambda d: {
        "prompt": as_text(d.messages(system=False)[:-1]) + "\n\nAssistant:",
        "chosen": d.answer,
        "rejected": d.rejected[0],
        "system": d.system,
    },
    "conversations and turns": lambda d: {
        "conversations": sharegpt(d.up_to_the_answer()),
        "chosen": {"from": "gpt", "value": d.answer},
        "rejected": {"from": "gpt", "value": d.rejected[0]},
    },
    "two dialogues": lambda d: {
        "chosen": d.messages(),
        "rejected": answered(d, d.rejected[0]),
    },
    "two dialogues as text": lambda d: {
        "system": d.system,
        "chosen": as_text(d.messages(system=False)),
        "rejected": as_text(answered(d, d.rejected[0], system=False)),
    },
    "the first question beside two dialogues": lambda d: {
        "prompt": d.rounds[0][0],
        "chosen": d.messages(),
        "rejected": answered(d, d.rejected[0]),
    },
    "a question beside two dialogues as JSON": lambda d: {
        "rejected": json.dumps(answered(d, d.rejected[0])),
        "chosen": json.dumps(d.messages()),
        "prompt": d.rounds[0][0],
    },
}
SEVERAL_SCHEMAS: dict[str, Callable[[Dialogue], Row]] = {
    "several answers": lambda d: {
        "prompt": d.question,
        "chosen": d.answer,
        "rejected": d.rejected,
        **beside(d),
    },
    "several dialogues": lambda d: {
        "prompt": d.up_to_the_answer(),
        "chosen": d.messages(),
        "rejected": [answered(d, answer) for answer in d.rejected],
    },
}
LABELLED_SCHEMAS: dict[str, Callable[[Dialogue], Row]] = {
    "label": lambda d: {
        "prompt": d.question,
        "completion": d.answer,
        "label": d.is_wanted,
        **beside(d),
    },
    "kto_tag": lambda d: {"kto_tag": d.is_wanted, "messages": d.messages()},
    "label as text": lambda d: {
        "prompt": json.dumps(d.up_to_the_answer()),
        "completion": d.answer,
        "label": str(d.is_wanted),
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    found = make_tokenizer()
    install_template(found, "human_assistant")
    return found


@pytest.fixture(params=["jsonl", "json", "parquet", "csv"])
def write(request, tmp_path):
    """Writes rows in a format and loads them; CSV where every cell is text."""

    def rows_of(rows: list[Row]) -> Iterator[Row]:
        path = tmp_path / f"rows.{request.param}"
        if request.param == "jsonl":
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            path.write_text("".join(lines), encoding="utf-8")
        elif request.param == "json":
            path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        elif request.param == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        elif all(isinstance(v, str) or v is None for row in rows for v in row.values()):
            with path.open("w", newline="", encoding="utf-8") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        else:
            pytest.skip("holds more than text")
        loaded = load_source(DataSource(path=str(path)), str(tmp_path / "cache"))
        return iter(loaded.train)

    return rows_of


def learnt(row: Row, tokenizer) -> tuple[str, list[str]]:
    """The text of a row in step 1, and the pieces of it that are learnt."""
    (encoded,) = encode_row(row, "sft", CONFIG, tokenizer, Counter())
    pieces = learnt_pieces(encoded["input_ids"], encoded["labels"], tokenizer)
    return "".join(text for text, _ in pieces), [text for text, is_learnt in pieces if is_learnt]


def check(rows: Iterator[Row], expected: list[Dialogue], tokenizer, every_answer: str) -> None:
    for row, dialogue in zip(rows, expected, strict=True):
        text, pieces = learnt(row, tokenizer)
        assert text == f"{dialogue.prompt_text} {dialogue.answer}<eos>"
        *earlier, last = dialogue.rounds
        if every_answer == "no":
            earlier = []
        elif every_answer == "wanted":
            earlier = [each for each in earlier if each[2]]
        assert pieces == [f" {answer}<eos>" for _, answer, _ in (*earlier, last)]


@pytest.mark.parametrize("schema", DIALOGUE_SCHEMAS)
def test_every_answer_of_a_dialogue_is_learnt(schema, write, tokenizer):
    made = dialogues(1)
    check(write([DIALOGUE_SCHEMAS[schema](d) for d in made]), made, tokenizer, "yes")


@pytest.mark.parametrize("schema", MARKED_SCHEMAS)
def test_marked_answers_are_not_learnt(schema, write, tokenizer):
    made = dialogues(2)
    check(write([MARKED_SCHEMAS[schema](d) for d in made]), made, tokenizer, "wanted")


@pytest.mark.parametrize("schema", ANSWER_SCHEMAS)
def test_only_the_answer_to_a_prompt_is_learnt(schema, write, tokenizer):
    made = dialogues(3)
    check(write([ANSWER_SCHEMAS[schema](d) for d in made]), made, tokenizer, "no")


@pytest.mark.parametrize("schema", LABELLED_SCHEMAS)
def test_unwanted_answers_are_not_learnt_and_keep_their_label(schema, write, tokenizer):
    made = dialogues(4)
    rows = list(write([LABELLED_SCHEMAS[schema](d) for d in made]))
    assert [row["label"] for row in rows] == [d.is_wanted for d in made]
    assert [row["chosen"] for row in rows] == [d.answer for d in made]
    kept = [row for row in rows if encode_row(row, "sft", CONFIG, tokenizer, Counter())]
    every = "no" if "label" in schema else "yes"
    check(iter(kept), [d for d in made if d.is_wanted], tokenizer, every)


@pytest.mark.parametrize("schema", [*PAIR_SCHEMAS, *SEVERAL_SCHEMAS])
def test_pairs_are_the_chosen_answer_against_each_rejected_one(schema, write, tokenizer):
    made = dialogues(5)
    several = schema in SEVERAL_SCHEMAS
    rows = list(write([{**PAIR_SCHEMAS, **SEVERAL_SCHEMAS}[schema](d) for d in made]))
    check(iter(rows), made, tokenizer, "no")
    for row, dialogue in zip(rows, made, strict=True):
        pairs = encode_row(row, "reward", CONFIG, tokenizer, Counter())
        rejected = dialogue.rejected if several else dialogue.rejected[:1]
        assert [tokenizer.decode(pair["rejected_ids"]) for pair in pairs] == [
            f"{dialogue.prompt_text} {answer}<eos>" for answer in rejected
        ]
        for pair in pairs:
            chosen = tokenizer.decode(pair["chosen_ids"])
            assert chosen == f"{dialogue.prompt_text} {dialogue.answer}<eos>"
            answer_ids = pair["chosen_ids"][pair["prompt_length"] :]
            assert tokenizer.decode(answer_ids) == f" {dialogue.answer}<eos>"
        (prompt,) = encode_row(row, "ppo", CONFIG, tokenizer, Counter())
        assert tokenizer.decode(prompt["prompt_ids"]) == dialogue.prompt_text
