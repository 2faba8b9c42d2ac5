"""`dschat sweep`: which combination of features runs, fits and is fastest on this machine."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from dschat_tui.cli.shared import EXIT_FAILED, Assignments, DataOption, JsonFlag, refuse
from dschat_tui.text import one_line

if TYPE_CHECKING:
    from dschat_tui.sweep.matrix import MatrixFile, Sweep
    from dschat_tui.sweep.state import SweepFolder, SweepState

EXIT_CODES = {"done": 0, "failed": EXIT_FAILED, "stopped": 130}

sweep_app = typer.Typer(
    help="Run a matrix of combinations, and report which runs, fits and is fastest.",
    invoke_without_command=True,
    rich_markup_mode=None,
)
SweepArgument = Annotated[Path, typer.Argument(help="Folder of a sweep.")]
AxisOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=V1,V2",
        help="An option, or a feature (zero_stage, hybrid_engine, offload, lora), and its "
        "values; several times. lora=true is the profile's rank, else 128, in small models an "
        "eighth of their width. Default: the original's sweep of the step.",
    ),
]


@sweep_app.callback()
def sweep(
    context: typer.Context,
    profile: Annotated[
        str | None,
        typer.Option(help="Name of a profile, or a YAML file. Default: the matrix's, else tiny."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the sweep. An existing sweep is continued.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Step that each cell runs, or several, such as 1,2. Default: 3."),
    ] = None,
    axis: AxisOption = None,
    matrix: Annotated[
        str | None,
        typer.Option(help="Take the sweep from profiles/sweeps/ by its name, or a YAML file."),
    ] = None,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Most steps of a cell, and of its preparation.")
    ] = None,
    data: DataOption = None,
    assignments: Assignments = None,
    parallel: Annotated[
        int,
        typer.Option(
            min=1, help="Cells at the same time; devices or cores are divided among them."
        ),
    ] = 1,
    time_limit: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Longest time of a cell.")
    ] = None,
    retry: Annotated[
        str | None,
        typer.Option(metavar="failed", help="Run again the cells that failed or took too long."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the matrix and what would run, and end.")
    ] = False,
    json_output: Annotated[
        bool, typer.Option("--json", help="Events as JSON on stdout, one per line.")
    ] = False,
) -> None:
    """Run a profile with every combination of some options, and report on it.

    Run the same command again to continue a sweep that was stopped.
    """
    if context.invoked_subcommand is not None:
        return
    from dschat_tui.runs.preflight import Refusal
    from dschat_tui.sweep import checks, runner
    from dschat_tui.sweep.matrix import MatrixFile, read_matrix
    from dschat_tui.sweep.state import SweepError, SweepFolder
    from engine.config.loading import ConfigError

    if output is None:
        refuse("give the folder of the sweep: --output DIR")
    if retry not in (None, "failed"):
        refuse(f"--retry {retry}: only `failed` can be run again")
    folder = SweepFolder(output)
    try:
        given = read_matrix(matrix) if matrix is not None else MatrixFile()
        made = _make(given, profile, steps, axis or [], assignments or [], max_steps, data or [])
        environments = runner.share_machine(made, parallel)
        outcomes = checks.examine(made, folder.path)
        with nullcontext() if dry_run else folder.lock():
            state = runner.resumed_state(folder.read(), made, outcomes, retry is not None)
            _show_matrix(state, dry_run, json_output)
            if dry_run:
                return
            limit = time_limit if time_limit is not None else given.time_limit
            outcome = _run(made, folder, state, environments, limit, json_output)
    except Refusal as refusal:
        refuse(*refusal.reasons)
    except (ConfigError, SweepError) as error:
        refuse(str(error))
    except OSError as error:
        typer.echo(f"dschat: the sweep {folder.path} cannot be written: {error}", err=True)
        raise typer.Exit(EXIT_FAILED) from error
    raise typer.Exit(EXIT_CODES[outcome])


def _make(
    given: MatrixFile,
    profile: str | None,
    steps: str | None,
    axes: list[str],
    assignments: list[str],
    max_steps: int | None,
    data: list[str],
) -> Sweep:
    """The sweep that the command line describes; its options override the matrix file."""
    from dschat_tui.sweep import matrix

    numbers = given.steps if steps is None else matrix.parse_steps("--steps", steps)
    return matrix.make(
        profile or given.profile or "tiny",
        numbers or (3,),
        [matrix.parse_axis(text) for text in axes] or given.axes,
        [*given.assignments, *assignments],
        max_steps if max_steps is not None else given.max_steps,
        data,
    )


def _show_matrix(state: SweepState, is_result: bool, json_output: bool) -> None:
    """Print the cells with what is known about them, and how many will run."""
    from dschat_tui.cli import sweep_display as display
    from dschat_tui.sweep import runner
    from dschat_tui.sweep import state as states

    number = runner.to_run(state)
    if json_output:
        display.emit("matrix", to_run=number, cells=state["cells"])
        return
    typer.echo(display.matrix_text(state), err=not is_result)
    waiting = {cell["preparation"] for cell in state["cells"] if cell["state"] == "pending"}
    for record in state["preparations"]:
        if record["name"] in waiting and record["state"] != "done":
            steps = " and ".join(map(str, record["steps"]))
            typer.echo(f"{record['name']}: step {steps} once, for all cells", err=not is_result)
    typer.echo(f"{states.number_of_cells(state)}, {number} to run", err=not is_result)


def _run(
    sweep: Sweep,
    folder: SweepFolder,
    state: SweepState,
    environments: list[dict[str, str]],
    time_limit: float | None,
    json_output: bool,
) -> str:
    from dschat_tui.cli import sweep_display as display
    from dschat_tui.sweep import runner
    from dschat_tui.sweep import state as states

    with display.display_for(state, json_output) as shown:
        worker = runner.Runner(sweep, folder, state, shown, environments, time_limit)
        outcome = worker.run()
    if json_output:
        display.emit("finished", state=outcome, counts=states.counts(state), path=str(folder.path))
        return outcome
    typer.echo(display.result_text(state))
    typer.echo(f"\nreport: {folder.report}")
    if outcome == "stopped":
        typer.echo("stopped; run the same command again to continue", err=True)
    for cell in state["cells"]:
        if cell["state"] in states.UNSUCCESSFUL:
            reason = one_line(cell["reason"])
            log = folder.path / cell["name"] / "training.log"
            where = f" Log: {log}" if log.is_file() else ""
            typer.echo(f"{cell['name']} {cell['state']}: {reason}{where}", err=True)
    typer.echo(states.counted(state))
    return outcome


@sweep_app.command(name="report")
def make_report(directory: SweepArgument, json_output: JsonFlag = False) -> None:
    """Rewrite the report of a sweep from its sweep.json."""
    from dschat_tui.cli import sweep_display as display
    from dschat_tui.sweep import report
    from dschat_tui.sweep.state import SweepFolder, counted

    folder = SweepFolder(directory)
    state = _state_of(folder)
    try:
        report.write(folder, state)
    except OSError as error:
        refuse(f"cannot write the report in {folder.path}: {error.strerror}")
    if json_output:
        files = [str(folder.report), str(folder.table)]
        typer.echo(json.dumps({"files": files, "cells": state["cells"]}, indent=2))
        return
    typer.echo(display.result_text(state))
    typer.echo(f"\nreport: {folder.report}\n{counted(state)}")


@sweep_app.command()
def compare(first: SweepArgument, second: SweepArgument, json_output: JsonFlag = False) -> None:
    """Compare the cells of two sweeps in pairs of the same name."""
    from dschat_tui.cli import sweep_display as display
    from dschat_tui.sweep import report
    from dschat_tui.sweep.state import SweepFolder

    compared = report.compare(*(_state_of(SweepFolder(path)) for path in (first, second)))
    if not compared["pairs"]:
        _refuse_strangers(first, second)
    typer.echo(json.dumps(compared, indent=2) if json_output else display.comparison_text(compared))


def _refuse_strangers(first: Path, second: Path) -> NoReturn:
    refuse(f"{first} and {second} have no cell in common: their axes differ")


def _state_of(folder: SweepFolder) -> SweepState:
    from dschat_tui.sweep.state import SweepError

    try:
        state = folder.read()
    except (OSError, SweepError) as error:
        refuse(str(error))
    if state is None:
        refuse(f"{folder.path} is no sweep: it holds no sweep.json")
    return state
