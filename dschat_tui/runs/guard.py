"""A small process that outlives a killed supervisor, ends its step, and records it in run.json."""

from __future__ import annotations

import os
import sys
import traceback

from dschat_tui.runs.folder import RunFolder
from dschat_tui.runs.processes import end_leftovers, note_lost_supervisor
from dschat_tui.runs.state import RUNNING, ProcessIdentity


def start_guard(run: RunFolder, supervisor: ProcessIdentity, grace_seconds: float) -> None:
    """Fork the guard of the calling process, whose identity is `supervisor`.

    Call it before this process becomes a subreaper, so that the guard is no child of it. The
    calling process holds one end of a pipe until it ends, however it ends.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child != 0:
        os.close(reading)
        os.waitpid(child, 0)
        return
    try:
        os.setsid()
        if os.fork() == 0:
            os.close(writing)
            os.read(reading, 1)
            _end_run_of(run, supervisor, grace_seconds)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        sys.stderr.flush()
        os._exit(0)


def _end_run_of(run: RunFolder, supervisor: ProcessIdentity, grace_seconds: float) -> None:
    if not run.state_file.exists():
        return
    with run.lock(wait=True):
        state = run.read_state()
        # after an orderly end, or with a new supervisor, there is nothing to do
        if state is None or state["state"] != RUNNING or state["supervisor"] != supervisor:
            return
        survivors = end_leftovers(state, grace_seconds)
        if survivors:
            print(f"processes {survivors} of the run cannot be ended", file=sys.stderr)
        note_lost_supervisor(run, state)
