"""`dschat`: the command line. Each command checks its arguments, then imports what it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from dschat_tui.runs.folder import RunFolder
    from dschat_tui.runs.preflight import Plan
    from engine.config import RunConfig

EXIT_FAILED = 1
EXIT_REFUSED = 2

# rich_markup_mode=None: help and usage errors as plain text, without the import of rich
app = typer.Typer(
    name="dschat",
    help="Train a ChatGPT-style model in three steps (SFT, reward model, RLHF) on DeepSpeed.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
profiles_app = typer.Typer(
    help="Profiles: named configurations.", no_args_is_help=True, rich_markup_mode=None
)
models_app = typer.Typer(
    help="Models that can be fetched by name.", no_args_is_help=True, rich_markup_mode=None
)
runs_app = typer.Typer(
    help="Runs: what there is, and what to do with it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(profiles_app, name="profiles")
app.add_typer(models_app, name="models")
app.add_typer(runs_app, name="runs")

RunArgument = Annotated[str, typer.Argument(help="Folder of a run, or its name in output/.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


@app.command()
def run(
    profile: Annotated[
        str, typer.Option(help="Name of a profile (`dschat profiles list`), or a YAML file.")
    ] = "tiny",
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run. Default: output/NAME, the next free.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(help="Steps to run, of 1,2,3. Default: all that are needed.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Data set in place of data.sources; can be given several times."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one option; see `dschat options`."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check, show configuration and commands, and end.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Go on with a run, after its newest checkpoint."),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="With --resume: change what mends the failure.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start it, print its folder, and end.")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Run the steps one after another: SFT, reward model, RLHF."""
    from dschat_tui.runs.preflight import Refusal, prepare

    if resume is not None:
        others = {"--output": output, "--steps": steps, "--data": data, "--dry-run": dry_run}
        given = [name for name, value in others.items() if value]
        if given:
            _refuse(f"--resume goes on with a run as it is: leave out {', '.join(given)}")
        _resume(resume, assignments or [], fix, detach, json_output)
    if fix:
        _refuse("--fix mends a run that failed: give it with --resume RUN")
    config = _load(profile, data or [], assignments or [])
    name = Path(profile).stem
    folder = output if output is not None else _next_free(Path("output"), name)
    try:
        plan = prepare(config, folder, _step_numbers(steps))
    except Refusal as refusal:
        _refuse(*refusal.reasons)
    if dry_run:
        _show_plan(plan, json_output)
        return

    from dschat_tui.runs import supervisor, watch
    from engine.config import to_yaml

    try:
        plan.run.create(to_yaml(plan.config), name, plan.steps)
    except OSError as error:
        _refuse(f"cannot write the run's folder {plan.run.path}: {error.strerror}")
    process = supervisor.start(plan.run)
    if detach:
        _tell_detached(plan.run, json_output)
    raise typer.Exit(watch.watch(plan.run, process, json_output))


@app.command()
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
            _refuse(f"{path} holds no training.log of a step. Give the folder of a run, or a log")
    else:
        _refuse(f"{path} does not exist. Give the folder of a run, or a training.log")
    if json_output:
        typer.echo(training_log.to_json(document))
        return
    from dschat_tui import tables

    typer.echo(tables.log_document(document))


@app.command()
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
        _refuse(str(error))
    from dschat_tui import app as dashboard

    shown = dashboard.Dashboard(source, ascii_only=ascii_only, speed=speed if replay else None)
    if once:
        typer.echo(dashboard.once(shown))
    elif dashboard.has_terminal():
        raise typer.Exit(dashboard.show(shown))
    else:
        _refuse("there is no terminal here. Use `dschat monitor PATH --once` for one frame as text")


@app.command(name="eval")
def evaluate_run(
    path: Annotated[Path, typer.Argument(help="Folder of a run.")],
    json_output: JsonFlag = False,
) -> None:
    """Compare base, SFT model and actor of a run on held-out prompts."""
    if not (path / "run.yaml").is_file():
        _refuse(f"{path} holds no run.yaml, so it is no run. Give the folder of a run")
    with _keep_stdout_clean():
        from engine.evaluation import evaluate

        document = evaluate(path)
    if json_output:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    from dschat_tui import tables

    typer.echo(tables.evaluation(document))


@app.command()
def chat(
    path: Annotated[
        str, typer.Option(help="Folder of a run or of a model, or the id of a model on the Hub.")
    ],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of sampling; 0 always takes the likeliest token.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the likeliest tokens with this share.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(min=0, help="Sample from so many likeliest tokens; 0 is off.")
    ] = 0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes used tokens less likely.")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Makes sampled answers repeatable.")
    ] = None,
    system: Annotated[str, typer.Option(help="The system message.")] = "",
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder or Hub id of the tokenizer, if the model has none.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
    against: Annotated[
        list[str] | None, typer.Option(help="Another model to compare with; several times.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this one question and end.")] = None,
    eval_file: Annotated[
        Path | None, typer.Option(help="Ask the prompts of this file and show a table.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write that table here: CSV if it ends so, else JSONL.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line on stdout.")
    ] = False,
) -> None:
    """Talk with a model."""
    from dschat_tui.chat.repl import main as converse

    exit_code = converse(
        path,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        repetition_penalty=repetition_penalty,
        seed=seed,
        system=system,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        against=against or [],
        prompt=prompt,
        as_json=as_json,
        eval_file=eval_file,
        output=output,
    )
    raise typer.Exit(exit_code)


@app.command(name="options")
def show_options(
    key: Annotated[str, typer.Argument(help="An option or a group; default: all.")] = "",
    markdown: Annotated[bool, typer.Option("--markdown", help="The page docs/options.md.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """List the options of the configuration: title, type, unit, default, what each does."""
    from dschat_tui import reference
    from engine.config import ConfigError

    if markdown:
        typer.echo(reference.as_markdown(), nl=False)
        return
    try:
        found = reference.find_options(key)
    except ConfigError as error:
        _refuse(str(error))
    typer.echo(reference.as_json(found) if json_output else reference.as_text(found))


@runs_app.command(name="list")
def list_runs(
    places: Annotated[
        list[Path] | None, typer.Argument(help="Runs, or folders with runs. Default: output/.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """List runs, the one that changed last first."""
    from dschat_tui import tables
    from dschat_tui.runs import control

    for place in places or []:
        if not place.is_dir():
            _refuse(f"{place} is no folder. Give runs, or folders with runs in them")
    found = control.find_runs(places or [control.RUNS_FOLDER])
    described = [control.describe(run) for run in found]
    if json_output:
        typer.echo(json.dumps(described, indent=2))
    elif described:
        typer.echo(tables.runs(described))
    else:
        looked = ", ".join(str(place) for place in places or [control.RUNS_FOLDER])
        typer.echo(f"no runs in {looked}; `dschat run` makes one")


@runs_app.command(name="show")
def show_run(run: RunArgument, json_output: JsonFlag = False) -> None:
    """Show a run: its steps, checkpoints, why it failed, and what to do next."""
    from dschat_tui import tables
    from dschat_tui.runs import control

    described = control.describe(_find_run(run))
    typer.echo(json.dumps(described, indent=2) if json_output else tables.run(described))


@runs_app.command()
def attach(run: RunArgument, json_output: JsonFlag = False) -> None:
    """Watch a run that another command started; Ctrl-C asks whether to detach or to stop."""
    from dschat_tui.runs import control, watch

    folder = _find_run(run)
    if not control.has_supervisor(control.describe(folder)["state"]):
        _refuse(f"{folder.path} is not going on. See how it ended: dschat runs show {run}")
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

    folder = _find_run(run)
    try:
        state = stopping.stop(folder, now, limit, note=lambda text: typer.echo(text, err=True))
    except control.NotRunning:
        _refuse(f"{folder.path} is not going on, so there is nothing to stop")
    described = control.describe(folder)
    typer.echo(json.dumps(described, indent=2) if json_output else f"{folder.path}: {state}")


@runs_app.command(name="resume")
def resume_run(
    run: RunArgument,
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one option; see `dschat options`."),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Change what mends the failure.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start it, print its folder, and end.")
    ] = False,
    json_output: JsonFlag = False,
) -> None:
    """Go on with a run, after the newest checkpoint of its first unfinished step."""
    _resume(run, assignments or [], fix, detach, json_output)


@runs_app.command()
def delete(
    run: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json_output: JsonFlag = False,
) -> None:
    """Remove a run with its models and checkpoints."""
    from dschat_tui.runs import control
    from dschat_tui.runs.folder import RunIsHeld
    from dschat_tui.runs.processes import leftovers

    folder = _find_run(run)
    state = control.describe(folder)["state"]
    if control.has_supervisor(state):
        _refuse(f"{folder.path} is going on. Stop it first: dschat runs stop {run}")
    if leftovers(state):
        _refuse(f"processes of {folder.path} are alive. `dschat run --resume {run}` ends them")
    if not yes:
        if not sys.stdin.isatty():
            _refuse("there is no terminal to ask on. Add --yes to delete without a question")
        if not typer.confirm(f"Delete {folder.path} with its models and checkpoints?", err=True):
            raise typer.Exit(EXIT_FAILED)
    try:
        others = control.delete(folder)
    except (OSError, RunIsHeld) as error:
        _refuse(f"cannot delete {folder.path}: {error}")
    if json_output:
        typer.echo(json.dumps({"path": str(folder.path), "kept": others}))
    elif others:
        typer.echo(f"deleted; kept, since the run did not make them: {', '.join(others)}")
    else:
        typer.echo(f"deleted {folder.path}")


@app.command()
def plan(
    profile: Annotated[
        str, typer.Option(help="Name of a profile (`dschat profiles list`), or a YAML file.")
    ] = "tiny",
    assignments: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change one option; see `dschat options`."),
    ] = None,
    accelerators: Annotated[
        int | None, typer.Option(min=1, help="Ranks a node, in place of launch.num_accelerators.")
    ] = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(min=0.1, help="Plan for GPUs with so much memory. Default: this machine."),
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Say how much memory each step takes, whether it fits, and what makes it fit."""
    from dschat_tui import memory_plan
    from engine.config import check

    settings = list(assignments or [])
    if accelerators is not None:
        settings.append(f"launch.num_accelerators={accelerators}")
    config = _load(profile, [], settings)
    violations = check(config)
    if violations:
        _refuse(*map(str, violations))
    try:
        with _keep_stdout_clean():
            report = memory_plan.make(config, memory_gib)
    except memory_plan.PlanError as error:
        _refuse(str(error))
    typer.echo(memory_plan.as_json(report) if json_output else memory_plan.as_text(report))


@app.command()
def doctor(
    hostfile: Annotated[
        Path | None, typer.Option(help="Check the hosts of this file too, by ssh.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Say what this machine has for training, and what to do about what it lacks."""
    from dschat_tui import doctor as examination

    findings = examination.examine(hostfile)
    show = examination.as_json if json_output else examination.as_text
    typer.echo(show(findings))


@profiles_app.command(name="list")
def list_profiles(json_output: JsonFlag = False) -> None:
    """List the profiles."""
    from engine.config import find_profile, profile_names

    described = {name: _first_sentence(find_profile(name)) for name in profile_names()}
    if json_output:
        rows = [{"name": name, "description": text} for name, text in described.items()]
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max((len(name) for name in described), default=0)
    for name, text in described.items():
        typer.echo(f"{name:<{width}}  {text}")


@profiles_app.command(name="show")
def show_profile(name: Annotated[str, typer.Argument(help="Name of a profile.")]) -> None:
    """Print a profile as it stands in its file."""
    from engine.config import ConfigError, find_profile

    try:
        path = find_profile(name)
    except ConfigError as error:
        _refuse(str(error))
    typer.echo(path.read_text(encoding="utf-8"), nl=False)


@models_app.command(name="get")
def get_model(name: Annotated[str, typer.Argument(help="Name of a model.")]) -> None:
    """Fetch a model, telling its size first, and print its folder."""
    from engine.models import catalogue
    from engine.models.folders import ModelError

    try:
        with _keep_stdout_clean():
            folder = catalogue.fetch(name, note=lambda text: typer.echo(text, err=True))
    except ModelError as error:
        _refuse(str(error))
    typer.echo(str(folder))


def _load(profile: str, data: list[str], assignments: list[str]) -> RunConfig:
    from engine.config import ConfigError, apply_overrides, find_profile, read_yaml, resolve

    try:
        values = apply_overrides(read_yaml(find_profile(profile)), assignments)
        if data:
            values.setdefault("data", {})["sources"] = [{"path": path} for path in data]
        return resolve(values, f"profile {profile}")
    except ConfigError as error:
        _refuse(str(error))


def _find_run(name: str) -> RunFolder:
    from dschat_tui.runs.control import NoSuchRun, find_run

    try:
        return find_run(name)
    except NoSuchRun as error:
        _refuse(str(error))


def _resume(
    name: str, assignments: list[str], fix: bool, detach: bool, json_output: bool
) -> NoReturn:
    from dschat_tui.runs import resume, supervisor, watch
    from dschat_tui.runs.preflight import Refusal

    folder = _find_run(name)
    try:
        resumption = resume.prepare_resume(folder, assignments, fix)
        for change in resumption.changes:
            typer.echo(f"changed: {change}", err=True)
        after = "from its beginning" if resumption.after is None else f"after {resumption.after}"
        first = resumption.first
        typer.echo(f"goes on with step {first.number} ({first.title}) {after}", err=True)
        resume.apply(resumption)
    except Refusal as refusal:
        _refuse(*refusal.reasons)
    except OSError as error:
        _refuse(f"cannot write the run's folder {folder.path}: {error.strerror}")
    process = supervisor.start(folder)
    if detach:
        _tell_detached(folder, json_output)
    raise typer.Exit(watch.watch(folder, process, json_output))


def _tell_detached(run: RunFolder, json_output: bool) -> NoReturn:
    """Print where a run is that goes on by itself, and end."""
    if json_output:
        typer.echo(json.dumps({"name": run.path.name, "path": str(run.path)}))
    else:
        typer.echo(str(run.path))
    raise typer.Exit(0)


def _step_numbers(steps: str | None) -> list[int] | None:
    if steps is None:
        return None
    parts = [part.strip() for part in steps.split(",")]
    if not all(part in ("1", "2", "3") for part in parts):
        _refuse(f"--steps {steps}: steps are 1, 2 and 3, with commas between, such as --steps 1,2")
    return sorted({int(part) for part in parts})


def _next_free(parent: Path, name: str) -> Path:
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment on top of a profile."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    text, stop, _ = " ".join(comment).partition(". ")
    return text + stop.strip()


def _show_plan(plan: Plan, json_output: bool) -> None:
    """The resolved configuration and the commands, the port being one that is free now."""
    import shlex

    from dschat_tui.runs import launch
    from engine.config import to_yaml

    port = plan.config.launch.master_port or launch.free_port()
    commands = {s.name: launch.step_command(plan.config, plan.run, s, port) for s in plan.steps}
    if json_output:
        document: dict[str, Any] = {
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


def _refuse(*reasons: str) -> NoReturn:
    for reason in reasons:
        typer.echo(f"dschat: {reason}", err=True)
    raise typer.Exit(EXIT_REFUSED)


class _keep_stdout_clean:
    """While inside, whatever libraries print on file descriptor 1 goes to stderr."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        self._kept = os.dup(1)
        os.dup2(2, 1)

    def __exit__(self, *details: object) -> None:
        sys.stdout.flush()
        os.dup2(self._kept, 1)
        os.close(self._kept)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
