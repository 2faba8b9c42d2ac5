"""A conversation in a child process: `dschat chat --json`, driven by lines, read by events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import cast

from dschat_tui import hangup
from dschat_tui.chat.events import EventRecord
from dschat_tui.runs.launch import FOREIGN_VARIABLES

# One event is a line, and an answer as long as any model's context fits into this.
LONGEST_LINE = 2**24
GRACE_SECONDS = 2.0


def chat_command(folder: str) -> list[str]:
    """What starts a conversation with a model for another program."""
    return [sys.executable, "-m", "dschat_tui.cli.main", "chat", "--path", folder, "--json"]


class Child:
    """A process of its own group that answers; it ends with `end`, or when this process does.

    Args:
        command: speaks the events of `dschat chat --json`.
        on_event: called with each event.
        on_note: called with each line that is no event, such as what is being loaded.
    """

    def __init__(
        self,
        command: Sequence[str],
        on_event: Callable[[EventRecord], None],
        on_note: Callable[[str], None],
    ) -> None:
        self.command = command
        self.on_event = on_event
        self.on_note = on_note
        self._process: asyncio.subprocess.Process | None = None
        self._unsent: list[bytes] = []
        self._ended = False

    async def run(self) -> int:
        """Start it and read until it ends; its exit code, negative for a signal.

        Raises:
            OSError: it cannot be started.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN_VARIABLES and not name.startswith("TEXTUAL")
        }
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
            limit=LONGEST_LINE,
        )
        self._process = process
        hangup.dependents.add(process.pid)
        if self._ended:
            await self.end()
        for line in self._unsent:
            self._write(line)
        assert process.stdout
        assert process.stderr
        await asyncio.gather(
            self._read(process.stdout, self._take_event), self._read(process.stderr, self.on_note)
        )
        code = await process.wait()
        hangup.dependents.discard(process.pid)
        return code

    def send(self, text: str) -> None:
        """Send what a person typed: a question of one line or several, or a command."""
        line = json.dumps({"prompt": text}).encode() + b"\n"
        if self._process is None:
            self._unsent.append(line)
        else:
            self._write(line)

    def interrupt(self) -> None:
        """End the answer that is being given; what was said so far is kept."""
        self._signal(signal.SIGINT)

    async def end(self) -> None:
        """Close its input, wait a little, end its group; return when it is gone."""
        self._ended = True
        process = self._process
        if process is None:
            return
        assert process.stdin
        process.stdin.close()
        # Otherwise an answer in progress would be finished first.
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), GRACE_SECONDS)
        except asyncio.TimeoutError:
            self._signal(signal.SIGKILL)
            await process.wait()
        hangup.dependents.discard(process.pid)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _write(self, line: bytes) -> None:
        assert self._process
        assert self._process.stdin
        if not self._process.stdin.is_closing():
            self._process.stdin.write(line)

    def _take_event(self, line: str) -> None:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            event = None
        if isinstance(event, dict) and isinstance(event.get("event"), str):
            self.on_event(cast(EventRecord, event))
        else:
            self.on_note(line)

    @staticmethod
    async def _read(stream: asyncio.StreamReader, take: Callable[[str], None]) -> None:
        while line := await stream.readline():
            take(line.decode(errors="replace").rstrip("\r\n"))
