"""Commands that read what a run left: metrics, monitor, eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dschat_tui.commands.shared import JsonFlag, keep_stdout_clean, refuse


def metrics(
    path: Annotated[Path, typer.Argument(help="Folder of a run, of a step, or a training.log.")],
    json_output: JsonFlag = False,
) -> None:
    """Read what a run, or a training.log, says."""
    from engine import training_log

    log = path / "training.log" if (path / "training.log").is_file() else path
    if log.is_file():
        document = training_log.read_document(log)
    elif path.is_dir():
        document = training_log.read_run(path)
        if not document["steps"]:
            refuse(f"{path} holds no training.log of a step. Give the folder of a run, or a log")
    else:
        refuse(f"{path} does not exist. Give the folder of a run, or a training.log")
    if json_output:
        typer.echo(training_log.to_json(document))
        return
    from dschat_tui import tables

    typer.echo(tables.log_document(document))


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
    from dschat_tui import app as dashboard

    shown = dashboard.Dashboard(source, ascii_only=ascii_only, speed=speed if replay else None)
    if once:
        typer.echo(dashboard.once(shown))
    elif dashboard.has_terminal():
        raise typer.Exit(dashboard.show(shown))
    else:
        refuse("there is no terminal here. Use `dschat monitor PATH --once` for one frame as text")


def evaluate_run(
    path: Annotated[Path, typer.Argument(help="Folder of a run.")],
    json_output: JsonFlag = False,
) -> None:
    """Compare base, SFT model and actor of a run on held-out prompts."""
    if not (path / "run.yaml").is_file():
        refuse(f"{path} holds no run.yaml, so it is no run. Give the folder of a run")
    with keep_stdout_clean():
        from engine.evaluation import evaluate

        document = evaluate(path)
    if json_output:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    from dschat_tui import tables

    typer.echo(tables.evaluation(document))
