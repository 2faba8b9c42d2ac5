"""DeepSpeed's compiled operators: which of them load here."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.git_version_info import installed_ops
from torch.utils.cpp_extension import _get_build_directory

from engine.distributed import rank, rank_zero_first, world_size

_LONGEST_REASON = 300


@cache
def why_not_loaded(builder: str) -> str | None:
    """Why an operator does not load on some rank; None where it loads on all of them.

    DeepSpeed builds an operator at its first use, which takes minutes, and its own table of
    compatible operators does not look for a compiler or a CUDA toolkit. The first call for each
    operator is a collective of all ranks.

    Args:
        builder: the name of its class, such as FusedAdamBuilder.
    """
    reason = None
    with rank_zero_first():
        try:
            get_accelerator().create_op_builder(builder).load(verbose=False)
        except Exception as error:  # Compilers, linkers and drivers raise all kinds of errors.
            reason = _in_one_line(error)
    if world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * world_size()
    dist.all_gather_object(reasons, reason and f"{reason} (rank {rank()})")
    return next(filter(None, reasons), None)


def standing(builder: str) -> dict[str, str]:
    """The state of an operator, without building it.

    Args:
        builder: the name of its class, such as FusedAdamBuilder.

    Returns:
        `state`: loads, fails, unbuilt, or locked by a build that runs or was killed, which blocks
        every other build; `detail`: why it fails, or the file that locks it.
    """
    try:
        operator = get_accelerator().create_op_builder(builder)
        if installed_ops.get(operator.name):
            operator.load(verbose=False)
            return {"state": "loads", "detail": ""}
        folder = Path(_get_build_directory(operator.name, verbose=False))
        if (folder / "lock").exists():
            return {"state": "locked", "detail": str(folder / "lock")}
        built = max(folder.glob("*.so"), key=lambda file: file.stat().st_mtime, default=None)
        if built is None:
            return {"state": "unbuilt", "detail": ""}
        # Not by its builder, which would rebuild what an update has made stale.
        spec = importlib.util.spec_from_file_location(operator.name, built)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    except Exception as error:  # Linkers and drivers raise all kinds of errors.
        return {"state": "fails", "detail": _in_one_line(error)}
    return {"state": "loads", "detail": ""}


def _in_one_line(error: Exception) -> str:
    """The error's name and first line, or the line in which a compiler names its own error."""
    lines = str(error).splitlines() or [""]
    first_error = next((line for line in lines if "error: " in line), lines[0])
    return f"{type(error).__name__}: {first_error.strip()}"[:_LONGEST_REASON]
