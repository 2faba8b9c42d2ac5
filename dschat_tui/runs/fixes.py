"""The change of a run's configuration that fixes a failure, by the cause's id."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.config.loading import get_value
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME, StepName

Assignments = dict[str, object]
Fix = Callable[[RunConfig, StepName], Assignments]

SLOWER = 0.1


def _less_memory(config: RunConfig, step: StepName) -> Assignments:
    """Half the rows at once; then checkpointing; then a higher ZeRO stage; then offload."""
    ranks = config.launch.num_accelerators * (config.launch.num_nodes or 1)
    options = getattr(config, step)
    rows = options.micro_batch_size or options.batch_size // ranks
    if rows > 1:
        smaller: Assignments = {f"{step}.micro_batch_size": _half(rows)}
        if step == "ppo":
            prompts = config.ppo.generation_batch_size or config.ppo.rollout_batch_size // ranks
            smaller["ppo.generation_batch_size"] = _half(prompts)
        return smaller
    roles = {name: getattr(config, name) for name in BY_NAME[step].roles}
    if not all(role.gradient_checkpointing for role in roles.values()):
        return {f"{name}.gradient_checkpointing": True for name in roles}
    if ranks > 1 and not all(role.zero_stage == 3 for role in roles.values()):
        return {f"{name}.zero_stage": 3 for name in roles}
    return {f"{name}.offload": True for name in roles}


def _half(rows: int) -> int:
    """Half of a number of rows that must divide it, or the number itself where it is odd."""
    return rows // 2 if rows % 2 == 0 else 1


def _less_host_memory(config: RunConfig, step: StepName) -> Assignments:
    offloading = [name for name in BY_NAME[step].roles if getattr(config, name).offload]
    if offloading:
        return {f"{name}.offload": False for name in offloading}
    return _less_memory(config, step)


def _free_port(config: RunConfig, step: StepName) -> Assignments:
    return {"launch.master_port": None}


def _nothing_to_build(config: RunConfig, step: StepName) -> Assignments:
    return {f"{name}.offload": False for name in BY_NAME[step].roles}


def _number_format_of_every_device(config: RunConfig, step: StepName) -> Assignments:
    return {"dtype": "fp32"}


def _slower(config: RunConfig, step: StepName) -> Assignments:
    keys = BY_NAME[step].learning_rates
    return {key: float(f"{SLOWER * get_value(config, key):.3g}") for key in keys}


def _fewer_checkpoints(config: RunConfig, step: StepName) -> Assignments:
    return {"checkpoint.keep_last": 1}


# Causes that no option fixes are missing: they need a path, disk space, or a connection.
FIXES: Mapping[str, Fix] = {
    "out_of_memory": _less_memory,
    "killed": _less_host_memory,
    "port_in_use": _free_port,
    "build_failed": _nothing_to_build,
    "not_supported_on_device": _number_format_of_every_device,
    "diverged": _slower,
    "disk_full": _fewer_checkpoints,
}


def fix_for(cause: str, config: RunConfig, step: StepName) -> Assignments:
    """What to set, by the keys of the configuration; empty where no option fixes the cause."""
    fix = FIXES.get(cause)
    if fix is None:
        return {}
    config = config.for_step(step)
    wanted = fix(config, step)
    return {key: value for key, value in wanted.items() if get_value(config, key) != value}
