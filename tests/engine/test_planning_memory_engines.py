"""The plan's bytes against what DeepSpeed's engines hold, and against the growth of the process.

Run as a program with a list of cases, the file builds each case's engine in forked processes of
their own, one a rank, and prints what it measured.
"""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass

import pytest

from engine.config import RunConfig
from engine.planning import ModelShape, StepPlan, plan_memory

MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1280,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
ROWS, LENGTH = 4, 96


@dataclass(frozen=True)
class Case:
    stage: int
    dtype: str = "fp32"
    offload: bool = False
    lora: bool = False
    checkpointing: bool = False
    ranks: int = 1
    accumulation: int = 1

    def config(self) -> RunConfig:
        role = {
            "zero_stage": self.stage,
            "offload": self.offload,
            "gradient_checkpointing": self.checkpointing,
            "lora": {"rank": 8 if self.lora else 0, "only": self.lora},
        }
        rows = ROWS * self.ranks * self.accumulation
        sft = {
            "batch_size": rows,
            "micro_batch_size": ROWS,
            "max_length": LENGTH,
            "eval_batch_size": 1,
        }
        launch = {"deployment": "single_node", "num_accelerators": self.ranks}
        return RunConfig.model_validate({"actor": role, "sft": sft, "launch": launch})

    def plan(self) -> StepPlan:
        shape = ModelShape.from_config(MODEL)
        return plan_memory(self.config(), shape, dtype=self.dtype, device="cpu").steps[0]


CASES = [
    Case(0),
    Case(0, "bf16"),
    Case(0, "bf16", lora=True),
    Case(0, "bf16", checkpointing=True),
    Case(1, "bf16", accumulation=2),
    Case(2, "bf16", offload=True, accumulation=2),
    Case(3),
    Case(3, "bf16", lora=True),
    Case(3, "bf16", offload=True),
    Case(2, "bf16", ranks=2),
    Case(2, "fp32", offload=True, ranks=2),
    Case(3, "bf16", ranks=2),
    Case(3, "fp32", lora=True, ranks=2),
]
STATES = (
    "weights",
    "master weights (fp32)",
    "Adam moments (fp32)",
    "gradients",
    "gradients (fp32)",
    "copy for the way back",
    "gradient buffers",
)


def planned_states(case: Case) -> int:
    items = [i for i in case.plan().items if i.what in STATES]
    return sum(i.host_bytes for i in items if i.phase in ("always", "update actor", "step actor"))


@pytest.fixture(scope="module")
def measured() -> dict[Case, dict[str, int]]:
    """Bytes of each case, all by one program: imports take long. Some three minutes of CPU."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    program = subprocess.run(
        [sys.executable, __file__, json.dumps([asdict(case) for case in CASES])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [line for line in program.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(CASES), program.stderr[-3000:]
    return {case: json.loads(line) for case, line in zip(CASES, lines, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_are_what_the_engine_holds(case, measured):
    assert planned_states(case) == pytest.approx(measured[case]["states"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_total_is_near_the_growth_of_the_process(case, measured):
    if case.stage == 3 and case.lora:
        pytest.xfail("ZeRO-3's forward pass holds more than autograd saves: plan 20 to 40 % low")
    assert case.plan().host_bytes == pytest.approx(measured[case]["growth"], rel=0.25)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _resident(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def _living_tensors() -> dict[int, int]:
    """Address and bytes of all storages that tensors use."""
    import gc

    import torch

    found = {}
    gc.collect()
    for thing in gc.get_objects():
        # Not isinstance: it would wake proxies that import on any access.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
            gradient = thing.grad if thing.is_leaf else None
            for tensor in (thing, gradient):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return found


def _measure(case: Case) -> dict[str, int]:
    import deepspeed
    import torch
    import transformers

    from engine.config.deepspeed import deepspeed_config
    from engine.models.lora import add_lora, parameter_groups
    from engine.trainers.engines import training_engine, zero3_loading

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    # A bucket of the usual size would hide all else: what is left of it is not touched.
    bucket = 500_000_000
    config = case.config()
    engine_config = deepspeed_config(
        zero_stage=case.stage,
        offload=case.offload,
        dtype=case.dtype,
        micro_batch_size=ROWS,
        accumulation=case.accumulation,
        ranks=case.ranks,
        max_gradient_norm=1.0,
    )
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    in_step = [0]

    def train(shape: dict[str, object], before: dict[int, int], steps: int) -> object:
        options = dict(shape)
        made = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
        with zero3_loading(engine_config):
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=dtype)
        model.train()
        if case.checkpointing:
            model.gradient_checkpointing_enable()
        if case.lora:
            model = add_lora(model, config.actor.lora)
        groups = parameter_groups(model, 1e-4, 0.0, 1e-4)
        engine = training_engine(model, engine_config, groups, config.sft, total_steps=10)
        inner = engine.basic_optimizer
        step = inner.step

        def watched(*arguments: object, **named: object) -> object:
            result = step(*arguments, **named)
            if shape is MODEL:
                new = [size for at, size in _living_tensors().items() if at not in before]
                # ZeRO steps its groups one by one: the first holds all gradients.
                held = sum(size for size in new if size != bucket * dtype.itemsize)
                in_step[0] = max(in_step[0], held)
            return result

        inner.step = watched
        ids = torch.randint(1, 4000 if shape is MODEL else 60, (ROWS, LENGTH))
        mask = torch.ones_like(ids)
        mask[0, :9] = 0
        from engine.algorithms.language_modeling import causal_lm_loss

        for _ in range(steps * case.accumulation):
            logits = engine(input_ids=ids, attention_mask=mask, use_cache=False).logits
            loss, _ = causal_lm_loss(logits, ids)
            del logits
            engine.backward(loss)
            del loss
            engine.step()
        return engine

    # Once with a tiny model, so that libraries and their threads are there.
    tiny = {**MODEL, "hidden_size": 24, "intermediate_size": 48, "vocab_size": 64}
    engine = train({**tiny, "num_hidden_layers": 1}, {}, steps=1)
    engine.destroy()
    del engine
    before, start = _living_tensors(), _resident("VmRSS")
    with open("/proc/self/clear_refs", "w", encoding="ascii") as reset:
        reset.write("5")
    train(MODEL, before, steps=2)
    return {"states": in_step[0], "growth": _resident("VmHWM") - start}


def _main() -> None:
    import logging

    import deepspeed
    import torch
    import transformers  # noqa: F401

    deepspeed.utils.logger.setLevel(logging.ERROR)
    for given in json.loads(sys.argv[1]):
        case, port, children = Case(**given), _free_port(), []
        reading, writing = os.pipe()
        for rank in range(case.ranks):
            child = os.fork()
            if child:
                children.append(child)
                continue
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(case.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            result = _measure(case)
            if rank == 0:
                os.write(writing, json.dumps(result).encode())
            torch.distributed.barrier()
            os._exit(0)
        os.close(writing)
        for child in children:
            os.waitpid(child, 0)
        with os.fdopen(reading) as result:
            print(result.read(), flush=True)


if __name__ == "__main__":
    _main()
