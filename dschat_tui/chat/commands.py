"""The commands of the conversation: one table from which help, completion and dispatch come."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from dschat_tui.chat.events import Error, Event, Note, Quit, Table
from dschat_tui.chat.files import append_line, read_last_conversation
from dschat_tui.chat.session import Message, Session
from dschat_tui.chat.settings import RANGES

PREFERENCES_FILE = "preferences.jsonl"
WORDS = {"quit": "/quit", "clear": "/new"}


@dataclass(frozen=True)
class Command:
    """One command: its argument as help shows it, its help, its action."""

    argument: str
    help: str
    run: Callable[[Session, str], Iterator[Event]]


def respond(session: Session, line: str) -> Iterator[Event]:
    """Answer a line of input: a command, a pick between two answers, or a question."""
    word = line.strip()
    candidates, session.candidates = session.candidates, []
    if candidates and word in ("1", "2"):
        session.candidates = candidates
        yield from _prefer(session, word)
    elif word in WORDS or word.startswith("/"):
        if word.startswith("/prefer"):
            session.candidates = candidates
        yield from _dispatch(session, WORDS.get(word, word))
    elif word:
        yield from session.ask(line)


def complete(line: str) -> list[str]:
    """Return the completions of a line of input, as whole last words."""
    name, space, rest = line.partition(" ")
    if not space:
        return [each for each in COMMANDS if each.startswith(name)] if name else []
    if name == "/set" and " " not in rest:
        return [each for each in RANGES if each.startswith(rest)]
    command = COMMANDS.get(name)
    if command and "FILE" in command.argument:
        return _complete_path(rest.rpartition(" ")[2])
    return []


def _complete_path(start: str) -> list[str]:
    folder, slash, prefix = start.rpartition("/")
    base = Path(folder + slash).expanduser()
    try:
        names = sorted(base.iterdir())
    except OSError:
        return []
    return [
        folder + slash + each.name + ("/" if each.is_dir() else "")
        for each in names
        if each.name.startswith(prefix)
    ]


def _dispatch(session: Session, line: str) -> Iterator[Event]:
    if line.startswith("//"):
        yield from session.ask(line[1:])
        return
    name, _, argument = line.partition(" ")
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "/help lists them"
        yield Error(f"There is no command {name}; {hint} (// starts a question with a slash.)")
        return
    yield from command.run(session, argument.strip())


def _help(session: Session, argument: str) -> Iterator[Event]:
    rows = [
        {"command": f"{name} {command.argument}".strip(), "does": command.help}
        for name, command in COMMANDS.items()
    ]
    yield Table("help", rows)


def _new(session: Session, argument: str) -> Iterator[Event]:
    session.clear()
    yield Note("A new conversation; settings and system message stay.")


def _retry(session: Session, argument: str) -> Iterator[Event]:
    yield from session.retry()


def _undo(session: Session, argument: str) -> Iterator[Event]:
    question = session.undo()
    yield Note(f"Taken back: {question['content']}")


def _system(session: Session, argument: str) -> Iterator[Event]:
    session.set_system(argument)
    yield Note("System message set." if argument else "No system message any more.")


def _set(session: Session, argument: str) -> Iterator[Event]:
    if not argument:
        values = asdict(session.settings)
        yield Table(
            "settings",
            [
                {
                    "name": name,
                    "value": values[name],
                    "range": f"{each.low} to {each.high}",
                    "does": each.help,
                }
                for name, each in RANGES.items()
            ],
        )
        return
    name, _, value = argument.replace("=", " ", 1).partition(" ")
    session.settings.set(name, value.strip())
    yield Note(f"{name} is {getattr(session.settings, name)} now.")


def _history(session: Session, argument: str) -> Iterator[Event]:
    yield Table("history", [dict(message) for message in session.conversation()])


def _save(session: Session, argument: str) -> Iterator[Event]:
    if not session.messages:
        raise ValueError("There is nothing to save yet; ask something first.")
    path = _path(argument, "/save FILE")
    append_line(path, {"messages": session.conversation()})
    yield Note(f"Appended to {path}: {_rounds(session.messages)}.")


def _load(session: Session, argument: str) -> Iterator[Event]:
    path = _path(argument, "/load FILE")
    session.replace(*read_last_conversation(path))
    yield Note(f"Loaded from {path}: {_rounds(session.messages)}; /history shows them.")


def _stats(session: Session, argument: str) -> Iterator[Event]:
    if not session.history:
        raise ValueError("There are no statistics before the first answer.")
    rows = [
        {
            "answer": number,
            "prompt tokens": each.prompt_tokens,
            "kept in cache": each.kept_tokens,
            "new tokens": each.new_tokens,
            "first token, ms": round(1000 * each.first_token_seconds, 1),
            "tokens/s": round(each.tokens_per_second, 1),
        }
        for number, each in enumerate(session.history, 1)
    ]
    yield Table("stats", rows)


def _quit(session: Session, argument: str) -> Iterator[Event]:
    yield Quit()


def _compare(session: Session, argument: str) -> Iterator[Event]:
    if not session.relatives.generators:
        raise ValueError(
            "There is no other model to compare with; start the chat on a run folder, or name "
            "models with --against."
        )
    if argument:
        conversation, _ = session.fit({"role": "user", "content": argument})
    elif session.messages:
        conversation = session.visible()[:-1]
    else:
        raise ValueError("Ask something first, or give the question: /compare TEXT.")
    settings = session.generation()
    rows = []
    for name, load in session.relatives.generators.items():
        generator = session.generator if name == session.generator.name else load()
        answer = session.whole_answer(generator, conversation, settings)
        rows.append({"model": name, "answer": answer, "tokens": generator.usage.new_tokens})
    yield Table("compare", rows)


def _score(session: Session, argument: str) -> Iterator[Event]:
    if not session.messages:
        raise ValueError("There is no answer to score yet; ask something first.")
    relatives = session.relatives
    if relatives.judge is None:
        raise ValueError(
            "There is no reward model for this model; start the chat on a run folder whose "
            "step 2 is done."
        )
    judge = relatives.judge()
    load_sft = relatives.generators.get("sft")
    sft = load_sft() if load_sft else None
    conversation = session.conversation()
    rows = []
    for end, message in enumerate(conversation, 1):
        if message["role"] != "assistant":
            continue
        row = {"answer": message["content"], "reward": round(judge.score(conversation[:end]), 4)}
        if sft and relatives.divergence:
            divergence = relatives.divergence(session.generator, sft, conversation[:end])
            row["KL to SFT, nats a token"] = round(divergence, 4)
        rows.append(row)
    yield Table("score", rows)


def _prefer(session: Session, argument: str) -> Iterator[Event]:
    pick, _, file = argument.partition(" ")
    if pick not in ("1", "2"):
        yield from _propose(session)
        return
    if not session.candidates:
        raise ValueError("There are no two answers to pick from; /prefer shows them.")
    chosen = session.candidates[int(pick) - 1]
    rejected = session.candidates[2 - int(pick)]
    session.candidates = []
    path = _path(file.strip() or PREFERENCES_FILE, "/prefer 1 FILE")
    append_line(
        path,
        {
            "prompt": session.conversation()[:-1],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        },
    )
    session.messages[-1] = {"role": "assistant", "content": chosen}
    yield Note(f"Appended to {path}; the conversation continues with answer {pick}.")


def _propose(session: Session) -> Iterator[Event]:
    if not session.messages:
        raise ValueError("There is no answer to prefer yet; ask something first.")
    first = session.messages[-1]["content"]
    conversation = session.visible()[:-1]
    for attempt in range(8):
        settings = session.generation(attempt + 1)
        settings["temperature"] = max(settings["temperature"], 1.0)
        other = session.whole_answer(session.generator, conversation, settings)
        if other and other != first:
            break
    else:
        raise ValueError(
            "The model gave the same answer eight times; /set temperature higher and try again."
        )
    session.candidates = [first, other]
    yield Table("prefer", [{"pick": 1, "answer": first}, {"pick": 2, "answer": other}])
    yield Note("Which is better, 1 or 2? Anything else leaves both unrated.")


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise ValueError(f"A file is missing: {usage}.")
    return Path(argument).expanduser()


def _rounds(messages: list[Message]) -> str:
    count = len(messages) // 2
    return f"{count} round" if count == 1 else f"{count} rounds"


COMMANDS = {
    "/help": Command("", "list the commands", _help),
    "/new": Command("", "start a new conversation (also: clear)", _new),
    "/retry": Command("", "answer the last question again", _retry),
    "/undo": Command("", "take the last question and answer back", _undo),
    "/system": Command("[TEXT]", "set the system message; without TEXT remove it", _system),
    "/set": Command("[NAME VALUE]", "change how answers are generated, or show it", _set),
    "/history": Command("", "show the conversation", _history),
    "/save": Command("FILE", "append the conversation to a JSONL file that SFT reads", _save),
    "/load": Command("FILE", "continue the last conversation of such a file", _load),
    "/compare": Command("[TEXT]", "the other models' answers to the last question", _compare),
    "/score": Command("", "the reward of each answer, and its KL to the SFT model", _score),
    "/prefer": Command(
        "[1|2 FILE]",
        f"two answers, pick the better; appended to {PREFERENCES_FILE}, which step 2 reads",
        _prefer,
    ),
    "/stats": Command("", "tokens and speed of each answer", _stats),
    "/quit": Command("", "end (also: quit, Ctrl-D)", _quit),
}
