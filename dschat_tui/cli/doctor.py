"""`dschat doctor`: what this machine has for training, what it lacks, and what to do about it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dschat_tui.cli.shared import EXIT_FAILED, JsonFlag

if TYPE_CHECKING:
    from dschat_tui.doctor import Finding


def doctor(
    hostfile: Annotated[
        Path | None, typer.Option(help="Check the hosts of this file too, by ssh.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Report what this machine has for training, what it lacks, and what to do about it.

    Exits with 1 where there is a problem.
    """
    from dschat_tui.doctor import PROBLEM, examine

    findings = examine(hostfile)
    typer.echo(_as_json(findings) if json_output else _as_text(findings))
    if any(finding.state == PROBLEM for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _as_text(findings: list[Finding]) -> str:
    """A line per finding, and below it what to do."""
    width = max(len(finding.title) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.state:<7}  {finding.title:<{width}}  {finding.value}")
        if finding.advice:
            lines.append(f"{'':<7}  {'':<{width}}  -> {finding.advice}")
    return "\n".join(lines)


def _as_json(findings: list[Finding]) -> str:
    """All findings as one document."""
    return json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2)
