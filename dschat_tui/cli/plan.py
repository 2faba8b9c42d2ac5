"""`dschat plan`: the memory of each step per device, whether it fits, and what makes it fit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from dschat_tui.cli.shared import (
    EXIT_FAILED,
    Assignments,
    JsonFlag,
    ProfileOption,
    keep_stdout_clean,
    load_config,
    refuse,
)
from dschat_tui.text import aligned, gib

if TYPE_CHECKING:
    from dschat_tui.runs.memory_plan import Report


def plan(
    profile: ProfileOption = "tiny",
    assignments: Assignments = None,
    accelerators: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node, in place of launch.num_accelerators.")
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            help="Plan for GPUs with so much memory. Default: this machine, or where it has no GPU "
            "launch.memory_gib of the profile.",
        ),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Say how much memory each step takes, whether it fits, and what makes it fit.

    Exits with 1 where it does not fit.
    """
    from dschat_tui.runs import memory_plan
    from engine.config.rules import check

    settings = list(assignments or [])
    if accelerators is not None:
        settings.append(f"launch.num_accelerators={accelerators}")
    config = load_config(profile, [], settings)
    violations = check(config)
    if violations:
        refuse(*map(str, violations))
    if memory_gib is None and memory_plan.gpu_memory() is None:
        memory_gib = config.launch.memory_gib
    try:
        with keep_stdout_clean():
            report = memory_plan.make(config, memory_gib)
    except memory_plan.PlanError as error:
        refuse(str(error))
    typer.echo(_as_json(report) if json_output else _as_text(report))
    raise typer.Exit(0 if report.fits else EXIT_FAILED)


def _as_json(report: Report) -> str:
    """The report as one document; bytes of one rank, at the peak of each step."""
    plan = report.plan
    document: dict[str, object] = {
        "device": plan.device,
        "dtype": plan.dtype,
        "ranks": plan.ranks,
        "ranks_per_node": plan.ranks_per_node,
        "memory_bytes": report.memory_bytes,
        "host_memory_bytes": report.host_memory_bytes,
        "fits": report.fits,
        "change": report.change and report.change.assignments,
        "steps": [
            {
                "step": step.step,
                "device_bytes": step.device_bytes,
                "host_bytes": step.host_bytes,
                "peak_phase": step.peak_phase,
                "phases": {
                    name: {"device_bytes": on_device, "host_bytes": on_host}
                    for name, (on_device, on_host) in step.phases().items()
                },
                "items": [vars(item) for item in step.items],
            }
            for step in plan.steps
        ],
    }
    return json.dumps(document, indent=2)


def _as_text(report: Report) -> str:
    """A table per step, what is used of what there is, and the change that makes it fit."""
    plan = report.plan
    kind = "GPU" if plan.device == "cuda" else "process on the CPU"
    lines = [f"{plan.ranks} x {kind}, {plan.dtype}; GiB per rank at the peak of each step"]
    for step in plan.steps:
        held: dict[tuple[str, str], list[int]] = {}
        for item in step.items:
            if item.phase in ("always", step.peak_phase):
                sums = held.setdefault((item.model, item.what), [0, 0])
                sums[0] += item.device_bytes
                sums[1] += item.host_bytes
        rows = [[*key, gib(sums[0]), gib(sums[1])] for key, sums in held.items() if any(sums)]
        on_device, on_host = step.phases()[step.peak_phase]
        rows.append(["all", f"while: {step.peak_phase}", gib(on_device), gib(on_host)])
        lines += ["", aligned([step.step, "what", "device", "host"], rows)]
    lines += ["", *report.verdict()]
    return "\n".join(lines)
