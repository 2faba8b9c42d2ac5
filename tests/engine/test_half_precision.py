"""fp16 and bf16 learn as fp32 does: in every step, at every ZeRO stage, under every wrapper."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from matrix_run import options, small_model
from torch import Tensor, nn

from engine.config.deepspeed import deepspeed_config
from engine.config.schema import SftConfig
from engine.config.steps import BY_NAME
from engine.log.read import LogReader
from engine.report import Report
from engine.rlhf.experience import Experience
from engine.rlhf.trainer import PPOTrainer, UpdateStats
from engine.trainers.context import StepContext
from engine.trainers.dpo import DPOTrainer
from engine.trainers.engines import backward, engine_step, training_engine
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer
from engine.trainers.watchdog import Watchdog

ROWS, STEPS = 4, 6
TRAINERS = {"sft": SFTTrainer, "reward": RewardTrainer, "dpo": DPOTrainer, "ppo": PPOTrainer}


@pytest.fixture(autouse=True)
def fp16(monkeypatch):
    """Let DeepSpeed try fp16 on a CPU without instructions for it: slow, but torch can."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return small_model("llama", tmp_path_factory.mktemp("model"))


@dataclass(frozen=True)
class Cell:
    """One way to train a few layers; eps=1 makes Adam's steps proportional to the gradients."""

    dtype: str
    stage: int
    wrapper: str
    eps: float = 1e-8
    accumulation: int = 1
    clip: float = 100.0
    window: int = 100

    @property
    def name(self) -> str:
        """Short, for the name of a test."""
        changes = f"eps{self.eps:g}-accumulation{self.accumulation}-clip{self.clip:g}"
        return f"{self.dtype}-{self.stage}-{self.wrapper}-{changes}-window{self.window}"


ZERO = tuple((stage, f"DeepSpeedZeroOptimizer{'_Stage3' * (stage == 3)}") for stage in (1, 2, 3))
WRAPPERS = ((0, "FP16_Optimizer"), (0, "FP16_UnfusedOptimizer"), *ZERO)
CELLS = [
    *(Cell("fp32", *wrapper) for wrapper in ((0, "AdamW"), *ZERO)),
    *(Cell("bf16", *wrapper) for wrapper in WRAPPERS),
    *(Cell("fp16", *wrapper) for wrapper in WRAPPERS),
    *(Cell("fp16", *wrapper, eps=1.0, clip=0.5) for wrapper in WRAPPERS),
    *(Cell("fp16", *wrapper, eps=1.0, accumulation=2) for wrapper in WRAPPERS),
    # The loss scale grows at every step but the first.
    *(Cell("fp16", *wrapper, eps=1.0, window=1) for wrapper in WRAPPERS),
]


def layers() -> nn.Module:
    """A small network whose weights bf16 and fp16 hold exactly."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    return network.bfloat16().float()


def rows() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS, ROWS, 16, generator=generator).bfloat16().float()
    return list(zip(inputs, torch.randn(STEPS, ROWS, 8, generator=generator), strict=True))


def loss_sum(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return (model(inputs).float() - targets).square().sum()


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Weight decay for matrices alone."""
    return [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decayed], "lr": 1e-2}
        | {"weight_decay": 0.1 if decayed else 0.0}
        for decayed in (True, False)
    ]


def with_torch_alone(cell: Cell) -> tuple[list[float], Tensor]:
    """Gradient norms and how the weights move in fp32 without DeepSpeed."""
    model = layers()
    optimizer = torch.optim.AdamW(groups(model), betas=(0.9, 0.95), eps=cell.eps)
    norms = []
    for inputs, targets in rows():
        (loss_sum(model, inputs, targets) / ROWS).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), cell.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, flat(model.parameters()) - flat(layers().parameters())


def flat(tensors) -> Tensor:
    return torch.cat([tensor.detach().float().flatten().clone() for tensor in tensors])


def held(engine: DeepSpeedEngine) -> Tensor:
    """The weights that train, as the engine computes with them."""
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    return flat(getattr(p, "ds_tensor", p.data) for p in trained)


def distance(moved: Tensor) -> float:
    """How far a weight moved on average."""
    return float(moved.abs().mean())


def engine_of(cell: Cell, patch: pytest.MonkeyPatch, tmp_path: Path) -> DeepSpeedEngine:
    # DeepSpeed picks the wrapper of stage 0 by this class, which needs a compiler to be made.
    if cell.wrapper == "FP16_Optimizer":
        patch.setattr("deepspeed.runtime.engine.FusedAdam", torch.optim.AdamW)
    config = deepspeed_config(
        zero_stage=cell.stage,
        offload=False,
        dtype=cell.dtype,
        micro_batch_size=ROWS // cell.accumulation,
        accumulation=cell.accumulation,
        ranks=1,
        max_gradient_norm=cell.clip,
    )
    if cell.dtype == "fp16":
        # These gradients would overflow at the scale that DeepSpeed begins with.
        config["fp16"] |= {"initial_scale_power": 8, "loss_scale_window": cell.window}
    model = layers()
    options = SftConfig(adam_betas=(0.9, 0.95), warmup_steps=0, scheduler="constant")
    report = Report(tmp_path)
    engine = training_engine(model, config, groups(model), options, STEPS, report, eps=cell.eps)
    assert type(engine.optimizer).__name__ == cell.wrapper
    return engine


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_an_engine_moves_weights_as_torch_does_in_fp32(cell, group, monkeypatch, tmp_path):
    engine = engine_of(cell, monkeypatch, tmp_path)
    start, norms, dtype = held(engine), [], next(engine.module.parameters()).dtype
    for inputs, targets in rows():
        cuts = inputs.chunk(cell.accumulation), targets.chunk(cell.accumulation)
        for part in zip(*cuts, strict=True):
            backward(engine, loss_sum(engine, part[0].to(dtype), part[1]), ROWS)
            norm = engine_step(engine)
        norms.append(norm)
    moved = held(engine) - start
    expected_norms, expected = with_torch_alone(cell)
    assert engine.skipped_steps == 0
    assert norms == pytest.approx(expected_norms, rel=0.01)
    assert distance(moved) == pytest.approx(distance(expected), rel=0.01)
    assert (moved - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("wrapper", ["FP16_Optimizer", "FP16_UnfusedOptimizer"])
def test_a_loss_scale_at_its_floor_ends_training_at_stage_0(wrapper, group, monkeypatch, tmp_path):
    engine = engine_of(Cell("fp16", 0, wrapper), monkeypatch, tmp_path)
    engine.optimizer.loss_scale = 4.0
    watchdog = Watchdog(None, {"actor": engine})
    start = held(engine)
    inputs, targets = rows()[0]
    for step in range(5):
        backward(engine, 1e9 * loss_sum(engine, inputs.half(), targets), ROWS)
        assert engine_step(engine) == math.inf
        assert engine.optimizer.loss_scale == (2, 1, 1, 1, 1)[step]
        # At the floor, which the second step reaches, for three steps in a row.
        ends = step == 3
        with pytest.raises(FloatingPointError, match="floor") if ends else nullcontext():
            watchdog.check(step, {"gradient_norm": math.inf})
    assert torch.equal(held(engine), start)


@pytest.mark.parametrize("wrapper", [*WRAPPERS], ids=str)
def test_overflows_are_in_the_log_in_words_that_the_dashboard_counts(
    wrapper, group, monkeypatch, tmp_path, capsys
):
    engine = engine_of(Cell("fp16", *wrapper), monkeypatch, tmp_path)
    # The logger keeps the stdout of the process, which is not the one captured here.
    monkeypatch.setattr(logger.handlers[0], "stream", sys.stdout)
    inputs, targets = rows()[0]
    for factor in (1e9, 1.0, 1e9):
        backward(engine, factor * loss_sum(engine, inputs.half(), targets), ROWS)
        engine_step(engine)
    reader = LogReader()
    for line in capsys.readouterr().out.splitlines():
        reader.feed(line)
    assert engine.skipped_steps == reader.events["overflow"] == 2


@dataclass(frozen=True)
class Trained:
    """What some optimizer steps did to each engine of a step."""

    gradient_norms: list[float]
    moved: list[Tensor]
    experience: Experience | None


def train(step: str, folder: Path, model: str, experience: Experience | None, *changes: str):
    """Six optimizer steps; those of PPO on the answers of `experience`, or on new ones."""
    config = options(
        model,
        f"models.reward={model}",
        "data.eval_rows=4",
        f"alignment={'dpo' if step == 'dpo' else 'ppo'}",
        f"{step}.max_steps={STEPS}",
        f"{step}.micro_batch_size=2",
        "ppo.inner_epochs=6",
        *changes,
    )
    trainer = TRAINERS[step](StepContext.create(config, folder, step))
    if step != "ppo":
        start = held(trainer.engine)
        trainer.train()
        lines = (folder / BY_NAME[step].folder / "metrics.jsonl").read_text().splitlines()
        norms = [row["gradient_norm"] for row in map(json.loads, lines) if "gradient_norm" in row]
        return Trained(norms, [held(trainer.engine) - start], None)
    engines = trainer.engine.actor, trainer.engine.critic
    starts, norms = [held(engine) for engine in engines], []
    if experience is None:
        prompts = trainer.prompt_batches(trainer.batches.epoch(0)[0])
        experience = trainer.add_targets(trainer.generate_experience(prompts)[0])
    for minibatch in trainer.minibatches(experience):
        stats = UpdateStats()
        trainer.update(experience, minibatch, stats)
        norms += [stats.actor_gradient_norm, stats.critic_gradient_norm]
    moved = [held(engine) - start for engine, start in zip(engines, starts, strict=True)]
    return Trained(norms, moved, experience)


@pytest.mark.slow
@pytest.mark.parametrize(("step", "rank"), [*((step, 0) for step in TRAINERS), ("ppo", 4)])
def test_fp16_moves_the_weights_of_every_step_as_fp32_does(step, rank, model, group, tmp_path):
    lora = [f"{role}.lora.rank={rank}" for role in ("actor", "critic")]
    lora += [f"{role}.lora.only={str(rank > 0).lower()}" for role in ("actor", "critic")]
    expected = train(step, tmp_path / "fp32", model, None, "dtype=fp32", *lora)
    for stage in (0, 3) if rank else (0, 1, 2, 3):
        stages = [f"{role}.zero_stage={stage}" for role in ("actor", "critic")]
        folder = tmp_path / str(stage)
        found = train(step, folder, model, expected.experience, "dtype=fp16", *lora, *stages)
        assert found.gradient_norms == pytest.approx(expected.gradient_norms, rel=0.02)
        for moved, reference in zip(found.moved, expected.moved, strict=True):
            assert distance(moved) == pytest.approx(distance(reference), rel=0.02)
            assert (moved - reference).norm() < 0.1 * reference.norm()
