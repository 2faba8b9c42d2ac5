"""Lines of logs for tests, and the document that a log of such lines is."""

from __future__ import annotations

from typing import Any

from engine.log.read import LogReader

STAMP = "[2023-08-20 10:00:00,123] [INFO]"
COMMAND = f"{STAMP} [runner.py:555:main] cmd = /usr/bin/python3 -u -m deepspeed.launcher.launch"
DASHES = "-" * 85
TIMER = (
    "|E2E latency={e2e}s |Gather latency=0.25s (0.00%) |Generate time=1.37s (45.04%) "
    "|Training time=1.44s (47.33%) |Others=0.23 (7.63%)"
)
RATES = "|CurSamplesPerSec=5.27 |AvgSamplesPerSec=5.19"
LOSSES = (
    "Epoch: 0 | Step: {step} | PPO Epoch: 1 | Actor Loss: -0.25 | Critic Loss: 0.5 | "
    "Unsupervised Loss: 0.0"
)
SPEED = [
    "End-to-End => Latency: 3.81s, TFLOPs: 28.43, Samples/sec: 4.20, Time/seq 0.24s, "
    "Batch Size: 16, Total Seq. Length: 512",
    "Generation => Latency: 3.06s, Per-token Latency 11.94 ms, TFLOPs: 7.16, BW: 239.38 GB/sec, "
    "Answer Seq. Length: 256",
    "Training   => Latency: 0.75s, TFLOPs: 115.09",
    "Actor Model Parameters => 1.429 B, Critic Model Parameters => 0.331 B",
]
OPTIMIZER = (
    STAMP + " [logging.py:96:log_dist] [Rank 0] step={step}, skipped={skipped}, "
    "lr=[{rate}, {rate}], mom=[(0.9, 0.95), (0.9, 0.95)]"
)


def read(*lines: str) -> dict[str, Any]:
    """The document of a log of these lines."""
    return read_bytes("".join(line + "\n" for line in lines).encode())


def read_bytes(content: bytes) -> dict[str, Any]:
    reader = LogReader()
    records: list[dict[str, Any]] = []
    *lines, rest = content.decode("utf-8", "replace").split("\n")
    for line in lines:
        records += reader.feed(line)
    records += reader.finish(rest)
    return {
        "step": reader.step,
        "state": reader.state,
        "returncode": reader.returncode,
        "cause": reader.cause,
        "records": records,
        "events": reader.events,
    }


def launched(ranks: int) -> list[str]:
    devices = list(range(ranks))
    return [
        COMMAND,
        f"{STAMP} [launch.py:145:main] WORLD INFO DICT: {{'localhost': {devices}}}",
        f"{STAMP} [launch.py:151:main] nnodes=1, num_local_procs={ranks}, node_rank=0",
        f"{STAMP} [launch.py:163:main] dist_world_size={ranks}",
    ]


def exits(*pids: int) -> list[str]:
    return [f"{STAMP} [launch.py:347:main] Process {pid} exits successfully." for pid in pids]


def failure(code: int) -> list[str]:
    command = "['/usr/bin/python3', '-u', 'main.py', '--local_rank=1']"
    return [
        f"{STAMP} [launch.py:315:sigkill_handler] Killing subprocess 41",
        f"[2023-08-20 10:00:00,123] [ERROR] [launch.py:321:sigkill_handler] {command} "
        f"exits with return code = {code}",
    ]


def kinds(document: dict[str, Any]) -> list[str]:
    return [record["kind"] for record in document["records"]]


TRACEBACK = ["Traceback (most recent call last):", '  File "main.py", line 1, in <module>']
OOM = "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0)"
