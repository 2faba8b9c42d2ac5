"""Commands that read what a run left: metrics, monitor, eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dschat_tui.cli.shared import JsonFlag, keep_stdout_clean, refuse

_PAIR_TEXTS = ("prompt", "chosen", "rejected")
_PAIR_CELLS = 40


def metrics(
    path: Annotated[Path, typer.Argument(help="Folder of a run, of a step, or a training.log.")],
    json_output: JsonFlag = False,
) -> None:
    """Read what a run, or a training.log, says."""
    from engine.log import documents

    log = path / "training.log" if (path / "training.log").is_file() else path
    if log.is_file():
        document = documents.read_document(log)
    elif path.is_dir():
        document = documents.read_run(path)
        if not document["steps"]:
            refuse(f"{path} holds no training.log of a step. Give the folder of a run, or a log")
    else:
        refuse(f"{path} does not exist. Give the folder of a run, or a training.log")
    if json_output:
        typer.echo(documents.to_json(document))
        return
    from dschat_tui.cli import tables

    typer.echo(tables.log_document(document))


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
        refuse(str(error))
    from dschat_tui.dashboard import app as dashboard

    shown = dashboard.Dashboard(source, ascii_only=ascii_only, speed=speed if replay else None)
    if once:
        typer.echo(dashboard.once(shown))
    elif dashboard.has_terminal():
        raise typer.Exit(dashboard.show(shown))
    else:
        refuse("there is no terminal here. Use `dschat monitor PATH --once` for one frame as text")


def evaluate_run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[reward] RUN",
            help="Folder of a run; after the word reward, its reward model scores --data.",
        ),
    ],
    data: Annotated[
        Path | None, typer.Option(help="With reward: a file of pairs, chosen and rejected.")
    ] = None,
    json_output: JsonFlag = False,
) -> None:
    """Compare base, SFT model and actor of a run on held-out prompts, or score pairs."""
    scores_pairs = words[0] == "reward" and (len(words) > 1 or data is not None)
    paths = words[1:] if scores_pairs else words
    if len(paths) != 1 or scores_pairs != (data is not None):
        refuse("give `dschat eval RUN`, or `dschat eval reward RUN --data FILE`")
    path = Path(paths[0])
    if not (path / "run.yaml").is_file():
        refuse(f"{path} holds no run.yaml, so it is no run. Give the folder of a run")
    from dschat_tui.cli import tables
    from engine.log import documents

    document = _score_pairs(path, data) if data is not None else _evaluate(path)
    if json_output:
        typer.echo(documents.to_json(document, indent=2))
        return
    typer.echo(tables.evaluation(document) if data is None else _pairs_table(document))


def _evaluate(run: Path) -> dict[str, Any]:
    with keep_stdout_clean():
        from engine.evaluation import evaluate

        return evaluate(run)


def _score_pairs(run: Path, data: Path) -> dict[str, Any]:
    if not data.exists():
        refuse(f"--data {data} does not exist. Give a file of pairs: prompt, chosen, rejected")
    with keep_stdout_clean():
        from engine.evaluation import score_pairs

        try:
            return score_pairs(run, data)
        except (FileNotFoundError, ValueError) as error:
            refuse(str(error))


def _pairs_table(document: dict[str, Any]) -> str:
    """Each pair with both scores, then how often and by how much the chosen one wins."""
    from dschat_tui.cli import tables

    rows = []
    for number, pair in enumerate(document["scores"], 1):
        texts = [" ".join(tables.plain(pair[name]).split()) for name in _PAIR_TEXTS]
        scores = [f"{pair['chosen_score']:.4g}", f"{pair['rejected_score']:.4g}"]
        shortened = [
            f"{text[:_PAIR_CELLS]}..." if len(text) > _PAIR_CELLS else text for text in texts
        ]
        rows.append([str(number), *scores, *shortened])
    header = ["pair", "chosen", "rejected", "question", "chosen answer", "rejected answer"]
    lines = [tables.aligned(header, rows)]
    if document["pairs"]:
        lines.append(
            f"{document['pairs']} pairs, accuracy {document['accuracy']:.4g}, "
            f"margin {document['margin']:.4g}"
        )
    if document["left_out"]:
        lines.append(f"{document['left_out']} left out: no pair, or longer than the model reads")
    return "\n".join(lines)
