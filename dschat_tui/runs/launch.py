"""How a step's processes start: argument list and environment of the `deepspeed` launcher."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from dschat_tui.runs.folder import RunFolder
from engine.config.schema import RunConfig
from engine.config.steps import Step

NO_HOSTFILE = "/dev/null"

# Variables of this environment that ranks on other nodes need.
NODE_VARIABLES = (
    "OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY",
    "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE",
)  # fmt: skip

# Left over from an outer launcher or terminal, these would mislead the launcher or its children.
FOREIGN_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "COLUMNS",
    "LINES",
)


def find_deepspeed() -> Path | None:
    """The `deepspeed` command of this Python environment, else one on PATH, else None."""
    beside = Path(sys.executable).parent / "deepspeed"
    if beside.is_file():
        return beside
    found = shutil.which("deepspeed")
    return Path(found) if found else None


def free_port() -> int:
    """A port of this host that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """The GPU numbers that CUDA_VISIBLE_DEVICES allows, or None where it does not restrict them."""
    listed = environment.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [part.strip() for part in listed.split(",") if part.strip()]
    if not Path("/dev/nvidiactl").exists() or not numbers:
        return None
    return numbers if all(number.isdigit() for number in numbers) else None


def step_command(
    config: RunConfig,
    run: RunFolder,
    step: Step,
    port: int,
    environment: Mapping[str, str] | None = None,
) -> list[str]:
    """The argument list that runs `step`; `port` is that of the rendezvous.

    Raises:
        FileNotFoundError: no `deepspeed` command.
    """
    deepspeed = find_deepspeed()
    if deepspeed is None:
        raise FileNotFoundError(
            f"no 'deepspeed' command beside {sys.executable} nor on PATH; "
            "install dschat with its dependencies into this environment"
        )
    launch = config.launch
    gpus = visible_gpus(os.environ if environment is None else environment)
    if launch.deployment == "multi_node":
        where = ["--hostfile", str(launch.hostfile), "--num_gpus", str(launch.num_accelerators)]
        where += ["--num_nodes", str(launch.num_nodes)] if launch.num_nodes else []
        # else a single host would be taken for this machine
        where.append("--force_multi")
    else:
        # without --hostfile the launcher would use an existing /job/hostfile
        where = ["--hostfile", NO_HOSTFILE]
        if gpus is not None:
            # --num_gpus makes the launcher ignore CUDA_VISIBLE_DEVICES and start on GPU 0
            where += ["--include", "localhost:" + ",".join(gpus[: launch.num_accelerators])]
        else:
            where += ["--num_gpus", str(launch.num_accelerators)]
    return [
        str(deepspeed),
        *where,
        "--master_port",
        str(port),
        "--no_local_rank",
        "--module",
        f"engine.steps.{step.name}",
        "--config",
        str(run.config_file),
        "--output",
        str(run.path),
    ]


def step_environment(config: RunConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a step's processes, made from that of the caller."""
    clean = {
        name: value
        for name, value in environment.items()
        if name not in FOREIGN_VARIABLES and not name.startswith("TEXTUAL")
    }
    threads = max(1, usable_cores() // config.launch.num_accelerators)
    clean.setdefault("OMP_NUM_THREADS", str(threads))
    # Threads that wait spin for some 0.1 ms: long enough for the gaps between two operators of a
    # step (sleeping at once costs a quarter of the speed), short enough that a run on a shared CPU
    # does not become ten times slower, as with the default.
    if "OMP_WAIT_POLICY" not in clean:
        clean.setdefault("GOMP_SPINCOUNT", "5000")
    # DeepSpeed's extensions are built with the `ninja` of this environment, activated or not
    own_programs = str(Path(sys.executable).parent)
    clean["PATH"] = os.pathsep.join([own_programs, clean.get("PATH", os.defpath)])
    clean["PYTHONUNBUFFERED"] = "1"
    return clean


def write_node_environment(folder: Path, environment: Mapping[str, str]) -> None:
    """Write the file from which DeepSpeed's launcher takes further variables for all nodes.

    By itself it passes on little more than PYTHONPATH.
    """
    lines = [f"{name}={environment[name]}\n" for name in NODE_VARIABLES if name in environment]
    (folder / ".deepspeed_env").write_text("".join(lines), encoding="utf-8")


def usable_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
