"""The hosts of a multi_node run: what the hostfile says, and what each host has."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from engine.config.schema import LaunchConfig

CONNECT_SECONDS = 10
ANSWER_SECONDS = 60
PACKAGES = ("torch", "deepspeed", "transformers", "dschat")
# Asked of each host with the Python of this environment, which the launcher starts there too.
QUESTIONS = f"""
import json, os, platform, sys
from glob import glob
from importlib.metadata import PackageNotFoundError, version
versions = {{"Python": platform.python_version()}}
for name in {PACKAGES!r}:
    try:
        versions[name] = version(name)
    except PackageNotFoundError:
        versions[name] = "missing"
sees = len(sys.argv) < 2 or os.path.exists(sys.argv[1])
print(json.dumps([versions, len(glob("/dev/nvidia[0-9]*")), sees]))
"""
# DeepSpeed's launcher puts the folder and the interpreter into a shell's words as they are.
_SAFE_PATH = re.compile(r"[\w@%+=:,./-]+")


@dataclass(frozen=True)
class Answer:
    """What a host answered, or in `problem` why it did not, with what to do about it."""

    host: str
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    sees_folder: bool = True
    problem: str = ""
    advice: str = ""

    def differences(self) -> str:
        """The versions that are not those of this machine, in words; empty where all agree."""
        here = versions()
        return ", ".join(
            f"{name} {there} (here {here.get(name)})"
            for name, there in self.versions.items()
            if there != here.get(name)
        )


def hosts_of(text: str) -> dict[str, int]:
    """The hosts of a hostfile with their slots, in its order.

    Raises:
        ValueError: a line that is not 'host slots=N', or a host that is listed twice.
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = re.fullmatch(r"([\w.@:\[\]-]+)\s+slots=(\d+)", content)
        if match is None or match[1].startswith("-"):
            raise ValueError(f"line {number}, {content!r}, is not 'host slots=N'")
        if match[1] in hosts:
            raise ValueError(f"line {number} names {match[1]} again; each host has one line")
        hosts[match[1]] = int(match[2])
    return hosts


def versions() -> dict[str, str]:
    """The versions of this environment that ranks on several hosts must share."""
    found = {"Python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def ask(hosts: Iterable[str], seen: Path | None = None) -> list[Answer]:
    """Ask all hosts at once by ssh, without a password, for versions and devices.

    Args:
        hosts: names that ssh knows.
        seen: something in this file system that each host should have too.
    """
    names = list(hosts)
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(names)))) as pool:
        return list(pool.map(lambda name: _ask(name, seen), names))


def _ask(host: str, seen: Path | None) -> Answer:
    options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"]
    remote = [sys.executable, "-c", QUESTIONS, *([] if seen is None else [str(seen)])]
    try:
        done = subprocess.run(
            ["ssh", *options, "--", host, shlex.join(remote)],
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=ANSWER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        advice = "See what hangs there: ssh to it, and start Python"
        return Answer(host, problem=f"no answer in {ANSWER_SECONDS} s", advice=advice)
    except OSError as error:
        return Answer(host, problem=f"ssh does not start: {error}", advice="Install an ssh client")
    if done.returncode == 0:
        try:
            there, gpus, sees = json.loads(done.stdout.strip().splitlines()[-1])
            return Answer(host, {str(k): str(v) for k, v in there.items()}, int(gpus), bool(sees))
        except (ValueError, IndexError, TypeError, AttributeError):
            advice = "Let its shell print nothing where it is not interactive"
            return Answer(host, problem=f"answers {done.stdout[:200]!r}", advice=advice)
    said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
    if done.returncode == 255:
        advice = f"Make `ssh {host}` work without a password: keys, and the host's key known"
        return Answer(host, problem=said, advice=advice)
    advice = f"Install the same environment at the same path there: {sys.executable}"
    return Answer(host, problem=said, advice=advice)


def refusals(launch: LaunchConfig, run: Path) -> list[str]:
    """Why the nodes of a multi_node deployment cannot run; each host at fault is named.

    Args:
        launch: with a hostfile.
        run: folder of the run, which may be yet to come.
    """
    place = f"launch.hostfile={launch.hostfile}"
    try:
        hosts = hosts_of(Path(str(launch.hostfile)).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{place}: {error}. Give a file with lines such as 'node1 slots=8'"]
    wanted = launch.num_nodes or len(hosts)
    if not hosts or len(hosts) < wanted:
        return [
            f"{place} names {len(hosts)} hosts ({', '.join(hosts) or 'none'}), fewer than the "
            f"{launch.num_nodes or 1} of launch.num_nodes. Add hosts, or set launch.num_nodes="
            f"{max(1, len(hosts))}"
        ]
    reasons = [
        f"{place}: {host} has slots={slots}, fewer than launch.num_accelerators="
        f"{launch.num_accelerators}. Use fewer per node, or leave this host out"
        for host, slots in list(hosts.items())[:wanted]
        if slots < launch.num_accelerators
    ]
    for program in ("ssh", "pdsh"):
        if shutil.which(program) is None:
            reasons.append(
                f"launch.deployment=multi_node: there is no {program} on PATH, with which "
                f"DeepSpeed's launcher starts the nodes. Install {program}"
            )
    for what, path in (("--output", str(run)), ("the Python of this environment", sys.executable)):
        if not _SAFE_PATH.fullmatch(path):
            reasons.append(
                f"{what} {path!r}: DeepSpeed's launcher takes no such path to other nodes. Use one "
                "of letters, digits and . _ - /"
            )
    return reasons or _refused_hosts(launch, list(hosts)[:wanted], run)


def _refused_hosts(launch: LaunchConfig, hosts: list[str], run: Path) -> list[str]:
    folder = next(place for place in (run, *run.parents) if place.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        return [f"no permission to write in {folder}. Choose another --output"]
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".dschat-nodes-") as marker:
        answers = ask(hosts, Path(marker.name))
    has_gpus = any(answer.gpus for answer in answers)
    reasons = []
    for answer in answers:
        name = f"host {answer.host}"
        if answer.problem:
            reasons.append(f"{name} cannot be used: {answer.problem}. {answer.advice}")
            continue
        if differences := answer.differences():
            reasons.append(f"{name} has other versions: {differences}. Install the same everywhere")
        if has_gpus and answer.gpus < launch.num_accelerators:
            reasons.append(
                f"{name} has {answer.gpus} GPUs, fewer than launch.num_accelerators="
                f"{launch.num_accelerators}. Use fewer per node, or leave this host out"
            )
        if not answer.sees_folder:
            reasons.append(
                f"{name} does not see {folder}: the nodes of a run share its folder. Choose an "
                "--output on a file system that all have"
            )
    return reasons
