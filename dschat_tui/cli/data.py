"""`dschat data ...`: what a data set holds, and what each step would see of it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dschat_tui.cli.shared import (
    Assignments,
    JsonFlag,
    ProfileOption,
    group,
    keep_stdout_clean,
    load_config,
    refuse,
)
from engine.config.steps import pipeline

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedTokenizerBase

    from engine.config.schema import DataSource, RunConfig

data_app = group("Data sets: list those known by name, inspect one, export what a step sees.")

SourceArgument = Annotated[
    str, typer.Argument(help="A file, a folder, the name of a data set, or embedded:NAME.")
]


@data_app.command(name="list")
def list_data_sets(json_output: JsonFlag = False) -> None:
    """List the data sets that are known by name, those of DeepSpeed-Chat."""
    from dschat_tui.cli import data_report
    from engine.data import catalogue

    if not json_output:
        typer.echo(data_report.as_table(catalogue.DATA_SETS))
        return
    entries = [
        {
            "name": entry.name,
            "language": entry.language,
            "steps": list(entry.steps),
            "licence": entry.licence,
            "size": entry.size,
            "mapping": entry.describe(),
        }
        for entry in catalogue.DATA_SETS
    ]
    typer.echo(json.dumps(entries, indent=2))


@data_app.command(name="inspect")
def inspect_data(
    source: SourceArgument,
    profile: ProfileOption = "tiny",
    assignments: Assignments = None,
    rows: Annotated[
        int, typer.Option(min=1, help="Most rows to tokenise, spread evenly over the data.")
    ] = 2000,
    samples: Annotated[int, typer.Option(min=0, help="First rows to show decoded.")] = 2,
    json_output: JsonFlag = False,
) -> None:
    """Say what a data set holds and what each step would see of it, with a profile's settings."""
    config, named = _configuration(source, profile, assignments)
    _check_readable(named)
    from engine.data.files import DataError
    from engine.models.folders import ModelError

    try:
        with keep_stdout_clean():
            from engine.data import inspection

            tokenizer, own_template = _tokenizer(config)
            document = inspection.inspect(
                config, named, tokenizer, own_template, rows, samples, note=_note
            )
    except (DataError, ModelError) as error:
        refuse(str(error))
    from dschat_tui.runs.models import actor_of

    document |= {"profile": profile, "tokenizer": actor_of(config.models).name}
    if json_output:
        typer.echo(json.dumps(document, indent=2, allow_nan=False))
        return
    from dschat_tui.cli import data_report

    color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    typer.echo(data_report.as_text(document, color))


@data_app.command(name="export")
def export_data(
    source: SourceArgument,
    step: Annotated[int, typer.Option(min=1, max=3, help="The step whose rows are written.")],
    output: Annotated[Path, typer.Option(help="File to write, one JSON object per line.")],
    profile: ProfileOption = "tiny",
    assignments: Assignments = None,
) -> None:
    """Write the rows that a step will see: text, token ids, labels, chosen and rejected."""
    config, named = _configuration(source, profile, assignments)
    last = pipeline(config.alignment)[-1].number
    if step > last:
        refuse(
            f"--step {step}: a run with alignment={config.alignment} ends after step {last}. "
            f"Give {last} or less"
        )
    if output.exists():
        refuse(f"--output {output} exists; dschat never overwrites. Choose another file")
    if not output.absolute().parent.is_dir():
        refuse(f"--output {output}: there is no folder {output.parent}. Make it first")
    _check_readable(named)
    from engine.data import checks, files, schemas
    from engine.models.folders import ModelError

    reasons = checks.refusals(config, [step])
    if reasons:
        refuse(*reasons)
    try:
        with keep_stdout_clean():
            from engine.data import inspection

            tokenizer, _ = _tokenizer(config)
            found = inspection.exported(config, tokenizer, schemas.PHASES[step - 1], note=_note)
            count = _write_lines(output, found)
    except (files.DataError, ModelError) as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"cannot write --output {output}: {error.strerror or error}")
    typer.echo(f"{count} rows of step {step} in {output}")


def _configuration(
    source: str, profile: str, assignments: list[str] | None
) -> tuple[RunConfig, DataSource]:
    """A profile's configuration with one source, mapped as the profile does if it names it."""
    from engine.config.schema import DataSource

    config = load_config(profile, [], assignments or [])
    data = config.data
    known = [*data.sources, *data.sft_only_sources, *data.unsupervised_sources]
    named = next((s for s in known if s.path == source), DataSource(path=source))
    data.sources, data.sft_only_sources, data.unsupervised_sources = [named], [], []
    return config, named


def _check_readable(source: DataSource) -> None:
    """Refuse a source that is not there or broken, before anything heavy is imported."""
    from engine.data import checks, files, schemas

    try:
        schema = schemas.schema_of(source)
        if schema is not None and files.is_local(source.path):
            checks.check_rows(source, schema)
    except files.DataError as error:
        refuse(str(error))


def _tokenizer(config: RunConfig) -> tuple[PreTrainedTokenizerBase, str | None]:
    """The tokenizer as step 1 uses it, and the chat template that came with it."""
    from dschat_tui.runs.models import actor_of
    from engine.data.templates import install_template
    from engine.models.load import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(
        resolve_model(actor_of(config.models).name),
        trust_remote_code=config.models.trust_remote_code,
        end_of_conversation_token=config.data.end_of_conversation_token,
    )
    own = tokenizer.chat_template
    install_template(tokenizer, config.data.template)
    return tokenizer, own


def _write_lines(output: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Write rows, so that the file is complete or absent; their number."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}.new")
    count = 0
    try:
        with temporary.open("x", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += 1
        temporary.rename(output)
    finally:
        temporary.unlink(missing_ok=True)
    return count


def _note(text: str) -> None:
    typer.echo(text, err=True)
