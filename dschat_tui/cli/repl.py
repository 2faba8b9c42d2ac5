"""`dschat chat`: reads lines, shows events; from a terminal, a pipe or another program."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

import platformdirs

from dschat_tui.chat.commands import COMMANDS, complete, respond
from dschat_tui.chat.evaluation import evaluate, write_table
from dschat_tui.chat.events import Error, Event, Note, Quit, Ready
from dschat_tui.chat.files import read_prompts
from dschat_tui.chat.loading import load_session
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
from dschat_tui.text import visible
from engine.config.placement import Engine, LoadIn, Placement

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
            line = read()
        except EOFError:
            return code
        except KeyboardInterrupt:
            if not interactive:
                return 130
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
            return 130


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

    A line that ends with a backslash goes on in the next one; three double quotes open and close
    a block of lines; pasted lines stay together.

    Args:
        history: file of the lines entered so far; None keeps none.
        prompt: what stands before the person's line.
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
    *,
    tokenizer: str | None = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    system: str = "",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    against: Sequence[str] = (),
    load_in: LoadIn | None = None,
    offload: str | None = None,
    offload_cache: bool = False,
    engine: Engine = "hf",
    prompt: str | None = None,
    as_json: bool = False,
    eval_file: str | Path | None = None,
    output: str | Path | None = None,
) -> int:
    """Talk with a model; the exit code is 0, 1 (a question failed), 2 (refused) or 130.

    Args:
        path: run folder, step folder, model folder, Hub id, embedded:NAME or a fetched model.
        tokenizer: folder or Hub id of the tokenizer, where the model has none.
        max_new_tokens: most tokens of an answer.
        temperature: 0 is greedy, the default, as in the original's chat.
        top_p: sample from the likeliest tokens with this share.
        top_k: sample from so many likeliest tokens; 0 is off.
        repetition_penalty: above 1 makes used tokens less likely.
        seed: makes sampled answers repeatable.
        system: the system message.
        dtype: auto, fp32, bf16 or fp16.
        trust_remote_code: run Python code that comes with the model.
        against: more models for /compare and an evaluation.
        load_in: quantise the weights while loading, to 8bit or 4bit.
        offload: keep the weights in host memory (cpu) or on disk (nvme:FOLDER), by ZeRO-3.
        offload_cache: keep keys and values in host memory.
        engine: hf, or deepspeed for DeepSpeed-Inference.
        prompt: ask this once and end.
        as_json: write an event a line to stdout, for another program.
        eval_file: ask these prompts of every model and show the answers as a table.
        output: write that table here, CSV if it ends so, else JSONL.
    """
    try:
        settings = Settings(max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed)
        placement = Placement(load_in, offload, offload_cache, engine)
        found = find_model(path, tokenizer)
        prompts = read_prompts(Path(eval_file)) if eval_file else []
        with _stdout_for_answers_only():
            session = load_session(
                path,
                found,
                settings,
                system,
                dtype,
                tokenizer,
                trust_remote_code,
                against,
                placement,
            )
    except (ValueError, OSError) as error:
        for reason in str(error).splitlines():
            print(f"dschat chat: {visible(reason)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    try:
        if prompts:
            return _evaluate(session, prompts, as_json, Path(output) if output else None)
        return _converse(session, path, prompt, as_json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _converse(session: Session, path: str, prompt: str | None, as_json: bool) -> int:
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    renderer: Renderer
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
    table = evaluate(session, prompts, lambda text: print(text, file=sys.stderr))
    if output:
        write_table(table, output)
        print(f"Written to {output}.", file=sys.stderr)
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
        print(f"The history of your lines is not kept: {error}", file=sys.stderr)
        return None
    return folder / "chat_history"


@contextmanager
def _stdout_for_answers_only() -> Iterator[None]:
    """Send to stderr what libraries print to stdout, native code included."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
