"""`dschat eval`: the models of a run on held-out prompts, or its reward model on pairs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dschat_tui.cli.shared import JsonFlag, keep_stdout_clean, refuse
from dschat_tui.text import aligned, figure, one_line

if TYPE_CHECKING:
    from engine.evaluation import Evaluation, ScoredPairs

_PAIR_CELLS = 40


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
    from engine.log.documents import to_json

    if data is None:
        figures = _evaluate(path)
        typer.echo(to_json(figures, indent=2) if json_output else _comparison_table(figures))
    else:
        pairs = _score_pairs(path, data)
        typer.echo(to_json(pairs, indent=2) if json_output else _pairs_table(pairs))


def _evaluate(run: Path) -> Evaluation:
    with keep_stdout_clean():
        from engine.evaluation import evaluate

        return evaluate(run)


def _score_pairs(run: Path, data: Path) -> ScoredPairs:
    if not data.exists():
        refuse(f"--data {data} does not exist. Give a file of pairs: prompt, chosen, rejected")
    with keep_stdout_clean():
        from engine.evaluation import score_pairs

        try:
            return score_pairs(run, data)
        except (FileNotFoundError, ValueError) as error:
            refuse(str(error))


def _pairs_table(document: ScoredPairs) -> str:
    """Each pair with both scores, then how often and by how much the chosen one wins."""
    rows = []
    for number, pair in enumerate(document["scores"], 1):
        texts = [one_line(text) for text in (pair["prompt"], pair["chosen"], pair["rejected"])]
        scores = [f"{pair['chosen_score']:.4g}", f"{pair['rejected_score']:.4g}"]
        shortened = [
            f"{text[:_PAIR_CELLS]}..." if len(text) > _PAIR_CELLS else text for text in texts
        ]
        rows.append([str(number), *scores, *shortened])
    header = ["pair", "chosen", "rejected", "question", "chosen answer", "rejected answer"]
    lines = [aligned(header, rows)]
    if document["pairs"]:
        lines.append(
            f"{document['pairs']} pairs, accuracy {document['accuracy']:.4g}, "
            f"margin {document['margin']:.4g}"
        )
    if document["left_out"]:
        lines.append(f"{document['left_out']} left out: no pair, or longer than the model reads")
    return "\n".join(lines)


def _comparison_table(document: Evaluation) -> str:
    """Models side by side on held-out prompts, and the accuracy of what rates answers."""
    names = ("perplexity", "reward_mean", "reward_std", "exact_match", "preferred_style", "kl")
    rows = [
        [model, *(figure(values.get(name)) for name in names)]
        for model, values in document["models"].items()
    ]
    lines = [f"{document['prompts']} held-out prompts", aligned(["model", *names], rows)]
    rated_by = {
        "reward model": document["reward_model"],
        "implicit rewards": document["implicit_rewards"],
    }
    for name, rated in rated_by.items():
        if rated:
            lines.append(
                f"{name}: accuracy {figure(rated['accuracy'])}, margin "
                f"{figure(rated['margin'])} on {rated['pairs']} pairs"
            )
            lines += [f"  {kind}: {figure(share)}" for kind, share in rated["kinds"].items()]
    for sample in document["answers"]:
        lines += ["", one_line(sample["prompt"])]
        answers = {name: text for name, text in sample.items() if name != "prompt"}
        width = max(len(name) for name in answers)
        lines += [f"  {name:<{width}}  {one_line(text)}" for name, text in answers.items()]
    return "\n".join(lines)
