"""What this machine has: sizes of memory in GiB, and what nvidia-smi says of its GPUs."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache

GIB = 2**30
MIB = 2**20
# Quitting the dashboard waits for it.
_SECONDS = 10.0


class NoAnswer(RuntimeError):
    """nvidia-smi exists and failed, or did not finish."""


def has_nvidia_smi() -> bool:
    """Whether the program is on PATH."""
    return shutil.which("nvidia-smi") is not None


def query_gpus(fields: str, seconds: float = _SECONDS) -> list[list[str]]:
    """Fields of each GPU, as `nvidia-smi --query-gpu` names and writes them, without units.

    Empty on a machine without nvidia-smi.

    Args:
        fields: names with commas between.
        seconds: most that it may take.

    Raises:
        NoAnswer: it failed, or took longer.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NoAnswer(f"nvidia-smi: {error}") from error
    rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines()]
    return [row for row in rows if len(row) == fields.count(",") + 1]


@cache
def gpu_memory() -> int | None:
    """Bytes of the smallest GPU here, or None where there is none."""
    try:
        sizes = [int(row[0]) for row in query_gpus("memory.total", seconds=30) if row[0].isdigit()]
    except NoAnswer:
        return None
    return min(sizes) * MIB if sizes else None
