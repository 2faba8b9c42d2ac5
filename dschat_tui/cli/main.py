"""`dschat`: the command line. Each command checks its arguments, then imports what it needs."""

from __future__ import annotations

import typer

from dschat_tui.cli.chat import chat
from dschat_tui.cli.data import data_app
from dschat_tui.cli.doctor import doctor
from dschat_tui.cli.evaluate import evaluate_run
from dschat_tui.cli.metrics import metrics
from dschat_tui.cli.models import models_app
from dschat_tui.cli.monitor import monitor
from dschat_tui.cli.options import show_options
from dschat_tui.cli.plan import plan
from dschat_tui.cli.profiles import profiles_app
from dschat_tui.cli.run import run
from dschat_tui.cli.runs import runs_app
from dschat_tui.cli.sweep import sweep_app

# rich_markup_mode=None: help and usage errors as plain text, without the import of rich
app = typer.Typer(
    name="dschat",
    help="Train a ChatGPT-style model in three steps (SFT, reward model, RLHF) on DeepSpeed.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.add_typer(runs_app, name="runs")
app.add_typer(sweep_app, name="sweep")
app.command()(chat)
app.command()(monitor)
app.command()(metrics)
app.command(name="eval")(evaluate_run)
app.command()(plan)
app.add_typer(profiles_app, name="profiles")
app.add_typer(models_app, name="models")
app.add_typer(data_app, name="data")
app.command()(doctor)
app.command(name="options")(show_options)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
