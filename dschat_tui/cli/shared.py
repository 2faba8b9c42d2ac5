"""What the commands share: their exit codes, common arguments, refusals."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from dschat_tui.runs.folder import RunFolder
    from engine.config.schema import RunConfig

EXIT_FAILED = 1
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130


def complete_profile(incomplete: str) -> list[str]:
    """Names of profiles with a prefix, for the shell's completion."""
    from engine.config.loading import profile_names

    return [name for name in profile_names() if name.startswith(incomplete)]


ProfileOption = Annotated[
    str,
    typer.Option(
        help="Name of a profile (`dschat profiles list`), or a YAML file.",
        autocompletion=complete_profile,
    ),
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one option; see `dschat options`."),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(help="Data set in place of data.sources; can be given several times."),
]
AcceptOption = Annotated[
    str | None,
    typer.Option(
        metavar="REASON", help="Continue past a gate that was not reached, and record why."
    ),
]
DetachFlag = Annotated[bool, typer.Option("--detach", help="Start it, print its folder, and end.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def group(help: str) -> typer.Typer:
    """A group of commands; help and errors as plain text, without the import of rich."""
    return typer.Typer(help=help, no_args_is_help=True, rich_markup_mode=None)


def refuse(*reasons: str) -> NoReturn:
    for reason in reasons:
        typer.echo(f"dschat: {reason}", err=True)
    raise typer.Exit(EXIT_REFUSED)


def load_config(profile: str, data: list[str], assignments: list[str]) -> RunConfig:
    from engine.config.loading import ConfigError, apply_overrides, read_profile, resolve, set_value

    try:
        values = apply_overrides(read_profile(profile), assignments)
        if data:
            set_value(values, "data.sources", [{"path": path} for path in data])
        return resolve(values, f"profile {profile}")
    except ConfigError as error:
        refuse(str(error))


def find_run(name: str) -> RunFolder:
    from dschat_tui.runs.control import NoSuchRun, find_run

    try:
        return find_run(name)
    except NoSuchRun as error:
        refuse(str(error))


class keep_stdout_clean:
    """While inside, whatever libraries print on file descriptor 1 goes to stderr."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        self._kept = os.dup(1)
        os.dup2(2, 1)

    def __exit__(self, *details: object) -> None:
        sys.stdout.flush()
        os.dup2(self._kept, 1)
        os.close(self._kept)
