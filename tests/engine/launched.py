"""Start a worker of a test on several ranks through the real launcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def free_environment() -> dict[str, str]:
    """That of this process without a launcher's variables, for a process of its own group.

    Holds a free port as MASTER_PORT.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {name: os.environ[name] for name in os.environ if name not in _OF_A_LAUNCHER}
    tests = Path(__file__).parent
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (tests.parents[1], tests)))
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return environment | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def launch(worker: Path, *arguments: object, ranks: int = 2, timeout: int = 600) -> str:
    """Run `worker` with `deepspeed` on some ranks and wait for it.

    Returns:
        its output.

    Raises:
        AssertionError: it failed.
        subprocess.TimeoutExpired: it hangs; its processes are ended.
    """
    environment = free_environment()
    command = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", "/dev/null"]
    command += ["--num_gpus", str(ranks), "--master_port", environment["MASTER_PORT"], str(worker)]
    with subprocess.Popen(
        [*command, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
    assert process.returncode == 0, output[-6000:]
    return output
