"""`dschat plan` against what real steps hold on the CPU: planned and measured bytes of a rank.

    python benchmarks/plan.py [--models tiny smollm2-135m] [--ranks 1 2] [--steps ppo]

All of it takes half an hour on two cores, `--models tiny --ranks 1` some four minutes.
States are weights, master copies, Adam's moments and gradients, as the engines hold them while the
optimizer steps. The peak is the growth of the process's resident memory from the moment before the
models are loaded; how much of freed memory the C library keeps differs by a fifth from one time to
the next. Every combination of ZeRO 0, 2 and 3, offload and LoRA that the rules allow.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import logging
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

import deepspeed
import torch

from dschat_tui.runs.memory_plan import resolved_dtype, shape_of
from dschat_tui.runs.models import actor_of
from engine.config.loading import load_profile
from engine.config.rules import check
from engine.config.schema import DataSource, RunConfig
from engine.config.steps import StepName
from engine.distributed import process_group
from engine.models import catalogue
from engine.planning import StepPlan, plan_memory
from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer

TRAINERS = {"sft": SFTTrainer, "reward": RewardTrainer, "ppo": PPOTrainer}
STATES = (
    "weights",
    "master weights (fp32)",
    "Adam moments (fp32)",
    "gradients",
    "gradients (fp32)",
    "copy for the way back",
    "gradient buffers",
)
# Two steps are enough: what is kept from one to the next is there in the second. So hot, no model
# ends its answers before their limit.
SHORT = (
    "sft.max_steps=2",
    "reward.max_steps=2",
    "ppo.max_steps=2",
    "ppo.temperature=5",
    "ppo.normalize_reward=false",
    "ppo.max_prompt_length=96",
    "data.eval_rows=16",
)


@dataclass(frozen=True)
class Measured:
    """What rank 0 saw.

    Attributes:
        states: bytes that engines hold in an optimizer's step.
        peak: bytes by which the process has grown at most.
        prompt: tokens of each prompt of the data.
    """

    states: int
    peak: int
    prompt: int


def plan_of(config: RunConfig, step: StepName) -> StepPlan:
    """The plan of one step on this machine's CPU."""
    plan = plan_memory(
        config,
        shape_of(actor_of(config.models)),
        dtype=resolved_dtype(config.dtype, "cpu"),
        device="cpu",
    )
    return next(planned for planned in plan.steps if planned.step == step)


def planned_states(plan: StepPlan) -> int:
    """Most bytes of states at once, as planned."""
    states = [item for item in plan.items if item.what in STATES]
    always = sum(item.host_bytes for item in states if item.phase == "always")
    updates = {item.phase: 0 for item in states if item.phase.startswith(("update", "step"))}
    for item in states:
        if item.phase in updates:
            updates[item.phase] += item.host_bytes
    return always + max(updates.values(), default=0)


def compare(config: RunConfig, step: StepName, folder: Path) -> dict[str, tuple[int, int]]:
    """Planned and measured bytes of the states, and of the peak; `folder` takes what is written."""
    folder.mkdir(parents=True, exist_ok=True)
    config = config.model_copy(deep=True)
    batch = config.ppo.rollout_batch_size if step == "ppo" else getattr(config, step).batch_size
    longest = max(config.sft.max_length, config.reward.max_length, config.ppo.max_answer_length)
    data = write_data(folder / "data.jsonl", rows=6 * batch + 40, numbers=longest)
    config.data.sources = [DataSource(path=str(data))]
    measured = measure(config, step, folder)
    config.ppo.max_prompt_length = measured.prompt or config.ppo.max_prompt_length
    plan = plan_of(config, step)
    return {
        "states": (planned_states(plan), measured.states),
        "peak": (plan.host_bytes, measured.peak),
    }


def write_data(file: Path, rows: int, numbers: int) -> Path:
    """Pairs whose answers have more than `numbers` tokens, after prompts of one length."""
    pairs = []
    for number in range(rows):
        counted = " ".join(str(number + each) for each in range(numbers))
        prompt = f"Count on from {number % 10}."
        pairs.append({"prompt": prompt, "chosen": f"Yes: {counted}", "rejected": f"No: {counted}"})
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return file


def measure(config: RunConfig, step: StepName, folder: Path) -> Measured:
    """Run a step in processes forked from this one, one a rank; what rank 0 measured.

    This process must not have computed anything before: threads do not survive a fork.

    Raises:
        RuntimeError: it failed; its log is in `folder`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log, result = folder / "output.log", folder / "measured.json"
    ranks = config.launch.num_accelerators
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            with process_group():
                measured = _measure_here(config, step, folder)
            if rank == 0:
                result.write_text(json.dumps(vars(measured)))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    ended = [os.waitpid(child, 0)[1] for child in children]
    if any(ended):
        raise RuntimeError(f"exit codes {ended}: {log.read_text()[-3000:]}")
    return Measured(**json.loads(result.read_text()))


def _measure_here(config: RunConfig, step: StepName, folder: Path) -> Measured:
    context = StepContext.create(config, folder, step)
    model = context.resolve_model(config.models.actor)
    config.models.sft = model
    if step == "ppo":
        config.models.trained_reward = model
    # What tokenising leaves behind, and libraries at their first use, are no part of the plan.
    data = context.build_data(context.load_tokenizer(model), step)
    prompt = max(map(len, data.train["prompt_ids"])) if step == "ppo" else 0
    _warm_up()
    start = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    trainer = TRAINERS[step](context)
    owner = trainer.engine
    engines = [owner]
    if step == "ppo":
        engines = [e for e in (owner.actor, owner.critic, owner.ref, owner.reward) if e is not None]
    most = [0]
    for engine in engines:
        if engine.basic_optimizer is not None:
            _watch_steps(engine.basic_optimizer, engines, most)
    trainer.train()
    return Measured(most[0], _resident("VmHWM") - start, prompt)


def _warm_up() -> None:
    """Train a small layer at each ZeRO stage, so that what libraries allocate once is there."""
    for stage in (0, 2, 3):
        model = torch.nn.Linear(16, 16)
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), fused=True),
            config={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}},
        )
        engine.backward(engine(torch.zeros(1, 16)).sum())
        engine.step()
        engine.destroy()
        del engine, model
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _watch_steps(optimizer: Any, engines: list[Any], most: list[int]) -> None:
    step = optimizer.step

    def watched(*arguments: object, **named: object) -> object:
        done = step(*arguments, **named)
        most[0] = max(most[0], held_bytes(engines))
        return done

    optimizer.step = watched


def held_bytes(engines: Iterable[Any]) -> int:
    """Bytes of all tensors that engines reach, buckets of gradients on their way left out."""
    waiting: list[Any] = []
    for engine in engines:
        waiting += [*engine.module.parameters(), engine.optimizer, engine.basic_optimizer]
    seen, sizes = set(), {}
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            # DeepSpeed hangs shards and buffers onto parameters.
            waiting += [thing.grad if thing.is_leaf else None, *vars(thing).values()]
        elif isinstance(thing, dict):
            waiting += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set)):
            waiting += thing
        elif type(thing).__module__.startswith(("deepspeed.runtime", "torch.optim")):
            waiting += [value for name, value in vars(thing).items() if name != "ipg_buckets"]
    return sum(sizes.values())


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def cells(model: str, ranks: int) -> Iterator[tuple[str, RunConfig]]:
    """Names and configurations of the combinations that no rule refuses."""
    # Ranks share the profile's batch, each its part at once.
    profile = load_profile(model)
    rows = [
        f"{step}.micro_batch_size={getattr(profile, step).batch_size // ranks}" for step in TRAINERS
    ]
    for stage, offload, lora in itertools.product((0, 2, 3), (False, True), (False, True)):
        features = [f"zero_stage={stage}", f"offload={offload}".lower()]
        features += [f"lora.rank={8 if lora else 0}", f"lora.only={lora}".lower()]
        settings = [f"{role}.{feature}" for role in ("actor", "critic") for feature in features]
        # With ZeRO-2 and offload the hybrid engine needs LoRA.
        settings.append(f"hybrid_engine.enabled={lora or not offload}".lower())
        settings.append(f"launch.num_accelerators={ranks}")
        config = load_profile(model, [*SHORT, *rows, *settings])
        if not check(config):
            on = [name for name, value in (("offload", offload), ("LoRA", lora)) if value]
            yield " ".join([f"ZeRO-{stage}", *on]), config


def main() -> None:
    """Measure the cells asked for and print them as a table, or as JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["tiny", "smollm2-135m"], help="profiles")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", nargs="+", choices=list(TRAINERS), default=["ppo"])
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    options = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    worst = {"states": 0.0, "peak": 0.0}
    for model, ranks, step in itertools.product(options.models, options.ranks, options.steps):
        if model in catalogue.MODELS and catalogue.model_path(model) is None:
            print(f"{model} is not here; fetch it: dschat models get {model}", file=sys.stderr)
            continue
        if not options.json:
            print(f"\n{model}, step {step}, {ranks} rank(s); MiB of a rank")
            print(f"{'':<20}{'states: plan':>14}{'held':>9}{'':>7}{'total: plan':>14}{'peak':>9}")
        for name, config in cells(model, ranks):
            started = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                pairs = compare(config, step, Path(folder))
            for what, (planned, found) in pairs.items():
                worst[what] = max(worst[what], abs(planned / found - 1))
            if options.json:
                cell = {"model": model, "step": step, "ranks": ranks, "cell": name}
                print(json.dumps(cell | pairs), flush=True)
                continue
            print(
                f"{name:<20}{pairs['states'][0] / 2**20:>14.1f}{_against(*pairs['states'])}"
                f"{pairs['peak'][0] / 2**20:>14.1f}{_against(*pairs['peak'])}"
                f"{time.perf_counter() - started:>7.0f} s",
                flush=True,
            )
    if not options.json:
        told = ", ".join(f"{what} {share:.1%}" for what, share in worst.items())
        print(f"\nfurthest off: {told}")


def _against(planned: int, found: int) -> str:
    return f"{found / 2**20:>9.1f}{planned / found - 1:>+7.0%}"


if __name__ == "__main__":
    main()
