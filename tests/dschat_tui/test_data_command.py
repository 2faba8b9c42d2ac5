"""`dschat data`: what it prints, what it refuses, what it writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dschat_tui.cli import data_report
from dschat_tui.cli.main import app

SHARED = Path(__file__).parents[3] / "shared" / "data"
PAIR = {"prompt": "What is the capital of France?", "chosen": "Paris.", "rejected": "Rome."}


def dschat(*arguments: str):
    return CliRunner().invoke(app, ["data", *arguments])


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.json"
    rows = [{**PAIR, "prompt": f"What is {n}?"} for n in range(40)]
    path.write_text(json.dumps([*rows, {**PAIR, "chosen": ""}]))
    return path


@pytest.mark.parametrize("command", [[], ["list"], ["inspect"], ["export"]])
def test_every_command_has_help(command):
    result = dschat(*command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_the_table_names_mapping_licence_and_size():
    table = dschat("list").output
    assert "Dahoas/rm-static" in table
    found = {entry["name"]: entry for entry in json.loads(dschat("list", "--json").output)}
    assert len(found) == 16
    assert found["stanfordnlp/SHP"]["steps"] == [1, 2, 3]
    assert "'human_ref_A'" in found["stanfordnlp/SHP"]["mapping"]
    assert found["Hello-SimpleAI/HC3-Chinese"]["licence"] == "cc-by-sa-4.0"
    assert found["Cohere/miracl-ja-queries-22-12"]["size"] == "unknown"


def test_the_table_and_a_refusal_need_no_torch(tmp_path):
    (tmp_path / "bad.jsonl").write_text(json.dumps(PAIR) + "\n{broken\n")
    code = f"""
import sys
from typer.testing import CliRunner
from dschat_tui.cli.main import app
run = CliRunner().invoke
assert run(app, ["data", "list"]).exit_code == 0
assert run(app, ["data", "inspect", {str(tmp_path / "bad.jsonl")!r}]).exit_code == 2
assert not {{"torch", "transformers", "datasets"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_report_in_words(pairs):
    result = dschat("inspect", str(pairs), "--samples", "1")
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "prompt 'prompt', chosen 'chosen', rejected 'rejected'" in text
    assert "40 usable" in text
    assert (
        f"1 left out (without an answer), first {pairs}, row 41: column 'chosen' is empty" in text
    )
    assert "step 3 RLHF (PPO): yes" in text
    assert "pairs: 40, 0 identical" in text
    assert "not learnt | " in text
    assert "learnt     |  Paris.<|endoftext|>" in text
    assert "row 1 in the template human_assistant" in text
    assert "\x1b" not in text


def test_the_report_as_a_document_and_the_profiles_own_mapping(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"q": "Hi?", "good": "Hello.", "bad": "No."}] * 30))
    assert dschat("inspect", str(path)).exit_code == 2
    profile = tmp_path / "mine.yaml"
    mapping = "columns: {prompt: q, chosen: good, rejected: bad}"
    profile.write_text(f"data:\n  sources: [{{path: {path}, {mapping}}}]\nsft: {{max_length: 8}}\n")
    result = dschat("inspect", str(path), "--profile", str(profile), "--json", "--rows", "10")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["rows"]["looked_at"] == 10
    assert document["limits"]["1"]["max_tokens"] == 8
    assert document["tokenizer"] == "embedded:tiny-llama"


def test_an_export_is_what_the_step_sees(pairs, tmp_path):
    output = tmp_path / "step1.jsonl"
    arguments = ("export", str(pairs), "--step", "1", "--output", str(output))
    result = dschat(*arguments)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert f"{len(rows)} rows of step 1 in {output}" in result.output
    assert {row["part"] for row in rows} == {"train", "eval"}
    assert all(row["learnt"] == [" Paris.<|endoftext|>"] for row in rows)
    again = dschat(*arguments)
    assert again.exit_code == 2
    assert "never overwrites" in again.output


def test_what_cannot_be_exported_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "alpaca.json"
    path.write_text(json.dumps([{"instruction": "Add.", "input": "", "output": "3"}]))
    result = dschat("export", str(path), "--step", "2", "--output", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 2
    assert "need pairs" in result.output
    result = dschat("export", str(path), "--step", "1", "--output", str(tmp_path / "no" / "f"))
    assert result.exit_code == 2
    assert "Make it first" in result.output


def test_colour_stands_beside_the_words():
    sample = {"row": 1, "step": 1, "tokens": 3, "learnt": 1, "text": [("a\nb", False), ("c", True)]}
    document = {
        "source": "x\x1b[2J",
        "schema": "s",
        "columns_not_read": [],
        "rows": {"usable": 1, "held_out": None, "dropped": {}, "looked_at": 1},
        "steps": {step: {"reason": None} for step in "123"},
        "alignment": "ppo",
        "template": "human_assistant",
        "tokenizer": "t",
        "eos": {"token": "</s>", "id": 2},
        "lengths": {"histogram": [{"up_to": 4, "rows": 2}, {"up_to": 8, "rows": 1}]},
        "samples": [sample],
    }
    plain, colored = data_report.as_text(document), data_report.as_text(document, color=True)
    assert "\x1b" not in plain
    assert "  not learnt | a\n             | b\n  learnt     | c" in plain
    assert "learnt     | \x1b[32mc\x1b[0m" in colored
    bars = [line for line in plain.splitlines() if "up to" in line]
    assert bars[0].count("#") == 2 * bars[1].count("#")


@pytest.mark.parametrize(
    ("name", "rows", "steps"),
    [
        ("dpo_en.json", 300, {1, 2, 3}),
        ("dpo_zh.json", 300, {1, 2, 3}),
        ("alpaca_en.json", 999, {1}),
        ("c4.jsonl", 300, set()),
    ],
)
def test_real_data(name, rows, steps):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is not beside this checkout (../shared/data)")
    result = dschat("inspect", str(path), "--json", "--rows", "40")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["rows"]["usable"] == rows
    assert set(document["rows"]["dropped"].values()) == {0}
    assert {int(step) for step, found in document["steps"].items() if found["serves"]} == steps
