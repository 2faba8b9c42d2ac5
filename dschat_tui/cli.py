"""`dschat`: the command line. Each command checks its arguments, then imports what it needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
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
app.add_typer(profiles_app, name="profiles")
app.add_typer(models_app, name="models")

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
    json_output: JsonFlag = False,
) -> None:
    """Run the steps one after another: SFT, reward model, RLHF."""
    from dschat_tui.runs.preflight import Refusal, prepare

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
