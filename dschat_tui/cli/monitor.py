"""`dschat monitor`: watch a run or a log in the dashboard."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dschat_tui.cli.shared import refuse


def monitor(
    path: Annotated[Path, typer.Argument(help="Folder of a run, of a step, or a training.log.")],
    replay: Annotated[
        bool, typer.Option("--replay", help="Play a finished log again, as if it grew now.")
    ] = False,
    speed: Annotated[
        float, typer.Option(min=0.01, help="How many times as fast as it happened.")
    ] = 10.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame as text; needs no terminal.")
    ] = False,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII alone.")] = False,
) -> None:
    """Watch a run or a log, also one of DeepSpeed-Chat, also of another machine."""
    from dschat_tui.logs.source import SourceError, find_source

    try:
        source = find_source(path)
    except SourceError as error:
        refuse(str(error))
    from dschat_tui.dashboard import app as dashboard

    shown = dashboard.Dashboard(source, ascii_only=ascii_only, speed=speed if replay else None)
    if once:
        typer.echo(dashboard.once(shown))
    elif dashboard.has_terminal():
        raise typer.Exit(dashboard.show(shown))
    else:
        refuse("there is no terminal here. Use `dschat monitor PATH --once` for one frame as text")
