"""Memory plans: what each step of a run takes per device, whether it fits, what makes it fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import psutil

from dschat_tui.machine import GIB, gpu_memory
from dschat_tui.runs.hosts import hosts_of
from dschat_tui.runs.models import Origin, actor_of, reward_of
from dschat_tui.text import gib
from engine.config.schema import RlhfConfig, RunConfig
from engine.config.steps import BY_NAME, Step
from engine.models import names
from engine.planning import (
    Change,
    Device,
    ModelShape,
    Plan,
    StepPlan,
    UnknownFamilyError,
    known_config,
    plan_memory,
    smallest_change,
)

Dtype = Literal["fp32", "bf16", "fp16"]
# CPU features that make dtype=auto choose bf16.
FAST_BF16 = ("avx512_bf16", "amx_tile")


class PlanError(ValueError):
    """Why a plan cannot be made; the message says what to do."""


class UnplannedFamilyError(PlanError):
    """A model of a family that the planner does not know: no plan, but it can be trained."""


@dataclass(frozen=True)
class Report:
    """A plan, the memory available, and what makes it fit where it does not.

    Attributes:
        with_critic: step 3 as it would be with PPO's critic; None where it has one.
    """

    plan: Plan
    memory_bytes: int
    host_memory_bytes: int | None
    change: Change | None
    with_critic: StepPlan | None = None

    @property
    def fits(self) -> bool:
        """Whether all steps fit as they are."""
        return self.plan.fits(self.memory_bytes, self.host_memory_bytes)

    def verdict(self) -> list[str]:
        """Whether it fits, the change that makes it fit, and what having no critic saves."""
        return self._fit() + self._saved()

    def _saved(self) -> list[str]:
        """What step 3 would take with PPO's critic, and with the reward model that it needs."""
        if self.with_critic is None:
            return []
        on_host = self.plan.device == "cpu"
        own, other = (
            gib(step.host_bytes if on_host else step.device_bytes)
            for step in (self.plan.steps[-1], self.with_critic)
        )
        return [f"step 3 takes {own} GiB per rank without a critic, {other} GiB with PPO"]

    def _fit(self) -> list[str]:
        plan = self.plan
        if plan.device == "cpu":
            need = f"{gib(plan.node_host_bytes)} GiB of {gib(self.memory_bytes)} GiB host memory"
        else:
            need = f"{gib(plan.device_bytes)} GiB of {gib(self.memory_bytes)} GiB per device, "
            need += f"{gib(plan.node_host_bytes)} GiB"
            if self.host_memory_bytes is not None:
                need += f" of {gib(self.host_memory_bytes)} GiB"
            need += " on the host of a node"
        if self.fits:
            return [f"fits: {need}"]
        lines = [f"does not fit: {need}"]
        if self.change is None:
            lines.append("no single change, nor two, make it fit: more devices, or smaller models")
        else:
            settings = " ".join(f"--set {part}" for part in str(self.change).split(" and "))
            after = self.change.plan
            size = after.node_host_bytes if after.device == "cpu" else after.device_bytes
            lines.append(f"the smallest change that fits, with {gib(size)} GiB: {settings}")
        return lines


def make(
    config: RunConfig,
    memory_gib: float | None,
    *,
    find_change: bool = True,
    offline: bool = False,
) -> Report:
    """Plan a configuration for GPUs with so much memory, or for this machine.

    Args:
        config: the configuration to plan.
        memory_gib: of a GPU; None: what this machine has.
        find_change: search for the smallest change that makes it fit, which can take seconds.
        offline: never ask the Hub for the config.json of a model that is not here.

    Raises:
        PlanError: the shape of a model, or the number of hosts, cannot be known.
    """
    host_memory = psutil.virtual_memory().total
    on_gpu = gpu_memory() if memory_gib is None else int(memory_gib * GIB)
    device: Device = "cpu" if on_gpu is None else "cuda"
    memory = host_memory if on_gpu is None else on_gpu
    # a plan for other machines knows nothing about their host memory
    host = host_memory if device == "cuda" and memory_gib is None else None
    actor, reward = shapes_of(config, offline)
    nodes = number_of_nodes(config)
    dtype = resolved_dtype(config.dtype, device)
    plan = plan_memory(config, actor, reward, dtype=dtype, device=device, nodes=nodes)
    change = None
    if find_change and not plan.fits(memory, host):
        change = smallest_change(
            config,
            actor,
            reward,
            memory_bytes=memory,
            host_memory_bytes=host,
            dtype=dtype,
            device=device,
            nodes=nodes,
        )
    with_critic = None
    if config.alignment == "ppo" and not config.algorithm.has_critic:
        ppo = config.model_copy(update={"rlhf": RlhfConfig()})
        with_critic = plan_memory(
            ppo, actor, reward, dtype=dtype, device=device, nodes=nodes
        ).steps[-1]
    return Report(plan, memory, host, change, with_critic)


def for_steps(config: RunConfig, steps: Sequence[Step]) -> Report:
    """Plan some steps of a run on this machine, without any network access.

    Raises:
        PlanError: the shape of a model, or the number of hosts, cannot be known here.
    """
    wanted = {step.name for step in steps}
    report = make(config, None, find_change=False, offline=True)
    planned = tuple(step for step in report.plan.steps if step.step in wanted)
    report = replace(report, plan=replace(report.plan, steps=planned))
    if report.fits:
        return report
    return replace(report, change=make(config, None, offline=True).change)


def on_gpus(config: RunConfig) -> Report:
    """Plan for the accelerators that a profile is meant for, without any network access.

    The memory is launch.memory_gib, or what the plan takes where that is empty. Steps that
    data.split leaves no data are not planned.

    Raises:
        PlanError: the shape of a model, or the number of hosts, cannot be known here.
    """
    actor, reward = shapes_of(config, offline=True)
    nodes, dtype = number_of_nodes(config), resolved_dtype(config.dtype, "cuda")
    plan = plan_memory(config, actor, reward, dtype=dtype, nodes=nodes)
    served = [step for step in plan.steps if config.data.split[BY_NAME[step.step].number - 1]]
    plan = replace(plan, steps=tuple(served))
    memory = int((config.launch.memory_gib or plan.device_bytes / GIB) * GIB)
    return Report(plan, max(memory, 1), None, None)


def shapes_of(config: RunConfig, offline: bool = False) -> tuple[ModelShape, ModelShape | None]:
    """Shapes of the actor and of the reward model; None: the reward model is what step 1 makes.

    Raises:
        PlanError: as `shape_of`.
    """
    reward = reward_of(config.models)
    return (
        shape_of(actor_of(config.models), offline),
        None if reward is None else shape_of(reward, offline),
    )


def shape_of(origin: Origin, offline: bool = False) -> ModelShape:
    """The shape of a model from its config.json alone.

    Looked for on disk, in the Hub's cache, in the table of known shapes, and then on the Hub,
    unless `offline`.

    Raises:
        UnplannedFamilyError: it is of a family that the planner does not know.
        PlanError: it cannot be had.
    """
    key, name = origin
    try:
        found_here = names.local_config(name) or known_config(name)
        if found_here is not None:
            return ModelShape.from_config(found_here)
        found = names.resolve_model(name)
        if offline and not Path(found).is_dir():
            raise PlanError(
                f"{key}={name}: its shape is not known on this machine. Fetch it, or plan it "
                "with a network: dschat plan"
            )
        if not Path(found).is_dir():
            from huggingface_hub import hf_hub_download

            found = str(Path(hf_hub_download(found, "config.json")).parent)
        return ModelShape.from_folder(found)
    except PlanError:
        raise
    except UnknownFamilyError as error:
        raise UnplannedFamilyError(
            f"{key}={name}: there is no plan, since {error}. It trains all the same, without "
            "TFLOPs in its log"
        ) from error
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PlanError(
            f"{key}={name}: its config.json cannot be used: {reason}. Give a folder that holds one"
        ) from error


def number_of_nodes(config: RunConfig) -> int:
    """The number of hosts of a run: as configured, else those of its hostfile.

    Raises:
        PlanError: the hostfile cannot be read.
    """
    if config.launch.num_nodes is not None:
        return config.launch.num_nodes
    if config.launch.deployment != "multi_node" or config.launch.hostfile is None:
        return 1
    try:
        return len(hosts_of(Path(config.launch.hostfile).read_text(encoding="utf-8"))) or 1
    except (OSError, ValueError) as error:
        raise PlanError(f"launch.hostfile={config.launch.hostfile}: {error}") from error


def resolved_dtype(name: str, device: Device) -> Dtype:
    """The format that `dtype` means on a device."""
    if name != "auto":
        return cast(Dtype, name)
    if device == "cuda":
        return "bf16"
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return "fp32"
    return "bf16" if any(flag in flags for flag in FAST_BF16) else "fp32"
