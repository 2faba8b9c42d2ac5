"""Lines a second that the reader of training.log takes, on ordinary logs of each step.

python benchmarks/training_log_speed.py [LINES]
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from engine.log import documents, write


def sft_lines(random: random.Random) -> Iterator[str]:
    """Throughput of each micro batch, the optimizer's line each tenth, our metrics each."""
    step = 0
    while True:
        latency = random.uniform(0.4, 0.8)
        yield write.throughput(1.429, latency, 46 / latency, 16 / latency, 16, 512)
        if step % 10 == 9:
            yield write.optimizer_step(step + 1, 0, [9.65e-6, 5e-4], [(0.9, 0.95)] * 2)
        step += 1


def ppo_lines(random: random.Random) -> Iterator[str]:
    """The block of each step, the hybrid engine's timer, both optimizers each tenth step."""
    step = 0
    while True:
        yield from write.PPOStep(
            epoch=0,
            step=step,
            ppo_epoch=1,
            actor_loss=random.gauss(0, 0.1),
            critic_loss=random.random(),
            unsupervised_loss=0.0,
            reward=random.gauss(2, 1),
            reward_ema=random.gauss(2, 0.1),
            e2e_s=3.81,
            generate_s=3.06,
            train_s=0.75,
            tflops=28.43,
            generate_tflops=7.16,
            train_tflops=115.09,
            batch_size=16,
            sequence_length=512,
            answer_length_limit=256,
            bandwidth_gb_s=239.38,
            actor_parameters_b=1.429,
            critic_parameters_b=0.331,
        ).lines()
        yield (
            "|E2E latency=3.03s |Gather latency=0.00s (0.00%) |Generate time=1.37s (45.04%) "
            "|Training time=1.44s (47.33%) |Others=0.23 (7.63%)"
            "|CurSamplesPerSec=5.27 |AvgSamplesPerSec=5.19"
        )
        if step % 10 == 9:
            for rate in (9.65e-6, 5e-6):
                yield write.optimizer_step(step + 1, 3, [rate, rate], [(0.9, 0.95)] * 2)
        step += 1


def own_ppo_lines(random: random.Random) -> Iterator[str]:
    """The same without the timer, and with the metrics that the original never logged."""
    names = (
        "kl", "entropy", "clip_fraction", "ratio_mean", "ratio_max", "explained_variance",
        "answer_length", "eos_share", "score_mean", "score_std", "actor_gradient_norm",
        "critic_gradient_norm", "actor_learning_rate", "critic_learning_rate", "kl_coef",
    )  # fmt: skip
    for step, line in enumerate(ppo_lines(random)):
        if line.startswith("|"):
            yield write.metrics(step, {name: random.random() for name in names})
        else:
            yield line


def measure(name: str, lines: Callable[[random.Random], Iterator[str]], count: int) -> None:
    """Write a log, read it, and print the speed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.log"
        path.write_text("\n".join(islice(lines(random.Random(0)), count)) + "\n")
        start = time.perf_counter()
        document = documents.read_document(path)
        seconds = time.perf_counter() - start
    print(
        f"{name:8} {count:,} lines in {seconds:.2f} s: {count / seconds:,.0f} lines/s, "
        f"{len(document['records']):,} records"
    )


if __name__ == "__main__":
    lines_wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    for kind, generator in (("sft", sft_lines), ("ppo", ppo_lines), ("own ppo", own_ppo_lines)):
        measure(kind, generator, lines_wanted)
