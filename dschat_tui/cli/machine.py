"""Commands about this machine and the options: plan, doctor, options, models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dschat_tui.cli.shared import (
    Assignments,
    JsonFlag,
    ProfileOption,
    group,
    keep_stdout_clean,
    load_config,
    refuse,
)

models_app = group("Models that can be fetched by name.")


def plan(
    profile: ProfileOption = "tiny",
    assignments: Assignments = None,
    accelerators: Annotated[
        int | None, typer.Option(min=1, help="Ranks a node, in place of launch.num_accelerators.")
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
    """Say how much memory each step takes, whether it fits, and what makes it fit."""
    from dschat_tui import memory_plan
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
    typer.echo(memory_plan.as_json(report) if json_output else memory_plan.as_text(report))


def doctor(
    hostfile: Annotated[
        Path | None, typer.Option(help="Check the hosts of this file too, by ssh.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Say what this machine has for training, and what to do about what it lacks."""
    from dschat_tui.cli import doctor as examination

    findings = examination.examine(hostfile)
    show = examination.as_json if json_output else examination.as_text
    typer.echo(show(findings))


def show_options(
    key: Annotated[str, typer.Argument(help="An option or a group; default: all.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/options.md.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """List the options of the configuration: title, type, unit, default, what each does."""
    from dschat_tui import reference
    from engine.config.loading import ConfigError

    if markdown:
        typer.echo(reference.as_markdown(), nl=False)
        return
    try:
        found = reference.find_options(key)
    except ConfigError as error:
        refuse(str(error))
    typer.echo(reference.as_json(found) if json_output else reference.as_text(found))


@models_app.command(name="get")
def get_model(name: Annotated[str, typer.Argument(help="Name of a model.")]) -> None:
    """Fetch a model, telling its size first, and print its folder."""
    from engine.models import catalogue
    from engine.models.folders import ModelError

    try:
        with keep_stdout_clean():
            folder = catalogue.fetch(name, note=lambda text: typer.echo(text, err=True))
    except ModelError as error:
        refuse(str(error))
    typer.echo(str(folder))
