"""What this machine has for training, what it lacks, and what to do about it.

torch and DeepSpeed are asked in a child process, so that one that breaks at its import, or hangs,
is a finding as well.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, cast

import psutil

from dschat_tui.machine import GIB, NoAnswer, query_gpus
from dschat_tui.runs import hosts, launch

OK, NOTE, PROBLEM = "ok", "note", "problem"
OLDEST_PYTHON = (3, 10)
CHILD_SECONDS = 180.0
LEAST_SHARED_MEMORY = GIB
LEAST_DISK = 10 * GIB
LEAST_MEMORY = 4 * GIB
DEFAULT_PORT = 29500
# DeepSpeed's operators: the class that builds each, and what a run does where it does not load.
OPS = {
    "fused_adam": ("FusedAdamBuilder", "training takes torch's AdamW"),
    "cpu_adam": ("CPUAdamBuilder", "offload takes torch's AdamW"),
    "quantizer": ("QuantizerBuilder", "MixZ quantises in torch, which is slower"),
}
# Operators that are compiled for the host only.
WITHOUT_NVCC = ("cpu_adam",)

TORCH_QUESTIONS = """
import json, torch
found = {"version": torch.__version__, "cuda": torch.version.cuda, "devices": []}
found["available"] = torch.cuda.is_available()
for number in range(torch.cuda.device_count() if found["available"] else 0):
    about = torch.cuda.get_device_properties(number)
    free, total = torch.cuda.mem_get_info(number)
    found["devices"].append({"name": about.name, "memory": total, "free": free})
print("\\n" + json.dumps(found))
"""
# Uses the code that runs use, so that both agree.
DEEPSPEED_QUESTIONS = """
import json, deepspeed
from deepspeed.accelerator import get_accelerator
from engine.operators import standing
from engine.precision import dtype_name, resolve_dtype
accelerator = get_accelerator()
on_cpu = accelerator.device_name() == "cpu"
found = {"version": deepspeed.__version__, "accelerator": accelerator.device_name(), "dtypes": []}
for number in range(1 if on_cpu else accelerator.device_count()):
    if not on_cpu:
        accelerator.set_device(number)
    found["dtypes"].append(dtype_name(resolve_dtype("auto")))
found["ops"] = {} if on_cpu else {name: standing(builder) for name, (builder, _) in OPS.items()}
print("\\n" + json.dumps(found))
"""


class Device(TypedDict):
    """A device as torch reports it; `memory` and `free` are bytes."""

    name: str
    memory: int
    free: int


class Torch(TypedDict):
    """What torch reports of itself."""

    version: str
    cuda: str | None
    available: bool
    devices: list[Device]


class DeepSpeed(TypedDict):
    """What DeepSpeed reports of itself; `ops` is the state of each operator, with a detail."""

    version: str
    accelerator: str
    dtypes: list[str]
    ops: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Finding:
    """One finding: `state` is ok, note or problem; `advice` says what to do, if any."""

    id: str
    title: str
    state: str
    value: str
    advice: str = ""


def examine(hostfile: Path | None = None) -> list[Finding]:
    """All findings about this machine, and about the hosts of a hostfile."""
    answer, torch_finding = _ask_child("torch", TORCH_QUESTIONS)
    torch = cast("Torch | None", answer)
    answer, deepspeed_finding = _ask_child("deepspeed", f"OPS = {OPS!r}\n{DEEPSPEED_QUESTIONS}")
    deepspeed = cast("DeepSpeed | None", answer)
    compilers = _compilers(torch.get("cuda") if torch else None)
    findings = [_python(), torch_finding, *_devices(torch, deepspeed), _driver()]
    findings += [deepspeed_finding, *_launcher(), *compilers, *_ops(deepspeed, compilers)]
    findings += [_memory(), *_shared_memory(), *_disks(), *_ports()]
    if hostfile is not None:
        findings += _hosts(hostfile)
    return findings


def _python() -> Finding:
    value = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding("python", "Python", PROBLEM, value, "Install Python 3.10 or newer.")
    return Finding("python", "Python", OK, value)


def _ask_child(name: str, code: str) -> tuple[object, Finding]:
    """What a library reports in a process of its own: the last line is JSON."""
    advice = "Install dschat with its dependencies: pip install -e ."
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=CHILD_SECONDS,
            stdin=subprocess.DEVNULL,
            env=dict(os.environ, PATH=_path()),
        )
        answer = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        value = f"its import takes more than {CHILD_SECONDS:.0f} s"
        return None, Finding(name, name, PROBLEM, value, "See what holds it: the disk, or a lock.")
    except OSError as error:
        value = f"{sys.executable} cannot be started: {error.strerror}"
        return None, Finding(name, name, PROBLEM, value, advice)
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return None, Finding(name, name, PROBLEM, f"cannot be imported: {said[0][:200]}", advice)
    return answer, Finding(name, name, OK, str(answer["version"]))


def _path() -> str:
    """The PATH that the steps of a run get."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _devices(torch: Torch | None, deepspeed: DeepSpeed | None) -> list[Finding]:
    if torch is None:
        return []
    formats = [f", dtype=auto: {name}" for name in (deepspeed["dtypes"] if deepspeed else [])]
    if not torch["available"]:
        cores = launch.usable_cores()
        value = f"no GPU that torch can use; {cores} CPU cores{''.join(formats)}"
        if Path("/dev/nvidiactl").exists():
            advice = "There is an NVIDIA driver: install a torch build for CUDA that fits it."
            return [Finding("device", "device", PROBLEM, value, advice)]
        advice = "Small models train on the CPU (--profile tiny); larger ones need a GPU."
        return [Finding("device", "device", NOTE, value, advice)]
    return [
        Finding(
            f"device{number}",
            f"device {number}",
            OK,
            f"{device['name']}, {device['free'] / GIB:.1f} GiB free "
            f"of {device['memory'] / GIB:.1f}{''.join(formats[number : number + 1])}",
        )
        for number, device in enumerate(torch["devices"])
    ]


def _driver() -> Finding:
    try:
        versions = query_gpus("driver_version")
    except NoAnswer as error:
        return Finding("driver", "GPU driver", PROBLEM, str(error), "See what `nvidia-smi` prints.")
    if not versions:
        return Finding(
            "driver", "GPU driver", NOTE, "no nvidia-smi", "Needed for NVIDIA GPUs only."
        )
    return Finding("driver", "GPU driver", OK, versions[0][0])


def _launcher() -> list[Finding]:
    found = launch.find_deepspeed()
    if found is None:
        advice = "Install dschat with its dependencies: pip install -e ."
        return [Finding("launcher", "launcher", PROBLEM, "no deepspeed command", advice)]
    return [Finding("launcher", "launcher", OK, str(found))]


def _compilers(cuda: str | None) -> list[Finding]:
    findings = []
    programs = {
        "c++": ("C++ compiler", "Install g++ to build DeepSpeed's operators."),
        "ninja": ("ninja", "pip install ninja, to build DeepSpeed's operators."),
    }
    for program, (title, advice) in programs.items():
        found = shutil.which(program, path=_path())
        if found is None:
            findings.append(Finding(program, title, NOTE, "not on PATH", advice))
        else:
            version = _first_line([found, "--version"]) or ""
            findings.append(Finding(program, title, OK, f"{found} ({version})"))
    return [*findings, _nvcc(cuda)]


def _nvcc(cuda: str | None) -> Finding:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    found = shutil.which("nvcc", path=os.pathsep.join([f"{home}/bin", _path()]))
    if cuda is None:
        value = "torch is built without CUDA, so nvcc is not needed"
        return Finding("nvcc", "nvcc", OK, value)
    if found is None:
        advice = f"Install the CUDA toolkit {cuda}, to build DeepSpeed's operators for GPUs."
        return Finding("nvcc", "nvcc", NOTE, "not found", advice)
    release = re.search(r"release (\d+)\.(\d+)", _output([found, "--version"]) or "")
    version = ".".join(release.groups()) if release else "unknown"
    value = f"{found}, CUDA {version}; torch is built with {cuda}"
    if version.split(".")[0] != cuda.split(".")[0]:
        advice = f"Install the CUDA toolkit {cuda}, or set CUDA_HOME to one: majors must agree."
        return Finding("nvcc", "nvcc", PROBLEM, value, advice)
    return Finding("nvcc", "nvcc", OK, value)


def _ops(deepspeed: DeepSpeed | None, compilers: list[Finding]) -> list[Finding]:
    """Whether each operator loads, or what the first run that needs it lacks to build it."""
    if deepspeed is None:
        return []
    if deepspeed["accelerator"] == "cpu":
        return [Finding(f"op_{name}", f"op {name}", OK, "not used on a CPU") for name in OPS]
    findings = []
    for name, (_, instead) in OPS.items():
        op = deepspeed["ops"][name]
        lacking = [
            finding
            for finding in compilers
            if finding.state != OK and not (finding.id == "nvcc" and name in WITHOUT_NVCC)
        ]
        state, advice = NOTE, f"Runs work without it: {instead}."
        if op["state"] == "loads":
            state, value, advice = OK, "loads", ""
        elif op["state"] == "locked":
            state, value = PROBLEM, f"every build waits while {op['detail']} exists"
            advice = "Where no run is building it now, delete that file: its build was killed."
        elif op["state"] == "fails":
            value = f"does not load: {op['detail']}"
        elif lacking:
            value = "cannot be built: " + ", ".join(f"{f.title} {f.value}" for f in lacking)
        else:
            state, value, advice = OK, "not built yet: the first run that needs it does it", ""
        findings.append(Finding(f"op_{name}", f"op {name}", state, value, advice))
    return findings


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    value = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB available"
    if memory.available < LEAST_MEMORY:
        advice = "End what takes it, or the kernel may kill a rank."
        return Finding("memory", "host memory", PROBLEM, value, advice)
    return Finding("memory", "host memory", OK, value)


def _shared_memory() -> list[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    room = shutil.disk_usage(folder)
    value = f"{room.free / GIB:.1f} of {room.total / GIB:.1f} GiB free"
    if room.free < LEAST_SHARED_MEMORY:
        advice = "In a container: --shm-size=8g, or --ipc=host; several ranks talk through it."
        return [Finding("shared_memory", "/dev/shm", PROBLEM, value, advice)]
    return [Finding("shared_memory", "/dev/shm", OK, value)]


def _disks() -> list[Finding]:
    from engine.models.folders import cache_folder

    places = {"here": Path.cwd()}
    try:
        places["cache"] = cache_folder()
    except OSError as error:
        return [
            Finding(
                "disk_cache",
                "cache folder",
                PROBLEM,
                f"cannot be made: {error}",
                "Set XDG_CACHE_HOME to a folder that you may write in.",
            )
        ]
    findings = []
    for name, folder in places.items():
        free = shutil.disk_usage(folder).free
        value = f"{free / GIB:.1f} GiB free in {folder}"
        state, advice = OK, ""
        if not os.access(folder, os.W_OK):
            state, advice = NOTE, "You may not write here: give --output elsewhere."
        elif free < LEAST_DISK:
            state, advice = NOTE, "Models and checkpoints take space: free some."
        findings.append(Finding(f"disk_{name}", f"disk ({name})", state, value, advice))
    return findings


def _ports() -> list[Finding]:
    port = launch.free_port()
    with socket.socket() as probe:
        taken = probe.connect_ex(("127.0.0.1", DEFAULT_PORT)) == 0
    standard = "taken" if taken else "free"
    value = f"free ports are available, such as {port}; {DEFAULT_PORT} is {standard}"
    advice = "Leave launch.master_port unset: each run takes a free port." if taken else ""
    return [Finding("ports", "ports", NOTE if taken else OK, value, advice)]


def _hosts(hostfile: Path) -> list[Finding]:
    """Whether each host answers ssh without a password, and with which versions."""
    try:
        names = hosts.hosts_of(hostfile.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        advice = "Give a file with lines such as 'node1 slots=8'."
        return [Finding("hostfile", "hostfile", PROBLEM, f"{hostfile}: {error}", advice)]
    if not names:
        advice = "Give a file with lines such as 'node1 slots=8'."
        return [Finding("hostfile", "hostfile", PROBLEM, f"{hostfile} names no host", advice)]
    if shutil.which("ssh") is None:
        advice = "Install an ssh client: the launcher reaches the other hosts with it."
        return [Finding("ssh", "ssh", PROBLEM, "not on PATH", advice)]
    found = [_host(answer) for answer in hosts.ask(names)]
    if shutil.which("pdsh") is None:
        advice = "Install pdsh: the launcher starts the ranks of several nodes with it."
        found.insert(0, Finding("pdsh", "pdsh", PROBLEM, "not on PATH", advice))
    return found


def _host(answer: hosts.Answer) -> Finding:
    id, title = f"host_{answer.host}", f"host {answer.host}"
    if answer.problem:
        return Finding(id, title, PROBLEM, answer.problem, f"{answer.advice}.")
    if differences := answer.differences():
        advice = "Install the same versions on all hosts."
        return Finding(id, title, PROBLEM, differences, advice)
    versions = ", ".join(f"{name} {there}" for name, there in answer.versions.items())
    return Finding(id, title, OK, f"{versions}; {answer.gpus} GPUs")


def _output(command: list[str]) -> str | None:
    """What a program prints, or None where it is missing or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _first_line(command: list[str]) -> str | None:
    lines = (_output(command) or "").strip().splitlines()
    return lines[0] if lines else None
