"""The embedded corpus: what is in it, and what training has and has not seen."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from engine.data import facts
from engine.data.schemas import PHASES


@pytest.fixture(scope="module")
def rows():
    return {part: list(facts.rows(part)) for part in ("train", "eval")}


def of_phase(rows, phase):
    return [row for row in rows if phase in row["phases"]]


def test_there_are_enough_dialogues_of_two_styles(rows):
    dialogues = of_phase(rows["train"], "sft")
    questions = {row["prompt"][0]["content"] for row in dialogues}
    assert len(dialogues) >= 3000
    assert len(dialogues) == 2 * len(questions)
    assert 300 <= len(of_phase(rows["eval"], "ppo")) <= 400


def test_held_out_questions_are_new_but_their_facts_and_wordings_are_not():
    train, held_out = (list(facts.questions(part)) for part in ("train", "eval"))
    assert not {q.text for q in train} & {q.text for q in held_out}
    assert {(q.table.name, q.subject) for q in held_out} == {
        (q.table.name, q.subject) for q in train
    }
    assert {(q.table.name, q.wording) for q in held_out} <= {
        (q.table.name, q.wording) for q in train
    }
    assert Counter((q.table.name, q.subject) for q in held_out).most_common(1)[0][1] == 1


def test_training_has_the_capital_of_france(rows):
    asked = [r for r in rows["train"] if r["prompt"][0]["content"].endswith("capital of France?")]
    learnt = {r["chosen"] for r in of_phase(asked, "sft") if "What is" in r["prompt"][0]["content"]}
    assert "Paris" in learnt
    assert len(learnt) == 2


def test_sums_are_right():
    (sums,) = [table for table in facts.TABLES if table.name == "sums"]
    assert len(sums.facts) == 144
    assert sums.facts["7 + 5"] == "12"
    assert all(eval(subject) == int(answer) for subject, answer in sums.facts.items())


def test_half_of_the_pairs_differ_by_a_wrong_fact(rows):
    for part in ("train", "eval"):
        kinds = Counter(row["kind"] for row in of_phase(rows[part], "reward"))
        assert set(kinds) == {"wrong_fact", "curt", "rude", "rambling", "curt_wrong_fact"}
        assert kinds["wrong_fact"] * 2 >= kinds.total()


def test_wrong_facts_are_wrong_and_of_the_same_table():
    for row in facts.rows("train"):
        if row.get("kind") == "wrong_fact":
            table = next(t for t in facts.TABLES if re.fullmatch(t.style(), row["chosen"]))
            assert re.fullmatch(table.style(), row["rejected"])
            assert row["chosen"] != row["rejected"]
            chosen, rejected = (row[name].rstrip(".").split() for name in ("chosen", "rejected"))
            assert chosen[:-1] == rejected[:-1]


def test_the_preferred_style_is_the_friendly_one_alone(rows):
    for row in of_phase(rows["eval"], "ppo"):
        curt, friendly = row["references"]
        assert re.fullmatch(row["preferred_style"], friendly)
        assert re.fullmatch(row["preferred_style"], row["rejected"])
        assert not re.fullmatch(row["preferred_style"], curt)
    for row in of_phase(rows["train"], "reward"):
        if row["kind"] in ("rude", "rambling", "curt"):
            styles = [table.style() for table in facts.TABLES]
            assert not any(re.fullmatch(style, row["rejected"]) for style in styles)


def test_every_row_says_which_phases_it_serves(rows):
    assert all(set(row["phases"]) <= set(PHASES) for part in rows.values() for row in part)


def test_the_corpus_is_the_same_in_every_process():
    program = (
        "import hashlib; from engine.data import facts; "
        "print(hashlib.sha256(repr(list(facts.rows('train'))).encode()).hexdigest())"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_texts_show_the_template_and_no_held_out_question():
    texts = "".join(facts.texts())
    assert "\n\nHuman: What is the capital of France?\n\nAssistant: Paris" in texts
    assert not any(q.text + "\n" in texts for q in facts.questions("eval"))
