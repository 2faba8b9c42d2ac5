"""`dschat models ...`: models that can be fetched by name."""

from __future__ import annotations

from typing import Annotated

import typer

from dschat_tui.cli.shared import group, keep_stdout_clean, refuse

models_app = group("Models that can be fetched by name.")


@models_app.command(name="get")
def get_model(name: Annotated[str, typer.Argument(help="Name of a model.")]) -> None:
    """Fetch a model and print its folder; its size is printed first."""
    from engine.models import catalogue
    from engine.models.folders import ModelError

    try:
        with keep_stdout_clean():
            folder = catalogue.fetch(name, note=lambda text: typer.echo(text, err=True))
    except ModelError as error:
        refuse(str(error))
    typer.echo(str(folder))
