"""`dschat profiles ...`: named configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dschat_tui.commands.shared import JsonFlag, group, refuse

profiles_app = group("Profiles: named configurations.")


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
        refuse(str(error))
    typer.echo(path.read_text(encoding="utf-8"), nl=False)


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment on top of a profile."""
    comment = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        comment.append(line.lstrip("# "))
    text, stop, _ = " ".join(comment).partition(". ")
    return text + stop.strip()
