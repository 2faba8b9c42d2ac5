"""Hosts that are all this machine: programs to put on PATH in the place of ssh and pdsh."""

from __future__ import annotations

import sys
from pathlib import Path

# Runs here what it is asked to run on a host; `answers` are cases of hosts that behave otherwise.
_SSH = """#!/bin/sh
for last; do :; done
for word; do
  case "$word" in
{answers}
  esac
done
case "$*" in
  *" hostname -I") echo 127.0.0.1;;
  *" hostname") hostname;;
  *) exec sh -c "$last";;
esac
"""

# As the real one: all hosts at once, %n is a host's number, each line begins with a host's name.
_PDSH = """#!{python}
import os, subprocess, sys, threading

arguments = sys.argv[1:]
at = arguments.index("-w")
hosts, words = arguments[at + 1].split(","), arguments[at + 2 :]
codes = {{}}


def run(number, host):
    command = ["sh", "-c", " ".join(words).replace("%n", str(number))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        for line in process.stdout:
            os.write(1, host.encode() + b": " + line)
    codes[host] = process.returncode


if words[0].startswith("pkill"):
    sys.exit(0)
threads = [threading.Thread(target=run, args=pair) for pair in enumerate(hosts)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit(max(codes.values()))
"""


def write_programs(folder: Path, **answers: str) -> Path:
    """Write ssh and pdsh into a folder; `answers` are the shell's words for hosts by name."""
    folder.mkdir(parents=True, exist_ok=True)
    cases = "\n".join(f"    {host}) {command};;" for host, command in answers.items())
    programs = {"ssh": _SSH.format(answers=cases), "pdsh": _PDSH.format(python=sys.executable)}
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder
