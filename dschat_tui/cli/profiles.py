"""`dschat profiles ...`: named configurations, with their plans."""

from __future__ import annotations

from typing import Annotated

import typer

from dschat_tui.cli.shared import EXIT_REFUSED, JsonFlag, complete_profile, group, refuse

profiles_app = group("Profiles: named configurations.")

Name = Annotated[
    str, typer.Argument(help="Name of a profile, or a YAML file.", autocompletion=complete_profile)
]
Names = Annotated[
    list[str] | None,
    typer.Argument(help="Names of profiles. Default: all.", autocompletion=complete_profile),
]


@profiles_app.command(name="list")
def list_profiles(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="The page docs/profiles.md.")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """List the profiles: models, sizes, devices, memory by plan."""
    from dschat_tui import profiles
    from dschat_tui.cli import profiles_report

    if markdown:
        typer.echo(profiles_report.as_markdown(), nl=False)
        return
    found = profiles.every()
    typer.echo(profiles_report.as_json(found) if json_output else profiles_report.as_table(found))


@profiles_app.command(name="show")
def show_profile(
    name: Name,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Every option, with what it extends and defaults.")
    ] = False,
) -> None:
    """Print a profile as its file has it, or as it is resolved."""
    from engine.config.loading import ConfigError, find_profile, load_profile, to_yaml

    try:
        text = to_yaml(load_profile(name)) if resolved else find_profile(name).read_text("utf-8")
    except ConfigError as error:
        refuse(str(error))
    typer.echo(text, nl=False)


@profiles_app.command(name="diff")
def compare_profiles(first: Name, second: Name, json_output: JsonFlag = False) -> None:
    """Say in which options two profiles differ."""
    from dschat_tui.cli import profiles_report
    from engine.config.loading import ConfigError

    show = (
        profiles_report.differences_as_json if json_output else profiles_report.differences_as_table
    )
    try:
        typer.echo(show(first, second))
    except ConfigError as error:
        refuse(str(error))


@profiles_app.command(name="validate")
def validate_profiles(names: Names = None, json_output: JsonFlag = False) -> None:
    """Load, resolve, check and plan profiles; exit 2 if one cannot be used."""
    from dschat_tui import profiles
    from dschat_tui.cli import profiles_report
    from engine.config.loading import ConfigError

    try:
        found = [profiles.examine(name) for name in names] if names else profiles.every()
    except ConfigError as error:
        refuse(str(error))
    show = profiles_report.as_json if json_output else profiles_report.as_verdicts
    typer.echo(show(found))
    if any(profile.problems for profile in found):
        raise typer.Exit(EXIT_REFUSED)
