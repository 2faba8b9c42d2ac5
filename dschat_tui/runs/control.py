"""Requests to a run whose supervisor another process started."""

from __future__ import annotations

import os
import signal

from dschat_tui.runs.folder import RunFolder, is_alive


class NotRunning(ValueError):
    """A run has no supervisor on this machine that could be asked."""


def ask_to_stop(run: RunFolder) -> None:
    """Ask a run's supervisor to stop: a grace, then the end; asked again, without the grace.

    Raises:
        NotRunning: its supervisor is gone, or runs on another machine.
    """
    state = run.read_state() or {}
    supervisor = state.get("supervisor")
    if supervisor is None or not is_alive(supervisor):
        raise NotRunning(f"{run.path}: no supervisor of this run is alive on this machine")
    os.kill(int(supervisor["pid"]), signal.SIGTERM)
