"""What every device must do: one check a name, run on a GPU by `make test-gpu`, on a fake one here.

A check is a function of tiny models, a folder and further options; it asserts what it must show.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mixz_run
import resumed
import torch
from deepspeed.accelerator import get_accelerator
from matrix_run import options, small_model

from engine.config.placement import Placement
from engine.config.rules import check
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME
from engine.distributed import device, rank
from engine.generation import plain
from engine.generation.chat import ChatGenerator, ChatJudge, divergence
from engine.models.folders import is_complete_model
from engine.models.load import load_causal_lm
from engine.models.reward import RewardModel
from engine.rlhf.trainer import PPOTrainer
from engine.serving import load_generator
from engine.trainers.context import StepContext
from engine.trainers.dpo import DPOTrainer
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer

TRAINERS: dict[str, Any] = {
    "sft": SFTTrainer,
    "reward": RewardTrainer,
    "dpo": DPOTrainer,
    "ppo": PPOTrainer,
}
SHORT = ("ppo.max_steps=2", "data.eval_rows=8", "sft.micro_batch_size=4")
CONVERSATION = [{"role": "user", "content": "What is the sun?"}]


@dataclass(frozen=True)
class Case:
    """A step with some options."""

    step: str
    family: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a step left. `moved`: mean absolute change of its weights, rank 0 alone."""

    losses: list[float]
    moved: float


def both(*changes: str) -> tuple[str, ...]:
    """The same changes for actor and critic."""
    return tuple(f"{role}.{change}" for role in ("actor", "critic") for change in changes)


# Every feature in some step; together they cover all stages, dtypes, offload, LoRA, both decoders.
FEATURES = {
    "sft zero0 fp32 checkpointing": Case("sft", "llama", both("gradient_checkpointing=true")),
    "sft zero3 bf16 offload only-lora": Case(
        "sft",
        "opt",
        ("dtype=bf16", *both("zero_stage=3", "offload=true", "lora.rank=4", "lora.only=true")),
    ),
    "reward zero2 fp16 offload": Case(
        "reward", "llama", ("dtype=fp16", *both("zero_stage=2", "offload=true"))
    ),
    "reward zero3 bf16 all tokens": Case(
        "reward",
        "opt",
        ("dtype=bf16", "reward.loss=all_tokens", *both("zero_stage=3", "lora.rank=4")),
    ),
    "dpo zero1 fp16": Case("dpo", "llama", ("dtype=fp16", *both("zero_stage=1"))),
    "dpo zero3 bf16 shared reference": Case(
        "dpo",
        "llama",
        ("dtype=bf16", *both("zero_stage=3", "lora.rank=4", "lora.only=true")),
    ),
    "ppo zero0 fp32 plain generation": Case(
        "ppo",
        "llama",
        ("hybrid_engine.enabled=false", "ema.enabled=true", "ppo.normalize_reward=true"),
    ),
    "ppo zero1 fp16 hybrid aligned": Case(
        "ppo",
        "llama",
        (
            "dtype=fp16",
            "hybrid_engine.enabled=true",
            "ppo.align_overflow=true",
            *both("zero_stage=1"),
        ),
    ),
    "ppo zero2 bf16 hybrid offload lora": Case(
        "ppo",
        "opt",
        (
            "dtype=bf16",
            "hybrid_engine.enabled=true",
            "ppo.kl_target=1",
            *both("zero_stage=2", "offload=true", "lora.rank=4"),
        ),
    ),
    "ppo zero3 bf16 hybrid offload only-lora": Case(
        "ppo",
        "llama",
        (
            "dtype=bf16",
            "hybrid_engine.enabled=true",
            "ema.enabled=true",
            "logging.print_answers=true",
            *both("zero_stage=3", "offload=true", "lora.rank=4", "lora.only=true"),
            *both("gradient_checkpointing=true"),
        ),
    ),
    "ppo zero3 fp32 hybrid offload": Case(
        "ppo",
        "opt",
        ("hybrid_engine.enabled=true", "ref.offload=true", *both("zero_stage=3", "offload=true")),
    ),
}


def grid() -> dict[str, Case]:
    """Each step at each ZeRO stage in each dtype, step 3 with the hybrid engine."""
    cases = {}
    for step, stage, dtype in itertools.product(TRAINERS, range(4), ("fp32", "bf16", "fp16")):
        changes = (f"dtype={dtype}", "hybrid_engine.enabled=true", *both(f"zero_stage={stage}"))
        cases[f"{step} zero{stage} {dtype}"] = Case(step, "llama", changes)
    return cases


def build_models(folder: Path) -> dict[str, str]:
    """Tiny models of both families, and one that MixZ is large enough for."""
    paths = {family: small_model(family, folder / family) for family in ("llama", "opt")}
    return {**paths, "large": mixz_run.large_model(folder / "large")}


def configured(model: str, *changes: str) -> RunConfig:
    """A configuration that all steps can start from, on one small model.

    Raises:
        AssertionError: the changes break a rule.
    """
    config = options(model, f"models.reward={model}", *SHORT, *changes)
    assert check(config) == []
    return config


def run_step(case: Case, model: str, folder: Path, *changes: str) -> Outcome:
    """Train and save; assert that the models lie on the device and that all of it was done."""
    step = case.step
    config = configured(model, *case.changes, *changes)
    trainer = TRAINERS[step](StepContext.create(config, folder, step))
    held = trainer.engine
    engines = [held.actor, held.critic, held.reward] if step == "ppo" else [held]
    for engine in engines:
        assert {p.device for p in engine.module.parameters()} == {device()}
    assert trainer.train()
    trained = engines[:2] if step == "ppo" else engines
    assert all(engine.global_steps > engine.skipped_steps for engine in trained)
    if step == "ppo":
        _check_generation(trainer)
    trainer.save()
    rows = [row for row in resumed.records(folder, step) if row["kind"] == "metrics"]
    losses = [row["actor_loss" if step == "ppo" else "loss"] for row in rows]
    assert losses
    # Numbers that are not finite are written as words.
    assert all(isinstance(loss, float) for loss in losses)
    saved = folder / BY_NAME[step].folder / BY_NAME[step].models[0]
    assert is_complete_model(saved)
    return Outcome(losses, _mean_movement(model, str(saved), step) if rank() == 0 else math.nan)


def _check_generation(trainer: PPOTrainer) -> None:
    """The hybrid engine is on where asked, and in fp32 answers as transformers does."""
    hybrid = trainer.rollouts.hybrid
    assert hybrid.off_reason is None, hybrid.off_reason
    assert hybrid.enabled == trainer.context.config.hybrid_engine.enabled
    greedy = replace(trainer.rollouts.sampling, greedy=True, ignore_eos=True)
    prompts, mask = trainer.prompt_batches(trainer.batches.epoch(0)[0])[0]
    with hybrid.rollout():
        ours = hybrid.generate(prompts, mask, greedy)
    theirs = plain.generate(trainer.engine.actor.module, prompts, mask, greedy)
    assert ours.answers.device == theirs.answers.device == device()
    # In 16 bits the engine's own check allows near-ties.
    if trainer.context.dtype == torch.float32:
        assert torch.equal(ours.answers, theirs.answers)


def _mean_movement(before: str, after: str, step: str) -> float:
    first = load_causal_lm(before, torch.float32).state_dict()
    if step == "reward":
        last = RewardModel.from_pretrained(after, torch.float32).model.state_dict()
    else:
        last = load_causal_lm(after, torch.float32).state_dict()
    shared = first.keys() & last.keys()
    moved = sum(float((last[name] - first[name]).abs().sum()) for name in shared)
    return moved / sum(first[name].numel() for name in shared)


@functools.cache
def _reference(step: str, model: str, folder: Path, changes: tuple[str, ...]) -> Outcome:
    case = Case(step, "llama", ("dtype=fp32", "hybrid_engine.enabled=true"))
    return run_step(case, model, folder / "reference", *changes)


def feature(case: Case, models: dict[str, str], folder: Path, *changes: str) -> None:
    """A step with its features trains and saves."""
    outcome = run_step(case, models[case.family], folder, *changes)
    assert rank() != 0 or 0 < outcome.moved < 1


def like_fp32(case: Case, models: dict[str, str], folder: Path, *changes: str) -> None:
    """A step begins at the loss of fp32 at ZeRO-0 and moves the weights as far."""
    model = models[case.family]
    expected = _reference(case.step, model, folder.parent / f"reference-{case.step}", changes)
    found = run_step(case, model, folder, *changes)
    if rank() != 0:
        return
    if case.step == "ppo":
        # Answers that are sampled in another dtype are other answers.
        assert 0.5 < found.moved / expected.moved < 2
        return
    assert abs(found.losses[0] - expected.losses[0]) <= 0.02 * abs(expected.losses[0])
    assert 0.9 < found.moved / expected.moved < 1.1


def resumes(step: str, models: dict[str, str], folder: Path, *changes: str) -> None:
    """A step that was stopped goes on as one that was not."""
    layout = both("zero_stage=2")
    config = configured(
        models["llama"], "hybrid_engine.enabled=true", "ema.enabled=true", *layout, *changes
    )
    assert resumed.train(config, folder / "whole", step)
    assert not resumed.train(config, folder / "broken", step, stop_after=1)
    assert resumed.train(config, folder / "broken", step)
    whole, broken = (resumed.records(folder / name, step)[-1] for name in ("whole", "broken"))
    names = ("actor_loss", "critic_loss", "kl", "score_mean") if step == "ppo" else ("loss",)
    for name in names:
        # The order of sums differs from one time to the next on a GPU.
        assert math.isclose(whole[name], broken[name], rel_tol=1e-2, abs_tol=1e-3), name


def mixz(step: str, models: dict[str, str], folder: Path, *changes: str) -> None:
    """Frozen weights take half of their bf16 size, and the step trains."""
    on = ("dtype=bf16", "mixz.enabled=true", "hybrid_engine.enabled=true", *changes)
    if step == "ppo":
        trainer = mixz_run.ppo(models["large"], folder, *on)
        actor = trainer.engine.actor
    else:
        trainer = mixz_run.sft(models["large"], folder, *on)
        actor = trainer.engine
    assert trainer.train()
    assert mixz_run.share_of_bf16(actor.module) <= 0.6
    if step == "ppo":
        assert trainer.rollouts.hybrid.off_reason is None, trainer.rollouts.hybrid.off_reason
    trainer.save()


def chat(placement: Placement, models: dict[str, str], folder: Path, *changes: str) -> None:
    """A model answers from the device, is compared with another and judged."""
    path, dtype = models["llama"], torch.bfloat16
    generator = load_generator(path, "actor", dtype, placement=placement)
    assert generator.session.decoder.device.type == device().type
    for temperature in (0.0, 1.0):
        sampling = {"temperature": temperature, "top_p": 0.9, "repetition_penalty": 1.1}
        list(generator.stream(CONVERSATION, max_new_tokens=4, seed=1, **sampling))
    assert generator.usage.kept_tokens > 0
    answered = [*CONVERSATION, {"role": "assistant", "content": "A star."}]
    other = ChatGenerator.from_pretrained(path, "sft", dtype)
    assert abs(divergence(generator, other, answered)) < 1e-2
    assert math.isfinite(ChatJudge.from_pretrained(path, dtype).score(answered))


Check = Callable[..., None]


def checks(ranks: int = 1) -> dict[str, Check]:
    """All checks of a GPU by name; on several ranks those that differ there."""
    found: dict[str, Check] = {}
    for name, case in grid().items():
        if ranks == 1 or "zero2 bf16" in name or "zero3" in name:
            found[f"grid {name}"] = functools.partial(like_fp32, case)
    for name, case in FEATURES.items():
        found[name] = functools.partial(feature, case)
    for step in ("sft", "ppo"):
        found[f"resume {step}"] = functools.partial(resumes, step)
        found[f"mixz {step}"] = functools.partial(mixz, step)
    if ranks == 1:
        found["chat"] = functools.partial(chat, Placement())
        found["chat offloaded"] = functools.partial(
            chat, Placement(offload="cpu", offload_cache=True)
        )
    return found


def refused(name: str) -> str | None:
    """Why this device cannot run a check; None if it can."""
    accelerator = get_accelerator()
    if "fp16" in name and not accelerator.is_fp16_supported():
        return f"this {accelerator.device_name()} cannot compute in fp16"
    if ("bf16" in name or "mixz" in name or "chat" in name) and not (
        accelerator.is_bf16_supported()
    ):
        return f"this {accelerator.device_name()} cannot compute in bf16"
    return None
