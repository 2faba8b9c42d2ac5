"""Identifying the process behind a recorded pid."""

from __future__ import annotations

import os

import psutil

from dschat_tui.runs.state import ProcessIdentity

# psutil derives start times from the boot time, which shifts a little when the clock is corrected
_START_TIME_TOLERANCE_SECONDS = 1.0


def process_identity(pid: int) -> ProcessIdentity | None:
    """The identity of a living process, or None."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return {"pid": pid, "started": process.create_time()}
    except psutil.NoSuchProcess:
        return None


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
    found = process_identity(os.getpid())
    assert found is not None
    return found


def is_alive(identity: ProcessIdentity | None) -> bool:
    """Whether a process is still running, and is the same one."""
    if identity is None:
        return False
    now = process_identity(identity["pid"])
    if now is None or now["started"] is None or identity["started"] is None:
        return False
    return abs(now["started"] - identity["started"]) <= _START_TIME_TOLERANCE_SECONDS
