"""Lines a second that the reader of training.log takes, on ordinary logs of each step.

python benchmarks/training_log_speed.py [LINES]
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

from engine.log import documents, write
from engine.log.entries import PPOSpeed, PPOStep


def sft_lines(random: random.Random) -> Iterator[str]:
    """Throughput of each micro batch, the optimizer's line each tenth, our metrics each."""
    step = 0
    while True:
        latency = random.uniform(0.4, 0.8)
        yield write.throughput(1.429, latency, 46 / latency, 16 / latency, 16, 512)
        if step % 10 == 9:
            yield write.optimizer_step(step + 1, 0, [9.65e-6, 5e-4], [(0.9, 0.95)] * 2)
        step += 1


def ppo_step(random: random.Random, step: int) -> PPOStep:
    """What a step of PPO reports, as it goes on: the reward rises, the KL with it."""
    progress = 1 - math.exp(-step / 8000)
    generate, train = random.uniform(1.2, 1.6), random.uniform(0.9, 1.1)
    return PPOStep(
        step=step,
        epoch=0,
        ppo_epoch=1,
        speed=PPOSpeed(
            batch_size=64,
            sequence_length=512,
            answer_length_limit=256,
            tflops=random.uniform(24, 30),
            generate_tflops=7.16,
            train_tflops=115.09,
            bandwidth_gb_s=239.38,
            actor_parameters_b=1.429,
            critic_parameters_b=0.331,
        ),
        reward=3 * progress + random.gauss(0, 0.4),
        score_mean=3 * progress + random.gauss(0, 0.4),
        score_std=random.uniform(0.8, 1.2),
        reward_at_clip_share=0.0,
        kl=8 * progress + random.random(),
        entropy=3 - progress + random.gauss(0, 0.1),
        explained_variance=progress - random.random() / 5,
        answer_length=random.gauss(180, 10),
        eos_share=random.uniform(0.8, 0.95),
        empty_answers=0,
        reward_ema=3 * progress,
        kl_coef=0.1,
        actor_loss=random.gauss(0, 0.02),
        critic_loss=abs(random.gauss(0.4 - 0.3 * progress, 0.05)),
        unsupervised_loss=None,
        approx_kl=random.uniform(0.001, 0.01),
        clip_fraction=random.uniform(0.05, 0.15),
        value_clip_fraction=random.uniform(0.05, 0.15),
        first_ratio_mean=1.0,
        ratio_mean=random.gauss(1, 0.01),
        ratio_max=random.uniform(1, 3),
        actor_gradient_norm=random.uniform(0.5, 1.5),
        critic_gradient_norm=random.uniform(0.5, 1.5),
        actor_learning_rate=9.65e-6,
        critic_learning_rate=5e-6,
        tokens_per_s=random.uniform(7000, 9000),
        total_steps=300_000,
        e2e_s=generate + train + 0.3,
        generate_s=generate,
        train_s=train,
    )


def optimizer_lines(step: int) -> Iterator[str]:
    """The actor's line and the critic's, each tenth step."""
    if step % 10 == 9:
        for rate in (9.65e-6, 5e-6):
            yield write.optimizer_step(step + 1, 3, [rate, rate], [(0.9, 0.95)] * 2)


def ppo_lines(random: random.Random) -> Iterator[str]:
    """The original's: the block of each step, the hybrid engine's timer, both optimizers."""
    for step in count():
        yield from ppo_step(random, step).block()
        yield (
            "|E2E latency=3.03s |Gather latency=0.00s (0.00%) |Generate time=1.37s (45.04%) "
            "|Training time=1.44s (47.33%) |Others=0.23 (7.63%)"
            "|CurSamplesPerSec=5.27 |AvgSamplesPerSec=5.19"
        )
        yield from optimizer_lines(step)


def own_ppo_lines(random: random.Random) -> Iterator[str]:
    """Ours: without the timer, and with the metrics that the original never logged."""
    for step in count():
        yield from ppo_step(random, step).lines()
        yield from optimizer_lines(step)


def measure(name: str, lines: Callable[[random.Random], Iterator[str]], wanted: int) -> None:
    """Write a log, read it, and print the speed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "training.log"
        path.write_text("\n".join(islice(lines(random.Random(0)), wanted)) + "\n")
        start = time.perf_counter()
        document = documents.read_document(path)
        seconds = time.perf_counter() - start
    print(
        f"{name:8} {wanted:,} lines in {seconds:.2f} s: {wanted / seconds:,.0f} lines/s, "
        f"{len(document['records']):,} records"
    )


if __name__ == "__main__":
    lines_wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 200_000
    for kind, generator in (("sft", sft_lines), ("ppo", ppo_lines), ("own ppo", own_ppo_lines)):
        measure(kind, generator, lines_wanted)
