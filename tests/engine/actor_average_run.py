"""An actor that trains a few steps, and its average against one computed from whole weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import deepspeed
import torch
from safetensors.torch import load_file
from small_run import configuration
from torch import Tensor

from engine.config.deepspeed import deepspeed_config
from engine.config.schema import LoraConfig
from engine.distributed import rank, world_size
from engine.models.load import load_causal_lm, load_tokenizer
from engine.models.lora import add_lora, lora_layers, parameter_groups
from engine.models.save import save_model
from engine.precision import dtype_name
from engine.report import Report
from engine.rlhf.actor_average import ActorAverage
from engine.trainers.engines import training_engine, zero3_loading

DECAY = 0.5
STEPS = 3


@dataclass(frozen=True)
class Case:
    """How an actor is laid out; `lora` is none, both (base and adapters train) or only."""

    stage: int
    lora: str
    offload: bool = False
    dtype: torch.dtype = torch.float32


CASES = [
    *(Case(stage, lora) for stage, lora in product(range(4), ("none", "both", "only"))),
    Case(2, "only", offload=True),
    Case(3, "both", offload=True),
    Case(1, "both", dtype=torch.bfloat16),
    Case(3, "both", dtype=torch.bfloat16),
]


def check(case: Case, path: str, folder: Path) -> None:
    """Train, save average and actor, and compare them with what they must be.

    Raises:
        AssertionError: the saved average or the actor is another, or saving changed the actor.
    """
    engine = build_actor(case, path)
    average = ActorAverage(engine, DECAY, on_host=case.offload)
    trained = {name for name, p in engine.module.named_parameters() if p.requires_grad}
    expected = {name: value.double() for name, value in _whole(engine).items()}
    for step in range(STEPS):
        engine.backward(_loss(engine, step))
        engine.step()
        average.update()
        for name, value in _whole(engine).items():
            expected[name] = DECAY * expected[name] + (1 - DECAY) * value.double()

    # Each slice is kept once: padding aside, the ranks together hold one average in fp32.
    held = torch.tensor(sum(shard.numel() for shard in average.shards))
    deepspeed.comm.all_reduce(held)
    numbers = sum(value.numel() for name, value in expected.items() if name in trained)
    assert numbers <= held <= numbers + world_size() * len(trained)
    assert {shard.dtype for shard in average.shards} == {torch.float32}

    if case.stage < 3:
        # Checkpoints of before held the whole of each average on every rank.
        kept = [shard.clone() for shard in average.shards]
        parameters = [p for p in engine.module.parameters() if p.requires_grad]
        with average.values(parameters) as values:
            whole = [value.clone() for value in values]
        for shard in average.shards:
            shard.zero_()
        average.load(whole)
        assert all(map(torch.equal, average.shards, kept))

    weights, loss = _whole(engine), _loss(engine, STEPS)
    tokenizer = load_tokenizer(path)
    save_model(engine.module, tokenizer, folder / "average", average.values)
    assert torch.equal(_loss(engine, STEPS), loss)
    assert all(torch.equal(value, weights[name]) for name, value in _whole(engine).items())
    save_model(engine.module, tokenizer, folder / "actor")
    if rank() == 0:
        saved, actor = (load_file(folder / n / "model.safetensors") for n in ("average", "actor"))
        _compare(saved, _merged(engine, expected), case.dtype)
        _compare(actor, _merged(engine, weights), case.dtype)
        moved = {name for name in saved if not torch.equal(saved[name], actor[name])}
        assert moved >= {n.replace(".base_layer.", ".") for n in trained if ".lora_" not in n}
        assert moved


def build_actor(case: Case, path: str) -> deepspeed.DeepSpeedEngine:
    """An engine that trains the model at `path`."""
    config = deepspeed_config(
        zero_stage=case.stage,
        offload=case.offload,
        dtype=dtype_name(case.dtype),
        micro_batch_size=2,
        accumulation=1,
        ranks=world_size(),
        max_gradient_norm=1.0,
    )
    with zero3_loading(config):
        model = load_causal_lm(path, case.dtype)
    if case.lora != "none":
        add_lora(model, LoraConfig(rank=2, alpha=6, only=case.lora == "only"))
    groups = parameter_groups(model, 1e-2, 0.0, 1e-2)
    report = Report(Path(path))
    engine = training_engine(model, config, groups, configuration().ppo, STEPS, report)
    if case.stage == 3 and case.lora == "none":
        # What ZeRO-3 keeps gathered between steps is stored apart from its shards.
        assert len({p.ds_persist for p in model.parameters()}) == 2
    return engine


def _loss(engine: deepspeed.DeepSpeedEngine, seed: int) -> Tensor:
    ids = torch.randint(2, 250, (2, 9), generator=torch.Generator().manual_seed(9 * seed + rank()))
    logits = engine(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    return (logits.float() - 1).square().mean()


def _whole(engine: deepspeed.DeepSpeedEngine) -> dict[str, Tensor]:
    """A copy of all parameters by name."""
    parameters = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: parameter.detach().clone() for name, parameter in parameters.items()}


def _merged(engine: deepspeed.DeepSpeedEngine, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names they have in a file, with adapters added in fp64."""
    merged = {
        name.replace(".base_layer.", "."): value.double()
        for name, value in weights.items()
        if ".lora_" not in name
    }
    for name, module in engine.module.named_modules():
        if module in lora_layers(engine.module):
            down, up = (weights[f"{name}.lora_{side}.default.weight"].double() for side in "AB")
            merged[f"{name}.weight"] += 3 * (up @ down)
    return merged


def _compare(saved: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert saved.keys() <= expected.keys()
    for name, value in saved.items():
        exact = expected[name]
        assert value.dtype == dtype
        # One rounding into the format, and fp32's own error.
        allowed = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6
        assert bool(((value.double() - exact).abs() <= allowed).all()), (name, dtype)
