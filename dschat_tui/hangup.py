"""Ending this process when its terminal is gone, whatever its threads are doing.

Textual's driver outlives its terminal: the writer thread dies of the first failed write, the main
thread then waits for ever to hand it more, and the input thread reads end of file in a loop, at
100 % of a core. So the end must not need any of these threads. Runs are not touched: each belongs
to its supervisor.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
import time

EXIT_HUNG_UP = 128 + signal.SIGHUP
# switches off every mode that Textual's driver sets: kitty keys, bracketed paste, reports of the
# mouse, of focus and of the size; then line wrap, the main screen and the cursor
RESET = (
    "\x1b[<u\x1b[?2004l\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?1016l\x1b[?1004l\x1b[?2048l"
    "\x1b[?7h\x1b[?1049l\x1b[?25h"
)

# process groups that end with this process; whoever adds one removes it when it has ended
dependents: set[int] = set()
_modes: list[int | list[bytes | int]] | None = None
_watcher: threading.Thread | None = None


def watch_terminal() -> None:
    """From now on end this process as soon as the terminal of its stdin hangs up.

    Call it before anything changes the modes of the terminal. A signal alone is not enough: a shell
    may ignore SIGHUP, or not pass it on.
    """
    global _modes, _watcher
    if _watcher is not None:
        return
    with contextlib.suppress(termios.error):  # it is gone already, as the thread will find
        _modes = termios.tcgetattr(0)
    _watcher = threading.Thread(target=_wait_for_hangup, name="hang-up", daemon=True)
    _watcher.start()


def end_after(seconds: float, code: int) -> None:
    """End this process after some seconds, unless it has ended by then."""
    timer = threading.Timer(seconds, end, [code])
    timer.daemon = True
    timer.start()


def end(code: int) -> None:
    """End this process and its dependents now; restore the terminal if it still exists."""
    for group in list(dependents):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    # fails on a terminal that is gone, where there is nothing to restore
    with contextlib.suppress(OSError, termios.error):
        if _modes is not None:
            termios.tcsetattr(0, termios.TCSANOW, _modes)
        # opened again: O_NONBLOCK would affect everyone who shares an open file, and without it a
        # connection that accepts nothing would block this process
        terminal = os.open(os.ttyname(0), os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.write(terminal, RESET.encode())
    os._exit(code)


def _wait_for_hangup() -> None:
    poll = select.poll()
    poll.register(0, 0)  # a hang-up is reported without asking for it
    while not any(events & select.POLLHUP for _, events in poll.poll(250)):
        time.sleep(0.05)  # in case a system reports another event here, repeatedly
    end(EXIT_HUNG_UP)
