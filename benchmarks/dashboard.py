"""The dashboard in a real pseudo-terminal, on a long log of step 3 that grows.

python benchmarks/dashboard.py [--lines 200000] [--seconds 20] [--long 2000000]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import random
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
from training_log_speed import own_ppo_lines

WIDTH, HEIGHT = 160, 50
LINES_A_SECOND = 50
KEYS = 40


class Terminal:
    """`dschat-tui PATH` on a pseudo-terminal of its own; what it writes is read and counted."""

    def __init__(self, path: Path) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dschat_tui.dashboard.app", str(path)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
        )
        os.close(slave)
        self.written = 0

    def read(self, seconds: float) -> bytes:
        """What it writes next, or nothing within a time."""
        if not select.select([self.master], [], [], seconds)[0]:
            return b""
        try:
            content = os.read(self.master, 1 << 16)
        except OSError:  # the other end was closed
            return b""
        self.written += len(content)
        return content

    def wait_for(self, text: bytes, seconds: float = 120.0) -> float:
        """Seconds from the start until a text was written.

        Raises:
            TimeoutError: it was not.
        """
        seen = b""
        while time.perf_counter() - self.started < seconds:
            seen = (seen + self.read(0.5))[-200_000:]
            if text in seen:
                return time.perf_counter() - self.started
        raise TimeoutError(f"{text!r} was not written in {seconds} s")

    def read_for(self, seconds: float) -> None:
        """Read and count for a time."""
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self.read(left)

    def key(self, key: bytes) -> float:
        """Seconds from a key to what it changes on the screen."""
        self.read_for(random.uniform(0.2, 0.4))
        started = time.perf_counter()
        os.write(self.master, key)
        self.read(2.0)
        return time.perf_counter() - started

    def cpu(self) -> float:
        """Seconds of a core that it has used so far."""
        return sum(psutil.Process(self.process.pid).cpu_times()[:2])

    def memory(self) -> float:
        """Megabytes resident."""
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def close(self) -> None:
        """Quit, and wait for the end."""
        os.write(self.master, b"q")
        while self.process.poll() is None:
            self.read(0.1)
        os.close(self.master)


def grow(path: Path, source: Iterator[str], stopped: threading.Event) -> None:
    """Append lines until told to stop, 50 a second, in blocks as a training step does."""
    with path.open("a") as file:
        while not stopped.wait(0.2):
            file.write("\n".join(islice(source, LINES_A_SECOND // 5)) + "\n")
            file.flush()


def show(name: str, value: str, bar: str) -> None:
    """One row of the table."""
    print(f"{name:<44} {value:>12}   {bar}", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--long", type=int, default=2_000_000)
    arguments = parser.parse_args()
    count, seconds = arguments.lines, arguments.seconds
    source = own_ppo_lines(random.Random(0))
    load = os.getloadavg()[0]
    print(f"{WIDTH}x{HEIGHT}, {psutil.cpu_count()} cores, load {load:.1f}")
    print(f"{'':<44} {'measured':>12}   to be met on an idle machine")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.log"
        path.write_text("\n".join(islice(source, count)) + "\n")

        terminal = Terminal(path)
        for name, text, bar in (
            ("first paint", "health", "under 0.5 s"),
            (f"{count:,} lines on the screen", f"{count} lines", "under 1.2 s"),
        ):
            waited = terminal.wait_for(text.encode())
            # on a busy machine the processor time tells more
            show(name, f"{waited:.2f} s", f"{bar}; of a core {terminal.cpu():.2f} s")

        terminal.read_for(2.0)
        times = [terminal.key(b"o") for _ in range(KEYS)]
        show("key to screen, median", f"{statistics.median(times) * 1000:.0f} ms", "under 20 ms")

        stopped = threading.Event()
        writer = threading.Thread(target=grow, args=(path, source, stopped))
        writer.start()
        cpu, written = terminal.cpu(), terminal.written
        terminal.read_for(seconds)
        used = (terminal.cpu() - cpu) / seconds
        rate = (terminal.written - written) / seconds / 1000
        stopped.set()
        writer.join()
        grows = f"while it grows {LINES_A_SECOND} lines/s"
        show(f"CPU {grows}", f"{used:.1%}", "under 8 % of a core")
        show(f"to the terminal {grows}", f"{rate:.1f} kB/s", "under 20 kB/s")
        show("resident", f"{terminal.memory():.0f} MB", "under 60 MB")
        terminal.close()

        with path.open("a") as file:
            for _ in range(max(arguments.long - count, 0) // 10_000):
                file.write("\n".join(islice(source, 10_000)) + "\n")
        terminal = Terminal(path)
        terminal.wait_for(b" lines", 300.0)
        terminal.read_for(2.0)
        memory = terminal.memory()
        show(f"resident after {arguments.long:,} lines", f"{memory:.0f} MB", "under 60 MB")
        terminal.close()


if __name__ == "__main__":
    main()
