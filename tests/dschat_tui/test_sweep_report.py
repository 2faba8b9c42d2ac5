"""What a sweep measured: read from logs, and told in sweep.json, sweep.csv and report.md alike."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from log_entries import ppo_step
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from dschat_tui.sweep import report
from dschat_tui.sweep.results import QUANTITIES, WARMUP_STEPS, measure, tree_bytes
from dschat_tui.sweep.state import SweepFolder
from engine.log import write

HOSTILE = "=cmd|' /C calc'!A0 \x1b[31mred\x1b[0m [bold]x[/] <script>a</script> |`pipe`| \n# title"


def ppo_log(path: Path, seconds: list[float], generate: float = 0.5, samples: int = 4) -> Path:
    """A log of generation steps that take so long, half of each for generation by default."""
    lines = []
    for step, e2e in enumerate(seconds):
        times = {"e2e_s": e2e, "generate_s": e2e * generate, "train_s": e2e / 4}
        block = ppo_step(
            step=step,
            actor_loss=-0.1 * step,
            critic_loss=0.2,
            reward=float(step),
            tflops=10.0 / e2e,
            batch_size=samples,
            **times,
        ).block()
        quantities = {"reward": float(step), "tokens_per_s": 100 / times["generate_s"], **times}
        lines += [*block, write.metrics(step, quantities)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def cell(name: str, state: str = "done", reason: str = "", cause=None, **numbers) -> dict:
    stage, lora = name[1], name.endswith("true")
    return {
        "name": name,
        "values": {"zero_stage": int(stage), "lora": lora},
        "state": state,
        "reason": reason,
        "cause": cause,
        "seconds": 30.0,
        **numbers,
    }


def numbers(speed: float, host: int = 2**30) -> dict:
    return {
        "samples_per_s": speed,
        "step_s": 4 / speed,
        "generate_s": 2 / speed,
        "train_s": 1 / speed,
        "other_s": 1 / speed,
        "peak_host_bytes": host,
    }


def a_state(cells: list[dict]) -> dict:
    return {
        "version": 1,
        "profile": "tiny",
        "steps": [3],
        "axes": {"zero_stage": [2, 3], "lora": [True, False]},
        "warmup_steps": 2,
        "state": "done",
        "seconds": 99.0,
        "preparations": [],
        "cells": cells,
    }


FOUR = [
    cell("z2_lora_true", **numbers(20.0, 3 * 2**30)),
    cell("z2_lora_false", **numbers(10.0, 4 * 2**30)),
    cell("z3_lora_true", **numbers(6.0, 1 * 2**30)),
    cell("z3_lora_false", **numbers(4.0, 2 * 2**30)),
]


@pytest.fixture
def sweep(tmp_path: Path):
    """Write a state as a sweep's folder."""

    def write(state: dict, name: str = "sweep") -> SweepFolder:
        folder = SweepFolder(tmp_path / name)
        folder.path.mkdir()
        folder.write(state)
        return folder

    return write


def dschat(*arguments: str):
    return CliRunner().invoke(app, ["sweep", *arguments])


def test_the_first_steps_are_dropped_and_rates_are_totals_over_totals(tmp_path):
    slow_start = [100.0] * WARMUP_STEPS + [1.0, 3.0]
    found = measure(ppo_log(tmp_path / "training.log", slow_start), "ppo", ranks=1)
    assert found["measured_steps"] == 2
    assert found["samples_per_s"] == pytest.approx(8 / 4.0)
    assert found["step_s"] == pytest.approx(2.0)
    parts = found["generate_s"] + found["train_s"] + found["other_s"]
    assert parts == pytest.approx(found["step_s"])
    assert found["tokens_per_s"] == pytest.approx(200 / (0.5 + 1.5))
    # 10 units of work in each step
    assert found["tflops"] == pytest.approx(20 / 4.0, abs=0.01)
    assert found["reward"] == WARMUP_STEPS + 1


def test_operations_that_a_log_does_not_know_leave_the_other_quantities(tmp_path):
    step = [
        write.throughput(0.1, 0.5, math.nan, 8.0, 4, 8),
        write.metrics(0, {"loss": 1.5, "tokens_per_s": 64.0}),
    ]
    (tmp_path / "a").write_text("\n".join(step) + "\n")
    found = measure(tmp_path / "a", "sft", ranks=1)
    assert "tflops" not in found
    assert (found["samples_per_s"], found["loss"]) == (8.0, 1.5)


def test_a_log_of_fewer_steps_keeps_its_last(tmp_path):
    assert measure(ppo_log(tmp_path / "a", [5.0]), "ppo", 1)["measured_steps"] == 1
    assert measure(ppo_log(tmp_path / "b", [5.0, 1.0]), "ppo", 1)["step_s"] == pytest.approx(1.0)
    assert measure(ppo_log(tmp_path / "c", []), "ppo", 1) == {}
    assert measure(tmp_path / "absent", "ppo", 1) == {}


def test_steps_1_and_2_count_the_samples_of_all_ranks(tmp_path):
    lines = []
    for step in range(WARMUP_STEPS + 2):
        lines.append(write.throughput(0.001, 0.5, 2.0, 32.0, 16, 20))
        lines.append(write.metrics(step, {"loss": 4.0 - step, "tokens_per_s": 50.0}))
    log = tmp_path / "training.log"
    log.write_text("\n".join(lines) + "\n")
    one, two = measure(log, "sft", 1), measure(log, "sft", 2)
    assert one["samples_per_s"] == pytest.approx(32.0)
    assert two["samples_per_s"] == pytest.approx(64.0)
    assert one["train_s"] == one["step_s"] == pytest.approx(0.5)
    assert one["loss"] == 4.0 - (WARMUP_STEPS + 1)
    assert one["tokens_per_s"] == pytest.approx(50.0)
    assert "generate_s" not in one


def test_a_reward_that_is_no_number_is_a_word_in_json(tmp_path):
    log = ppo_log(tmp_path / "training.log", [1.0, 1.0, 1.0])
    text = log.read_text().replace("reward: 2", "reward: nan").replace("score: 2.0", "score: nan")
    log.write_text(text)
    assert measure(log, "ppo", 1)["reward"] == "nan"


def test_memory_is_that_of_the_whole_tree():
    alone = tree_bytes(os.getpid())
    content = "x = bytearray(80 * 2**20); print(1, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", content], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    child.stdout.readline()
    both = tree_bytes(os.getpid())
    child.communicate(b"\n")
    assert both > alone + 60 * 2**20
    assert tree_bytes(2**22 + 1) == 0


def test_the_three_files_agree(sweep):
    failed = cell("z3_lora_true", "failed", "killed: exit code -9", {"advice": "free memory"})
    folder = sweep(a_state([*FOUR[:2], failed, cell("z3_lora_false", "pruned", "a rule")]))
    assert dschat("report", str(folder.path)).exit_code == 0
    state = folder.read()
    with folder.table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    text = folder.report.read_text()
    assert [row["name"] for row in rows] == [c["name"] for c in state["cells"]]
    for row, record in zip(rows, state["cells"], strict=True):
        assert row["state"] == record["state"]
        assert row["reason"] == record["reason"]
        assert row["zero_stage"] == str(record["values"]["zero_stage"])
        assert row["lora"] == json.dumps(record["values"]["lora"])
        for quantity in QUANTITIES:
            value = record.get(quantity.key)
            assert row[quantity.key] == ("" if value is None else str(value))
        (line,) = [x for x in text.splitlines() if x.startswith(f"| `{record['name']}` |")]
        assert f"| {record['state']} |" in line
        if record["state"] == "done":
            assert f" {record['samples_per_s']:.4g} " in line
    assert "2 done, 1 failed, 1 pruned" in text
    assert "killed: exit code -9" in text
    assert "free memory" in text


def test_fastest_and_smallest():
    state = a_state(FOUR)
    assert report.fastest(state)["name"] == "z2_lora_true"
    assert report.smallest(state) == (FOUR[2], "peak_host_bytes")
    nothing = a_state([cell("z2_lora_true", "oom")])
    assert report.fastest(nothing) is None
    assert report.smallest(nothing) is None


def test_the_effect_of_an_axis_is_over_pairs_that_differ_in_it_alone():
    stage, lora = report.effects(a_state(FOUR))
    assert (stage.axis, stage.before, stage.after, stage.pairs) == ("zero_stage", 2, 3, 2)
    assert sorted(stage.changes["samples_per_s"]) == pytest.approx([-0.7, -0.6])
    # on against off, whichever the axis names first
    assert (lora.before, lora.after) == (False, True)
    assert sorted(lora.changes["samples_per_s"]) == pytest.approx([0.5, 1.0])
    assert sorted(lora.changes["peak_host_bytes"]) == pytest.approx([-0.5, -0.25])
    assert lora.changes["peak_device_bytes"] == []


def test_a_cell_without_its_pair_has_no_effect():
    partners = [*FOUR[:3], cell("z3_lora_false", "oom")]
    stage, lora = report.effects(a_state(partners))
    assert (stage.pairs, lora.pairs) == (1, 1)
    assert lora.changes["samples_per_s"] == pytest.approx([1.0])


def test_bars_are_as_long_as_steps_take():
    rows = [report.bar_text(c, 1.0, 40) for c in FOUR]
    assert [len(row) for row in rows] == [8, 16, 27, 40]
    assert rows[3].count("█") == 20
    assert "".join(sorted(rows[3], key="█▒░".index)) == rows[3]


def test_hostile_text_is_harmless_in_every_file(sweep):
    cause = {"id": "unknown", "line": HOSTILE, "advice": HOSTILE}
    folder = sweep(a_state([*FOUR[:3], cell("z3_lora_false", "failed", HOSTILE, cause)]))
    result = dschat("report", str(folder.path))
    text, table = folder.report.read_text(), folder.table.read_text()
    for told in (text, table, result.output):
        assert "\x1b" not in told
    assert "<script>" not in text
    assert "\n# title" not in text
    with folder.table.open(newline="") as file:
        assert len(list(csv.reader(file))) == 5
    lines = [line for line in text.splitlines() if line.startswith(("| `z2", "| `z3"))]
    assert len({line.count(" | ") for line in lines}) == 1


def test_the_picture_has_three_parts_a_cell(sweep):
    folder = sweep(a_state([*FOUR[:3], cell("z3_lora_false", "pruned", "a rule")]))
    report.write(folder, folder.read())
    root = ElementTree.parse(folder.picture).getroot()
    bars = [e for e in root.iter() if e.tag.endswith("rect") and e.get("height") == "15"]
    assert len(bars) == 3 * 3
    lengths = [float(bar.get("width")) for bar in bars]
    assert sum(lengths[6:]) == pytest.approx(max(sum(lengths[i : i + 3]) for i in (0, 3, 6)))
    assert folder.picture.name in folder.report.read_text()


def test_a_sweep_without_results_has_a_report_too(sweep):
    folder = sweep(a_state([cell("z2_lora_true", "pending")]))
    assert dschat("report", str(folder.path)).exit_code == 0
    assert "No cell has measured anything yet" in folder.report.read_text()
    assert not folder.picture.exists()


def test_two_sweeps_are_compared_cell_by_cell(sweep):
    first = sweep(a_state(FOUR), "first")
    faster = [{**c, **numbers(c["samples_per_s"] * 1.5)} for c in FOUR[:3]]
    second = sweep(a_state([*faster, cell("z9_lora_false", **numbers(1.0))]), "second")
    document = json.loads(dschat("compare", str(first.path), str(second.path), "--json").stdout)
    assert [pair["name"] for pair in document["pairs"]] == [c["name"] for c in FOUR[:3]]
    for pair in document["pairs"]:
        assert pair["quantities"]["samples_per_s"]["change"] == pytest.approx(0.5)
    assert document["only_first"] == ["z3_lora_false"]
    assert document["only_second"] == ["z9_lora_false"]
    text = dschat("compare", str(first.path), str(second.path)).stdout
    assert "20 → 30 (+50.0 %)" in text
    assert "only in the second: z9_lora_false" in text


def test_what_is_no_sweep_is_refused(tmp_path, sweep):
    folder = sweep(a_state(FOUR))
    result = dschat("report", str(tmp_path))
    assert result.exit_code == 2
    assert "no sweep.json" in result.stderr
    folder.state_file.write_text("[1]")
    result = dschat("compare", str(folder.path), str(folder.path))
    assert result.exit_code == 2
    assert "no list of cells" in result.stderr
