"""`dschat run`: start a run or resume one, and watch it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from dschat_tui.cli.shared import (
    AcceptOption,
    Assignments,
    DataOption,
    DetachFlag,
    JsonFlag,
    ProfileOption,
    find_run,
    load_config,
    refuse,
)

if TYPE_CHECKING:
    import subprocess

    from dschat_tui.runs.folder import RunFolder
    from dschat_tui.runs.preflight import Plan
    from engine.config.schema import RunConfig


def run(
    profile: ProfileOption = "tiny",
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: output/NAME, the next free.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Steps to run, of 1,2,3. Default: all that are needed.")
    ] = None,
    data: DataOption = None,
    assignments: Assignments = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, show configuration and commands, and end.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Resume a run after its newest checkpoint."),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option("--fix", help="With --resume: apply the change that fixes the failure."),
    ] = False,
    accept: AcceptOption = None,
    skip_memory_check: Annotated[
        bool,
        typer.Option("--skip-memory-check", help="Start also what `dschat plan` says cannot fit."),
    ] = False,
    dashboard: Annotated[
        bool,
        typer.Option(
            "--dashboard",
            help="On a terminal: watch in the dashboard; once it is done, talk with the result.",
        ),
    ] = False,
    detach: DetachFlag = False,
    json_output: JsonFlag = False,
) -> None:
    """Run the steps one after another: SFT, reward model, RLHF."""
    if dashboard and (detach or json_output):
        refuse("--dashboard shows the run: leave out --detach and --json")
    if resume is not None:
        others = {"--output": output, "--steps": steps, "--data": data, "--dry-run": dry_run}
        given = [name for name, value in others.items() if value]
        if given:
            refuse(f"--resume continues a run as it is: leave out {', '.join(given)}")
        resume_and_watch(
            resume, assignments or [], fix, accept, detach, json_output, dashboard=dashboard
        )
    if fix:
        refuse("--fix repairs a run that failed: give it with --resume RUN")
    if accept is not None:
        refuse("--accept continues a run that waits at a gate: give it with --resume RUN")
    config = load_config(profile, data or [], assignments or [])
    name = Path(profile).stem
    plan = _plan(config, output, name, _step_numbers(steps))
    for note in plan.notes:
        typer.echo(f"note: {note}", err=True)
    if dry_run:
        _show_plan(plan, json_output)
        return

    if not skip_memory_check:
        _check_memory(plan)

    from dschat_tui.runs import supervisor

    plan = _created(plan, output, name)
    process = supervisor.start(plan.run)
    if detach:
        _print_detached(plan.run, json_output)
    raise typer.Exit(_watch(plan.run, process, json_output, dashboard))


def _plan(config: RunConfig, output: Path | None, name: str, numbers: list[int] | None) -> Plan:
    from dschat_tui.runs.folder import next_free
    from dschat_tui.runs.preflight import Refusal, prepare

    folder = output if output is not None else next_free(Path("output"), name)
    try:
        return prepare(config, folder, numbers)
    except Refusal as refusal:
        refuse(*refusal.reasons)


def _check_memory(plan: Plan) -> None:
    """Refuse what does not fit into this machine; what cannot be planned may start."""
    from dschat_tui.runs import memory_plan

    try:
        report = memory_plan.for_steps(plan.config, plan.steps)
    except memory_plan.PlanError:
        return  # of a family without a plan the notes say so
    if not report.fits:
        refuse(*report.verdict(), "--skip-memory-check starts it all the same")


def _created(plan: Plan, output: Path | None, name: str) -> Plan:
    """The plan of the run whose folder was written, under another name where it was taken."""
    from dschat_tui.runs.preflight import Taken

    while True:
        try:
            plan.create(name)
            return plan
        except Taken as taken:
            if output is not None:
                refuse(*taken.reasons)
        except OSError as error:
            refuse(f"cannot write the run's folder {plan.run.path}: {error.strerror}")
        plan = _plan(plan.config, output, name, [step.number for step in plan.steps])


def resume_and_watch(
    name: str,
    assignments: list[str],
    fix: bool,
    accept: str | None,
    detach: bool,
    json_output: bool,
    dashboard: bool = False,
) -> NoReturn:
    """Resume a run by its name or folder, and exit as it ends."""
    from dschat_tui.runs import resume, supervisor
    from dschat_tui.runs.preflight import Refusal

    folder = find_run(name)
    try:
        resumption = resume.prepare_resume(folder, assignments, fix, accept)
        for change in resumption.changes:
            typer.echo(f"changed: {change}", err=True)
        after = "from its beginning" if resumption.after is None else f"after {resumption.after}"
        first = resumption.first
        typer.echo(f"resuming with step {first.number} ({first.title}) {after}", err=True)
        resume.apply(resumption)
    except Refusal as refusal:
        refuse(*refusal.reasons)
    except OSError as error:
        refuse(f"cannot write the run's folder {folder.path}: {error.strerror}")
    process = supervisor.start(folder)
    if detach:
        _print_detached(folder, json_output)
    raise typer.Exit(_watch(folder, process, json_output, dashboard))


def _watch(
    run: RunFolder, process: subprocess.Popen[bytes], json_output: bool, dashboard: bool
) -> int:
    """Watch a run that was just started until it ends or is left; the exit code."""
    from dschat_tui.cli import watch

    if dashboard:
        from dschat_tui.dashboard.app import has_terminal

        if has_terminal():
            return in_dashboard(run, process)
    return watch.watch(run, process, json_output)


def in_dashboard(run: RunFolder, process: subprocess.Popen[bytes]) -> int:
    """Watch a run in the dashboard; then its summary, and the chat if it is done."""
    from dschat_tui.cli import watch
    from dschat_tui.dashboard import app
    from dschat_tui.logs.source import find_source
    from dschat_tui.runs import control
    from dschat_tui.runs.state import unknown_run_state

    source = find_source(run.path)
    code = app.show(app.Dashboard(source, leads_to="the summary, then a chat with the result"))
    if code:
        return code  # a signal ended it
    state = run.read_state() or unknown_run_state()
    is_running = process.poll() is None or control.has_supervisor(state)
    if is_running and not (state["stop"] or run.stop_request.exists()):
        watch.print_detached(run)
        return 0
    code = watch.watch(run, process if process.poll() is None else None, json_output=False)
    if code == 0 and watch.can_talk(run.read_state() or unknown_run_state()):
        from dschat_tui.cli.chat import chat

        chat(str(run.path))
    return code


def _print_detached(run: RunFolder, json_output: bool) -> NoReturn:
    """Print the folder of a run that continues by itself, and exit."""
    if json_output:
        typer.echo(json.dumps({"name": run.path.name, "path": str(run.path)}))
    else:
        typer.echo(str(run.path))
    raise typer.Exit(0)


def _step_numbers(steps: str | None) -> list[int] | None:
    from dschat_tui.runs.preflight import step_numbers
    from engine.config.loading import ConfigError

    try:
        return None if steps is None else step_numbers("--steps", steps)
    except ConfigError as error:
        refuse(str(error))


def _show_plan(plan: Plan, json_output: bool) -> None:
    """The resolved configuration and the commands, the port being one that is free now."""
    import shlex

    from dschat_tui.runs import launch
    from engine.config.loading import to_yaml

    port = plan.config.launch.master_port or launch.free_port()
    commands = {s.name: launch.step_command(plan.config, plan.run, s, port) for s in plan.steps}
    if json_output:
        document: dict[str, object] = {
            "output": str(plan.run.path),
            "config": plan.config.model_dump(mode="json"),
            "commands": commands,
        }
        typer.echo(json.dumps(document, indent=2))
        return
    typer.echo(f"# resolved configuration, as {plan.run.config_file} would hold it")
    typer.echo(to_yaml(plan.config))
    typer.echo("# commands, one after another; each takes a port of its own that is free")
    for command in commands.values():
        typer.echo(shlex.join(command))
