"""`dschat runs ...`: list, show, attach to, stop, resume and delete runs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dschat_tui.cli.run import resume_and_watch
from dschat_tui.cli.shared import (
    EXIT_FAILED,
    AcceptOption,
    Assignments,
    DetachFlag,
    JsonFlag,
    find_run,
    group,
    refuse,
)
from dschat_tui.text import aligned, plain

if TYPE_CHECKING:
    from dschat_tui.runs.control import Described

runs_app = group("Runs: list, show, watch, stop, resume and delete them.")
RunArgument = Annotated[str, typer.Argument(help="Folder of a run, or its name in output/.")]


@runs_app.command(name="list")
def list_runs(
    places: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders with runs. Default: output/.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """List runs, the one that changed last first."""
    from dschat_tui.runs import control

    for place in places or []:
        if not place.is_dir():
            refuse(f"{place} is no folder. Give runs, or folders with runs in them")
    found = control.find_runs(places or [control.RUNS_FOLDER])
    described = [control.describe(run) for run in found]
    if json_output:
        typer.echo(json.dumps(described, indent=2))
    elif described:
        typer.echo(_table(described))
    else:
        looked = ", ".join(str(place) for place in places or [control.RUNS_FOLDER])
        typer.echo(f"no runs in {looked}; `dschat run` makes one")


@runs_app.command(name="show")
def show_run(run: RunArgument, json_output: JsonFlag = False) -> None:
    """Show a run: its steps, checkpoints, why it failed, and what to do next."""
    from dschat_tui.run_text import describe_run
    from dschat_tui.runs import control

    described = control.describe(find_run(run))
    typer.echo(json.dumps(described, indent=2) if json_output else describe_run(described))


@runs_app.command()
def attach(run: RunArgument, json_output: JsonFlag = False) -> None:
    """Watch a run that another command started; Ctrl-C asks whether to detach or to stop."""
    from dschat_tui.cli import watch
    from dschat_tui.runs import control

    folder = find_run(run)
    if not control.has_supervisor(control.describe(folder)["state"]):
        refuse(f"{folder.path} is not running. See how it ended: dschat runs show {run}")
    raise typer.Exit(watch.watch(folder, None, json_output))


@runs_app.command()
def stop(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="Without a checkpoint.")] = False,
    limit: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Longest wait for the checkpoint.")
    ] = 300.0,
    json_output: JsonFlag = False,
) -> None:
    """Save a checkpoint and stop; after the limit, end the processes of the run."""
    from dschat_tui.runs import control, stopping

    folder = find_run(run)
    try:
        state = stopping.stop(folder, now, limit, note=lambda text: typer.echo(text, err=True))
    except control.NotRunning:
        refuse(f"{folder.path} is not running, so there is nothing to stop")
    described = control.describe(folder)
    typer.echo(json.dumps(described, indent=2) if json_output else f"{folder.path}: {state}")


@runs_app.command(name="resume")
def resume_run(
    run: RunArgument,
    assignments: Assignments = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Apply the change that fixes the failure.")
    ] = False,
    accept: AcceptOption = None,
    detach: DetachFlag = False,
    json_output: JsonFlag = False,
) -> None:
    """Resume a run after the newest checkpoint of its first unfinished step."""
    resume_and_watch(run, assignments or [], fix, accept, detach, json_output)


@runs_app.command()
def delete(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Remove a run with its models and checkpoints."""
    from dschat_tui.runs import control
    from dschat_tui.runs.folder import RunIsHeld

    folder = find_run(run)
    if control.has_supervisor(control.describe(folder)["state"]):
        refuse(f"{folder.path} is running. Stop it first: dschat runs stop {run}")
    if not yes:
        if not sys.stdin.isatty():
            refuse("there is no terminal to ask on. Add --yes to delete without a question")
        if not typer.confirm(f"Delete {folder.path} with its models and checkpoints?", err=True):
            raise typer.Exit(EXIT_FAILED)
    try:
        others = control.delete(folder)
    except (control.NotDeletable, OSError, RunIsHeld) as error:
        refuse(f"cannot delete {folder.path}: {error}")
    if json_output:
        typer.echo(json.dumps({"path": str(folder.path), "kept": others}))
    elif others:
        typer.echo(f"deleted; kept, since the run did not make them: {', '.join(others)}")
    else:
        typer.echo(f"deleted {folder.path}")


def _table(described: list[Described]) -> str:
    """One line per run: name, state, steps, when it changed, folder."""
    rows = []
    for item in described:
        state = item["state"]
        updated = state["updated"]
        rows.append(
            [
                plain(item["name"]),
                item["standing"],
                " ".join(record["state"] for record in state["steps"].values()),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(updated)) if updated else "",
                plain(item["path"]),
            ]
        )
    return aligned(["run", "state", "steps", "changed", "folder"], rows)
