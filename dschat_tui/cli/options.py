"""`dschat options`: the options of the configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from dschat_tui.cli.shared import JsonFlag, refuse


def show_options(
    key: Annotated[str, typer.Argument(help="An option or a group; default: all.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/options.md.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """List the options of the configuration: title, type, unit, default, what each does."""
    from dschat_tui.cli import options_report
    from engine.config.loading import ConfigError

    if markdown:
        typer.echo(options_report.as_markdown(), nl=False)
        return
    try:
        found = options_report.find_options(key)
    except ConfigError as error:
        refuse(str(error))
    show = options_report.as_json if json_output else options_report.as_text
    typer.echo(show(found))
