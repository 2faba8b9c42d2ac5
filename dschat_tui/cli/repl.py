"""`dschat chat`: reads lines, shows events; from a terminal, a pipe or another program."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import TextIO

import platformdirs

from dschat_tui.chat.commands import COMMANDS, complete, respond
from dschat_tui.chat.evaluation import evaluate, write_table
from dschat_tui.chat.events import Error, Event, Note, Quit, Ready
from dschat_tui.chat.files import read_prompts
from dschat_tui.chat.loading import LoadOptions, load_session
from dschat_tui.chat.paths import find_model
from dschat_tui.chat.session import Session
from dschat_tui.chat.settings import Settings
from dschat_tui.cli.render import (
    JsonRenderer,
    PlainRenderer,
    Renderer,
    TerminalRenderer,
    format_table,
)
from dschat_tui.cli.shared import EXIT_INTERRUPTED, EXIT_REFUSED, keep_stdout_clean
from dschat_tui.text import visible

Reader = Callable[[], str]

_BLOCK = '"""'


def run(session: Session, read: Reader, renderer: Renderer, interactive: bool) -> int:
    """Read lines and show what they bring, until the input ends.

    Args:
        session: the conversation.
        read: returns the next line; EOFError at the end.
        renderer: shows events.
        interactive: Ctrl-C only ends the answer, and errors do not count.

    Returns:
        the exit code: 0, 1 if a line was refused, 130 if Ctrl-C ended it all.
    """
    code = 0
    while True:
        try:
            # Half a character, from bytes that are no UTF-8 or from JSON, is no text to tokenise.
            line = read().encode("utf-8", "replace").decode()
        except EOFError:
            return code
        except KeyboardInterrupt:
            if not interactive:
                return EXIT_INTERRUPTED
            renderer.show(Note("Ctrl-D or quit ends the conversation."))
            continue
        try:
            with _stop_on_interrupt(session):
                for event in _guarded(session, line):
                    renderer.show(event)
                    if isinstance(event, Quit):
                        return code
                    if isinstance(event, Error) and not interactive:
                        code = 1
        except KeyboardInterrupt:
            renderer.show(Note("Stopped."))
        if session.stopping and not interactive:
            return EXIT_INTERRUPTED


def _guarded(session: Session, line: str) -> Iterator[Event]:
    """Respond to a line; what was refused, or failed in the model, becomes an event."""
    try:
        yield from respond(session, line)
    except (ValueError, OSError, RuntimeError) as error:
        yield Error(str(error))


@contextmanager
def _stop_on_interrupt(session: Session) -> Iterator[None]:
    """Make the first Ctrl-C end the answer between two tokens; a second one raises."""
    session.stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        if session.stopping:
            raise KeyboardInterrupt
        session.stopping = True

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def line_reader(stream: TextIO, as_json: bool = False) -> Reader:
    """Read lines of a stream; with `as_json` also objects {"prompt": TEXT}, for several lines."""

    def read() -> str:
        line = stream.readline()
        if not line:
            raise EOFError
        line = line.rstrip("\r\n")
        if as_json and line.startswith("{"):
            try:
                prompt = json.loads(line).get("prompt")
            except json.JSONDecodeError:
                return line
            return prompt if isinstance(prompt, str) else line
        return line

    return read


def prompt_reader(prompt: str) -> Reader:
    """Return a prompt once, also one of several lines."""
    left = [prompt]

    def read() -> str:
        if not left:
            raise EOFError
        return left.pop()

    return read


def terminal_reader(history: Path | None = None, prompt: str = "you> ") -> Reader:
    """Read from the terminal with line editing, completion and a history across sessions.

    A line that ends with a backslash continues in the next one; three double quotes open and close
    a block of lines; pasted lines stay together.

    Args:
        history: file of the lines entered so far; None keeps none.
        prompt: shown before the user's line.
    """
    import readline

    def completer(text: str, state: int) -> str | None:
        line = readline.get_line_buffer()[: readline.get_endidx()]
        found = complete(line)
        if state >= len(found):
            return None
        return found[state] if found[state].endswith("/") else f"{found[state]} "

    readline.set_completer_delims(" ")
    readline.set_completer(completer)
    if "libedit" in (readline.__doc__ or ""):
        readline.parse_and_bind("bind ^I rl_complete")
    else:
        readline.parse_and_bind("tab: complete")
        readline.parse_and_bind("set enable-bracketed-paste on")
    if history is not None:
        if history.exists():
            readline.read_history_file(history)
        readline.set_history_length(1000)

    def read() -> str:
        text = _read_block(lambda more: input("... " if more else prompt))
        if history is not None:
            readline.write_history_file(history)
            history.chmod(0o600)
        return text

    return read


def _read_block(read_line: Callable[[bool], str]) -> str:
    line = read_line(False)
    if line.strip().startswith(_BLOCK):
        line = line.strip().removeprefix(_BLOCK)
        lines = [line]
        while not lines[-1].rstrip().endswith(_BLOCK):
            lines.append(read_line(True))
        lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
        return "\n".join(lines).strip("\n")
    while line.endswith("\\"):
        line = line[:-1] + "\n" + read_line(True)
    return line


def main(
    path: str,
    settings: Settings,
    options: LoadOptions,
    system: str,
    against: Sequence[str],
    prompt: str | None,
    eval_file: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Talk with a model; the exit code is 0, 1 (a question failed), 2 (refused) or 130.

    Args:
        path: run folder, step folder, model folder, Hub id, embedded:NAME or a fetched model.
        settings: how to generate.
        options: how to load the models.
        system: the system message.
        against: more models for /compare and an evaluation.
        prompt: ask this once and end.
        eval_file: ask these prompts of every model and show the answers as a table.
        output: write that table here, CSV if it ends so, else JSONL.
        as_json: write one event per line to stdout, for another program.
    """
    try:
        found = find_model(path, options.tokenizer)
        prompts = read_prompts(eval_file) if eval_file else []
        with keep_stdout_clean():
            session = load_session(path, found, settings, system, against, options, _note)
    except (ValueError, OSError) as error:
        return refuse(error)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    try:
        if prompts:
            return _evaluate(session, prompts, as_json, output)
        return _converse(session, path, prompt, as_json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def refuse(error: Exception) -> int:
    """Print each line of an error as a reason of its own; the exit code of a refusal."""
    for reason in str(error).splitlines():
        _note(f"dschat chat: {visible(reason)}")
    return EXIT_REFUSED


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _converse(session: Session, path: str, prompt: str | None, as_json: bool) -> int:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    renderer: Renderer
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    read = line_reader(sys.stdin, as_json)
    if as_json:
        renderer = JsonRenderer(sys.stdout)
    elif is_terminal and prompt is None:
        renderer = TerminalRenderer(sys.stdout, "NO_COLOR" not in os.environ)
        read = terminal_reader(_history_file())
    else:
        renderer = PlainRenderer(sys.stdout, sys.stderr)
    if prompt is not None:
        read = prompt_reader(prompt)
    renderer.show(Ready(session.generator.name, path, session.generator.context, list(COMMANDS)))
    return run(session, read, renderer, prompt is None and (as_json or is_terminal))


def _evaluate(session: Session, prompts: list[str], as_json: bool, output: Path | None) -> int:
    table = evaluate(session, prompts, _note)
    if output:
        write_table(table, output)
        _note(f"Written to {output}.")
    elif as_json:
        JsonRenderer(sys.stdout).show(table)
    else:
        print(visible(format_table(table)))
    return 0


def _history_file() -> Path | None:
    folder = platformdirs.user_state_path("dschat")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _note(f"The history of your lines is not kept: {error}")
        return None
    return folder / "chat_history"
