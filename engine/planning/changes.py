"""The smallest change of a configuration that makes its models fit into memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from engine.config.loading import drop_override
from engine.config.rules import check
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME
from engine.planning.memory import Device, Plan, plan_memory
from engine.planning.shapes import ModelShape

_LORA_RANK = 128

Assignments = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """Values to set, by the keys of the configuration, and what the run takes then."""

    assignments: Assignments
    plan: Plan

    def __str__(self) -> str:
        return " and ".join(
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in self.assignments.items()
        )


def smallest_change(
    config: RunConfig,
    actor: ModelShape,
    reward: ModelShape | None = None,
    *,
    memory_bytes: int,
    host_memory_bytes: int | None = None,
    dtype: Literal["fp32", "bf16", "fp16"],
    device: Device = "cuda",
    nodes: int = 1,
) -> Change | None:
    """The first single change that fits, else the first pair; None if no pair does.

    Tried in the order of what they cost: cuts of a batch and recomputation only time, sharding
    traffic, offload much time, LoRA another result. A change that breaks a rule of the
    configuration is not proposed. Arguments as in `plan_memory` and `Plan.fits`.

    An empty change means that the configuration fits as it is.
    """

    def attempt(assignments: Assignments) -> Change | None:
        changed = _changed(config, assignments)
        broken = {violation.id for violation in check(changed)}
        if broken - {violation.id for violation in check(config)}:
            return None
        plan = plan_memory(changed, actor, reward, dtype=dtype, device=device, nodes=nodes)
        fits = plan.fits(memory_bytes, host_memory_bytes)
        return Change(assignments, plan) if fits else None

    as_it_is = attempt({})
    if as_it_is is not None:
        return as_it_is
    candidates = list(_candidates(config, nodes * config.launch.num_accelerators))
    pairs = (
        {**first, **second}
        for first, second in itertools.combinations(candidates, 2)
        if not first.keys() & second.keys()
    )
    for assignments in itertools.chain(candidates, pairs):
        change = attempt(assignments)
        if change is not None:
            return change
    return None


def _candidates(config: RunConfig, ranks: int) -> Iterator[Assignments]:
    """Single changes, from the cheapest to the dearest."""
    steps = [step.name for step in config.steps]
    for step in steps:
        options = getattr(config, step)
        rows = options.micro_batch_size or options.batch_size // ranks
        for smaller in _halves(rows):
            yield {f"{step}.micro_batch_size": smaller}
    if "ppo" in steps:
        prompts = config.ppo.generation_batch_size or config.ppo.rollout_batch_size // ranks
        for smaller in _halves(prompts):
            yield {"ppo.generation_batch_size": smaller}
    for step in (name for name in steps if name != "ppo"):
        for smaller in _halves(getattr(config, step).eval_batch_size):
            yield {f"{step}.eval_batch_size": smaller}
    roles = [("actor", config.actor), ("critic", config.critic)]
    if not {"reward", "ppo"} & set(steps):
        roles = roles[:1]
    for name, role in roles:
        if not role.gradient_checkpointing:
            yield {f"{name}.gradient_checkpointing": True}
    for stage in (2, 3):
        for name, role in roles:
            if role.zero_stage < stage:
                yield {f"{name}.zero_stage": stage}
    if not config.ref.offload:
        yield {"ref.offload": True}
    if "ppo" in steps and not config.ref.offload_reward:
        yield {"ref.offload_reward": True}
    for name, role in roles:
        if not role.offload:
            yield {f"{name}.offload": True}
    for name, role in roles:
        if not role.lora.only:
            yield {
                **({} if role.lora.rank else {f"{name}.lora.rank": _LORA_RANK}),
                f"{name}.lora.only": True,
            }


def _halves(rows: int) -> Iterator[int]:
    """Rows halved again and again while that divides them."""
    while rows > 1 and rows % 2 == 0:
        rows //= 2
        yield rows


def _changed(config: RunConfig, assignments: Assignments) -> RunConfig:
    changed = config.model_copy(deep=True)
    for key, value in assignments.items():
        *groups, field = key.split(".")
        owner: Any = changed
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, field, value)
        for name in BY_NAME:
            drop_override(getattr(changed, name).overrides, key)
    return changed
