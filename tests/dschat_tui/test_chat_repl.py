"""The REPL: pipes, JSON, exit codes, and a real terminal, with a scripted model."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from dschat_tui.chat.evaluation import evaluate, write_table
from dschat_tui.chat.files import read_prompts
from dschat_tui.chat.session import Relatives, Session
from dschat_tui.cli import repl
from dschat_tui.cli.chat import chat
from dschat_tui.cli.main import app
from dschat_tui.cli.render import JsonRenderer, PlainRenderer
from dschat_tui.cli.repl import _read_block, line_reader, run


class Echo:
    """A model that echoes, a word a piece, and can fail or never end."""

    name, context = "echo", 1000
    usage = SimpleNamespace(prompt_tokens=1, kept_tokens=0, new_tokens=1, finish="stop")

    def count(self, messages):
        return sum(1 + len(message["content"].split()) for message in messages)

    def stream(self, messages, **settings):
        text = messages[-1]["content"]
        if text == "fail":
            raise RuntimeError("no memory")
        if settings["temperature"] > 0:
            yield "another "
        for word in text.split(" "):
            yield word + " "
        while text == "forever":
            time.sleep(0.01)
            yield "more "


class Sft(Echo):
    """Another one."""

    name = "sft"


class Length:
    """A judge."""

    def score(self, messages):
        return float(len(messages[-1]["content"]))


def child(options: str) -> int:
    """What a child process runs: the real main, but for the models."""

    def load_session(*arguments):
        print("loading", flush=True)
        relatives = Relatives({"sft": Sft, "echo": Echo}, Length, lambda *models: 0.5)
        return Session(Echo(), arguments[2], relatives)

    repl.load_session = load_session
    given = json.loads(options)
    if "eval_file" in given:
        given["eval_file"] = Path(given["eval_file"])
    with pytest.raises(typer.Exit) as ended:
        chat("org/echo", **given)
    return ended.value.exit_code


# Ctrl-C as in a terminal, also where whoever runs the tests ignores it.
CHILD = (
    "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    f"sys.exit(runpy.run_path({__file__!r})['child'](sys.argv[1]))"
)


def talk(lines: str, as_json: bool = False) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a piped conversation."""
    out, notes = io.StringIO(), io.StringIO()
    renderer = JsonRenderer(out) if as_json else PlainRenderer(out, notes)
    reader = line_reader(io.StringIO(lines), as_json)
    code = run(Session(Echo()), reader, renderer, interactive=as_json)
    return code, out.getvalue(), notes.getvalue()


def test_a_pipe_gets_an_answer_a_question() -> None:
    code, out, _ = talk("What is this?\r\n\nclear\nAnd that\nquit\nnever asked\n")
    assert (code, out) == (0, "What is this? \nAnd that \n")


def test_a_pipe_may_end_without_quit() -> None:
    assert talk("one")[:2] == (0, "one \n")


@pytest.mark.parametrize(
    ("sent", "as_json"), [("smile \udce9\nfine\n", False), ('{"prompt": "smile \\ud83d"}\n', True)]
)
def test_half_a_character_is_replaced_and_the_talk_continues(sent, as_json) -> None:
    code, out, _ = talk(sent, as_json)
    assert code == 0
    assert "smile ?" in out
    assert as_json or out.endswith("fine \n")


def test_bytes_that_are_no_text_are_replaced_in_a_pipe() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, "{}"], input=b"caf\xe9?\nfine\nquit\n", capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().splitlines()[-1].strip() == "fine"


def test_errors_count_in_a_pipe_and_the_rest_is_still_answered() -> None:
    code, out, notes = talk("fail\n/undo\n/nothing\nfine\n")
    assert (code, out) == (1, "fine \n")
    assert "no memory" in notes
    assert "/nothing" in notes


def test_another_program_gets_events_and_sends_several_lines() -> None:
    code, out, _ = talk('{"prompt": "one\\ntwo"}\n{not json\n/stats\nfail\nquit\n', as_json=True)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    answers = [row["text"] for row in rows if row["event"] == "answer"]
    assert answers == ["one\ntwo ", "{not json "]
    assert [row["event"] for row in rows][-3:] == ["table", "error", "quit"]
    tokens = [row["text"] for row in rows if row["event"] == "token"]
    assert "".join(tokens) == "".join(answers)


def test_blocks_and_backslashes_make_one_message() -> None:
    def read(*lines: str) -> str:
        left = list(lines)
        text = _read_block(lambda more: left.pop(0))
        assert left == []
        return text

    assert read("one") == "one"
    assert read("one\\", "two\\", "three") == "one\ntwo\nthree"
    assert read('"""', "one", "", "two", '"""') == "one\n\ntwo"
    assert read('"""one', 'two"""') == "one\ntwo"
    assert read('"""one"""') == "one"


def test_bad_settings_and_paths_are_refused_before_torch(tmp_path) -> None:
    script = (
        "import sys, typer\n"
        "from dschat_tui.cli.chat import chat\n"
        "codes = []\n"
        "for options in ({}, {'temperature': 7.0}):\n"
        "    try:\n"
        "        chat(sys.argv[1], **options)\n"
        "    except typer.Exit as ended:\n"
        "        codes.append(ended.exit_code)\n"
        "print(codes, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[2, 2] False\n"
    assert "no config.json" in done.stderr
    assert "temperature is 7.0; it must be from 0.0 to 5.0" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--eval", "prompts.txt"], "no config.json"),
        (["--offload", "disk"], "give cpu or nvme:FOLDER"),
        (["--load-in", "3bit"], "'8bit', '4bit'"),
        (["--engine", "vllm"], "'hf', 'deepspeed'"),
    ],
)
def test_the_command_line_says_what_it_takes(tmp_path, arguments, told) -> None:
    result = CliRunner().invoke(app, ["chat", "--path", str(tmp_path), *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_evaluation_has_a_row_a_prompt_and_model(tmp_path, monkeypatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": [{"role": "user", "content": "two"}]}\n')
    table = evaluate(Session(Echo(), system="s"), read_prompts(prompts), lambda text: None)
    assert [(row["prompt"], row["answer"]) for row in table.rows] == [
        ("one", "one "),
        ("two", "two "),
    ]
    write_table(table, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == "prompt,model,answer"
    write_table(table, tmp_path / "out.jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1]) == table.rows[1]


def test_lists_of_prompts(tmp_path) -> None:
    for name, content in (("a.txt", "one\n\ntwo\n"), ("b.json", '["one", "two"]')):
        (tmp_path / name).write_text(content)
        assert read_prompts(tmp_path / name) == ["one", "two"]
    for name, content in (("c.txt", ""), ("d.json", "{}"), ("e.jsonl", '{"text": 1}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=name.replace(".", r"\.")):
            read_prompts(tmp_path / name)


def child_environment(home: Path) -> dict[str, str]:
    """A home of its own, so that no history of the person is touched."""
    changed = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "TERM": "xterm"}
    return {**os.environ, **changed, "PYTHONPATH": os.getcwd(), "NO_COLOR": "1"}


def pipe(lines: str, home: Path, **options: object) -> subprocess.CompletedProcess[str]:
    """A conversation with a child through pipes."""
    return subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(options)],
        input=lines,
        capture_output=True,
        text=True,
        cwd=home,
        env=child_environment(home),
        timeout=180,
        check=False,
    )


def test_stdout_of_a_child_holds_answers_alone(tmp_path) -> None:
    done = pipe("What is this?\n/score\nquit\n", tmp_path)
    assert (done.returncode, done.stdout) == (0, "What is this? \n")
    assert "loading" in done.stderr
    assert "0.5" in done.stderr


def test_one_prompt_and_an_evaluation(tmp_path) -> None:
    done = pipe("not read\n", tmp_path, prompt="one two")
    assert (done.returncode, done.stdout) == (0, "one two \n")
    rows = pipe("", tmp_path, prompt="one", as_json=True).stdout.splitlines()
    assert [json.loads(row)["event"] for row in rows] == ["ready", "token", "answer"]
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    done = pipe("", tmp_path, eval_file="prompts.txt", as_json=True)
    (row,) = done.stdout.splitlines()
    assert [each["model"] for each in json.loads(row)["rows"]] == ["sft", "echo"] * 2


def test_an_interrupt_in_a_pipe_ends_with_130_and_keeps_the_text(tmp_path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, "{}"],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env=child_environment(tmp_path),
    )
    child.stdin.write(b"forever\n")
    child.stdin.flush()
    assert child.stdout.read(8) == b"forever "
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=180)
    assert child.returncode == 130
    assert out.replace(b"more ", b"") == b"\n"


def test_an_interrupt_of_a_json_child_ends_only_the_answer(tmp_path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, '{"as_json": true}'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tmp_path,
        env=child_environment(tmp_path),
    )
    assert json.loads(child.stdout.readline())["event"] == "ready"
    child.stdin.write("forever\n")
    child.stdin.flush()
    for _ in range(3):
        assert json.loads(child.stdout.readline())["event"] == "token"
    child.send_signal(signal.SIGINT)
    row = {}
    while row.get("event") != "answer":
        row = json.loads(child.stdout.readline())
    assert row["finish"] == "interrupted"
    out, _ = child.communicate("/history\nquit\n", timeout=180)
    table = next(json.loads(line) for line in out.splitlines() if '"table"' in line)
    assert table["rows"][1]["content"] == row["text"]
    assert child.returncode == 0


class Terminal:
    """A child in a pseudo-terminal: send keys, wait for text."""

    def __init__(self, home: Path, **options: object) -> None:
        self.fd, follower = pty.openpty()
        # `setsid --ctty`: the terminal becomes the one that controls the new session
        self.process = subprocess.Popen(
            ["setsid", "--ctty", sys.executable, "-c", CHILD, json.dumps(options)],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=home,
            env=child_environment(home),
        )
        os.close(follower)
        self.unread = ""

    def send(self, keys: str) -> None:
        """Type."""
        os.write(self.fd, keys.encode())

    def expect(self, pattern: str) -> str:
        """Read until a pattern comes; return everything up to its end."""
        deadline = time.monotonic() + 180
        while not (match := re.search(pattern, self.unread)):
            ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{pattern!r} never came; there was {self.unread!r}"
            self.unread += os.read(self.fd, 4096).decode(errors="replace")
        seen, self.unread = self.unread[: match.end()], self.unread[match.end() :]
        return seen

    def end(self) -> int:
        """Wait for the child; return its exit code."""
        code = self.process.wait(180)
        os.close(self.fd)
        return code


def test_a_session_in_a_terminal(tmp_path) -> None:
    terminal = Terminal(tmp_path)
    terminal.expect("you> ")
    terminal.send("hello there\r")
    terminal.expect(r"echo> hello there \r\n")
    terminal.expect("you> ")

    terminal.send("/hist\t\r")
    terminal.expect("/history")
    terminal.expect(r"assistant +hello there")
    terminal.expect("you> ")

    terminal.send("first\\\rsecond\r")
    terminal.expect(r"\.\.\. ")
    terminal.expect(r"echo> first\r\nsecond")
    terminal.expect("you> ")

    # Ctrl-C in an answer keeps it; Ctrl-C at the prompt drops the line.
    terminal.send("forever\r")
    terminal.expect("forever more more ")
    terminal.send("\x03")
    terminal.expect("kept")
    terminal.expect("you> ")
    terminal.send("half a line")
    terminal.expect("half a line")
    time.sleep(0.5)  # Python heeds a signal at a prompt only once it waits there for a key
    terminal.send("\x03")
    terminal.expect("Ctrl-D")
    terminal.expect("you> ")
    terminal.send("/history\r")
    terminal.expect("forever more more ")
    terminal.expect("you> ")
    terminal.send("/undo\r")
    terminal.expect("Taken back: forever")
    terminal.expect("you> ")

    terminal.send("/compare\r")
    terminal.expect("sft")
    terminal.expect("you> ")
    terminal.send("/score\r")
    terminal.expect(r"0\.5")
    terminal.expect("you> ")
    terminal.send("/prefer\r")
    terminal.expect("another first")
    terminal.expect("you> ")
    terminal.send("2\r")
    terminal.expect(r"preferences\.jsonl")
    terminal.expect("you> ")

    terminal.send("/save talk.jsonl\r")
    terminal.expect("2 rounds")
    terminal.expect("you> ")
    terminal.send("clear\r")
    terminal.expect("you> ")
    terminal.send("/load ta\t\r")
    terminal.expect(r"Loaded from talk\.jsonl")
    terminal.expect("you> ")
    terminal.send("\x04")
    assert terminal.end() == 0
    pair = json.loads((tmp_path / "preferences.jsonl").read_text())
    assert pair["chosen"][0]["content"].startswith("another")

    # The next session remembers what was typed, in a file of the person's own.
    again = Terminal(tmp_path)
    again.expect("you> ")
    again.send("\x1b[A\x1b[A\x1b[A\r")
    again.expect("Appended to talk.jsonl|nothing to save")
    again.expect("you> ")
    again.send("quit\r")
    assert again.end() == 0
    (history,) = (tmp_path / "state").rglob("chat_history")
    assert history.stat().st_mode & 0o777 == 0o600


def test_a_nasty_answer_and_file_are_shown_as_text(tmp_path) -> None:
    evil = "\x1b[2J[red]x[/red]"
    rows = [{"role": "user", "content": evil}, {"role": "assistant", "content": evil}]
    (tmp_path / "evil.jsonl").write_text(json.dumps({"messages": rows}) + "\n")
    terminal = Terminal(tmp_path)
    terminal.expect("you> ")
    terminal.send("/load evil.jsonl\r")
    terminal.expect("you> ")
    terminal.send("/history\r")
    shown = terminal.expect("you> ")
    assert shown.count("␛[2J[red]x[/red]") == 2
    assert "\x1b[2J" not in shown
    terminal.send("/retry\r")
    assert "␛[2J[red]x[/red]" in terminal.expect(r"echo> .*\n")
    terminal.send("quit\r")
    assert terminal.end() == 0


def test_importing_brings_in_no_torch() -> None:
    script = f"import sys; import {repl.__name__}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
