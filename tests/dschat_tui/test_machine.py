"""What nvidia-smi says, asked of a program in its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from dschat_tui import machine
from dschat_tui.machine import MIB, NoAnswer, gpu_memory, query_gpus
from dschat_tui.sweep.results import device_bytes, gpu_numbers


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a program of this name on PATH that prints a text; give it another one to print."""

    def install(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        gpu_memory.cache_clear()

    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    yield install
    gpu_memory.cache_clear()


def test_rows_of_two_gpus(nvidia_smi) -> None:
    nvidia_smi("printf '0, 81559\\n1, 40960\\n'")
    assert query_gpus("index,memory.total") == [["0", "81559"], ["1", "40960"]]
    assert device_bytes(["1", "7"]) == {"1": 40960 * MIB}
    nvidia_smi("printf '81559\\n40960\\n'")
    assert gpu_memory() == 40960 * MIB
    nvidia_smi("printf '0\\n1\\n'")
    assert gpu_numbers() == ["0", "1"]


@pytest.mark.parametrize("script", ["echo broken driver >&2; exit 9", "sleep 5"])
def test_a_program_that_fails_or_hangs_is_no_gpu(nvidia_smi, script: str) -> None:
    nvidia_smi(script)
    with pytest.raises(NoAnswer, match="nvidia-smi"):
        query_gpus("index", seconds=0.2)


def test_lines_that_are_no_rows_are_left_out(nvidia_smi) -> None:
    nvidia_smi("printf 'No devices were found\\n'")
    assert query_gpus("index,memory.total") == []
    assert gpu_memory() is None
    assert gpu_numbers() == []


def test_without_the_program_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    gpu_memory.cache_clear()
    assert (query_gpus("index"), gpu_memory(), gpu_numbers()) == ([], None, [])
    gpu_memory.cache_clear()
