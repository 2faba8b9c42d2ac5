"""Tokenising in several processes, and going on after an attempt that was cut short."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
import pytest
from launched import free_environment
from transformers import dynamic_module_utils

from engine.config.schema import RunConfig
from engine.data import tokenising
from engine.data.cache import open_rows
from engine.data.encoding import FEATURES, encode_row
from engine.data.files import DataError
from engine.data.phases import build_phase
from engine.data.sources import load_source
from engine.data.templates import install_template
from engine.data.tokenising import Encoding, Part, tokenise
from engine.models.load import load_tokenizer


@pytest.fixture
def tokenizer(tiny_model):
    tokenizer = load_tokenizer(tiny_model("llama"))
    install_template(tokenizer, "human_assistant")
    return tokenizer


@pytest.fixture
def config(tmp_path):
    """Rows of two sources, some of which are cut, and some left out."""
    rows = [
        {
            "prompt": f"Question {i} " + "of many words " * (i % 4),
            "chosen": f"Answer {i} " + "and more " * (i % 3),
            "rejected": f"Answer {i} " + "and more " * (i % 3) + ("." if i % 5 else ""),
        }
        for i in range(90)
    ]
    sources = []
    for name, part in (("one", rows[:50]), ("two", rows[50:])):
        (tmp_path / f"{name}.json").write_text(json.dumps(part))
        sources.append(str(tmp_path / f"{name}.json"))
    limits = {"sft": {"max_length": 70}, "reward": {"max_length": 70}}
    data = {"sources": sources, "cache_dir": str(tmp_path / "cache")}
    return RunConfig.model_validate({"data": data, "ppo": {"max_prompt_length": 50}, **limits})


@pytest.fixture
def started(monkeypatch):
    """Chunks of 8 rows, two cores, a process for each 10 rows; the processes that were started."""
    processes = []

    class Process(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            processes.append(self)

    monkeypatch.setattr(tokenising, "ROWS_OF_A_CHUNK", 8)
    monkeypatch.setattr(tokenising, "ROWS_FOR_A_PROCESS", 10)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(tokenising.subprocess, "Popen", Process)
    return processes


def parts_of(config):
    """All rows of the second source, then every other one of the first from the end."""
    one, two = (load_source(s, config.data.cache_dir).train for s in config.data.sources)
    return [Part(two, np.arange(len(two))), Part(one, np.arange(len(one))[::-2])]


def tokenised(config, tokenizer, use, work):
    """Rows and tally of `tokenise`, and what it said."""
    notes = []
    target = work.with_suffix(".arrow")
    tally = tokenise(parts_of(config), Encoding(use, config, tokenizer), target, work, notes.append)
    return open_rows(target)[:], tally, notes


def one_by_one(config, tokenizer, use):
    """Rows and tally of `encode_row`, called for one row after another."""
    tally = Counter()
    rows = [row for part in parts_of(config) for row in part.rows.select(part.indices)]
    columns = {name: [] for name in FEATURES[use]}
    for number, row in enumerate(rows):
        for encoded in encode_row(row, use, config, tokenizer, tally):
            tally["rows"] += 1
            for name, values in columns.items():
                values.append(number if name == "row" else encoded[name])
    return columns, tally


@pytest.mark.slow
def test_several_processes_write_what_one_would(config, tokenizer, started, tmp_path):
    rows, tally, notes = tokenised(config, tokenizer, "ppo", tmp_path / "work")
    assert len(started) == 2
    assert (rows, tally) == one_by_one(config, tokenizer, "ppo")
    assert tally["dropped_long"] > 0
    assert notes[0] == "tokenising 0 %"


def test_few_rows_are_tokenised_without_another_process(
    config, tokenizer, started, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenising, "ROWS_FOR_A_PROCESS", 40)
    for phase in ("sft", "reward", "ppo"):
        rows, tally, notes = tokenised(config, tokenizer, phase, tmp_path / phase)
        assert (rows, tally) == one_by_one(config, tokenizer, phase)
        assert notes == [
            f"tokenising {percent} %" for percent in (0, 11, 22, 33, 44, 55, 66, 77, 88)
        ]
    assert started == []


def test_another_attempt_goes_on_where_the_first_was_cut_short(
    config, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(tokenising, "ROWS_OF_A_CHUNK", 8)
    encoded = []

    def encode_and_count(row, *arguments):
        encoded.append(row)
        if len(encoded) == 30:
            raise KeyboardInterrupt
        return encode_row(row, *arguments)

    monkeypatch.setattr(tokenising, "encode_row", encode_and_count)
    with pytest.raises(KeyboardInterrupt):
        tokenised(config, tokenizer, "sft", tmp_path / "work")
    rows, tally, notes = tokenised(config, tokenizer, "sft", tmp_path / "work")
    assert (rows, tally) == one_by_one(config, tokenizer, "sft")
    # Three chunks of eight rows were whole; the rest of the 65 rows was missing.
    assert len(encoded) == 30 + 65 - 24
    assert notes[0] == "tokenising 33 %"


def parts_left(config):
    return list(Path(config.data.cache_dir).glob(".*.parts"))


@pytest.mark.slow
def test_what_a_process_met_is_raised_as_it_is(config, tokenizer, started):
    tokenizer.chat_template = (
        "{% if '0 ' in messages[0]['content'] %}{{ raise_exception('no zero') }}{% endif %}x"
    )
    config.data.template = "chat_template"
    with pytest.raises(DataError, match=r"refuses a dialogue of user: no zero; set data\.template"):
        build_phase(config, tokenizer, "reward")
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)
    assert parts_left(config) == []


def test_a_process_that_dies_is_an_error(config, tokenizer, started, tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(RuntimeError, match="ended with code 3"):
        build_phase(config, tokenizer, "reward")
    assert len(parts_left(config)) == 1


_OWN_TOKENIZER = """
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    def _encode_plus(self, text, **options):
        texts = text if isinstance(text, list) else [text]
        texts = [text.replace("many", "few") for text in texts]
        return super()._encode_plus(texts if isinstance(text, list) else texts[0], **options)
"""


@pytest.mark.slow
def test_code_that_came_with_a_tokenizer_runs_in_the_processes_too(
    config, tokenizer, started, tmp_path, monkeypatch
):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folder = tmp_path / "own"
    tokenizer.save_pretrained(folder)
    (folder / "own.py").write_text(_OWN_TOKENIZER)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    settings["tokenizer_class"] = "OwnTokenizer"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    own = load_tokenizer(str(folder), trust_remote_code=True)
    rows, _, _ = tokenised(config, own, "ppo", tmp_path / "work")
    assert len(started) == 2
    assert rows == one_by_one(config, own, "ppo")[0]
    assert "of few words" in own.decode(rows["prompt_ids"][1])


_ATTEMPT = """
import pickle, sys, time
from engine.data import tokenising

tokenising.ROWS_OF_A_CHUNK = 8
tokenising.ROWS_FOR_A_PROCESS = 10
parts, encoding, target, work = pickle.loads(sys.stdin.buffer.read())
tokenising.tokenise(parts, encoding, target, work, print)
"""


@pytest.mark.slow
def test_processes_end_with_the_one_that_started_them(config, tokenizer, tmp_path):
    rows = [{"prompt": f"Question {i}", "chosen": "A " * 3000} for i in range(4000)]
    Path(config.data.sources[0].path).write_text(json.dumps(rows))
    parts = parts_of(config)
    work = tmp_path / "work"
    encoding = Encoding("sft", config, tokenizer)
    job = pickle.dumps((parts, encoding, work.with_suffix(".arrow"), work))
    command = [sys.executable, "-c", _ATTEMPT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=free_environment()) as attempt:
        try:
            attempt.stdin.write(job)
            attempt.stdin.close()
            wait_for(lambda: len(list(work.glob("*.arrow"))) >= 3)
            processes = psutil.Process(attempt.pid).children()
        finally:
            attempt.kill()
    done = len(list(work.glob("*.arrow")))
    assert len(processes) == 2
    gone, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    assert len(gone) == 2
    # Each may finish the chunk that it was at.
    assert len(list(work.glob("*.arrow"))) <= done + 2


@pytest.mark.slow
def test_two_ranks_tokenise_and_make_batches_whatever_their_collectives_allow():
    script = Path(__file__).parents[2] / "benchmarks" / "tokenising.py"
    command = [sys.executable, str(script), "--rows", "2000", "--timeout", "2"]
    output = subprocess.run(
        command, env=free_environment(), capture_output=True, text=True, timeout=200, check=True
    ).stdout
    assert "rank 0: tokenised 1,900 rows" in output
    assert "rank 1: waited for 1,900 rows" in output


def wait_for(condition, seconds=100):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
