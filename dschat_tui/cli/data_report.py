"""What `dschat data` prints: the table of known data sets, and the report on one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dschat_tui.text import aligned, clean
from engine.config.steps import pipeline
from engine.data.rows import REASONS

if TYPE_CHECKING:
    from engine.data.catalogue import Entry
    from engine.data.inspection import Bin, Inspection, Sample

BAR_WIDTH = 40
SHOWN_CHARACTERS = 600
LEARNT, NOT_LEARNT = "32", "2"


def as_table(entries: Sequence[Entry]) -> str:
    """The known data sets, one per line."""
    header = ["name", "language", "steps", "licence", "size"]
    rows = [
        [each.name, each.language, ",".join(map(str, each.steps)), each.licence, each.size]
        for each in entries
    ]
    return aligned(header, rows)


def as_text(document: Inspection, color: bool = False) -> str:
    """The report on one data set; words say, beside the colour, whether a token is learnt."""
    parts = ["\n".join(_head(document)), _lengths(document)]
    if "limits" in document:
        parts.append(_limits(document))
    pairs = document.get("pairs")
    if pairs:
        parts.append(
            f"pairs: {pairs['count']}, {pairs['identical']} identical; chosen has more tokens in "
            f"{pairs['chosen_longer']} ({pairs['chosen_longer_share']:.0%})"
        )
    rendered = document.get("rendered", {})
    for name, title in (("used", document["template"]), ("own", "that came with the tokenizer")):
        if name in rendered:
            parts.append(f"row 1 in the template {title}\n" + _quoted(rendered[name]))
    titles = _titles(document["alignment"])
    parts += ["\n".join(_sample(sample, titles, color)) for sample in document["samples"]]
    return "\n\n".join(part for part in parts if part)


def _titles(alignment: str) -> dict[str, str]:
    """Number and title of each step; of a run that ends with step 2, also those of step 3."""
    steps = (*pipeline("ppo"), *pipeline(alignment))
    return {str(step.number): f"{step.number} {step.title}" for step in steps}


def _head(document: Inspection) -> Iterator[str]:
    rows = document["rows"]
    held_out = "" if rows["held_out"] is None else f", {rows['held_out']} of its own test part"
    yield clean(document["source"])
    yield f"schema  {clean(document['schema'])}"
    if document["columns_not_read"]:
        yield f"columns not read: {clean(', '.join(document['columns_not_read']))}"
    yield f"rows    {rows['usable']} usable{held_out}"
    for reason, count in rows["dropped"].items():
        if count:
            first = clean(rows["first_dropped"][reason])
            yield f"        {count} left out ({REASONS[reason]}), first {first}"
    for step, title in _titles(document["alignment"]).items():
        why_not = document["steps"][step]["reason"]
        yield f"step {title}: " + (f"no: {why_not}" if why_not else "yes")


def _lengths(document: Inspection) -> str:
    eos, lengths = document["eos"], document["lengths"]
    title = (
        f"tokens of {document['rows']['looked_at']} rows (tokenizer of "
        f"{clean(document['tokenizer'])}, EOS {clean(eos['token'])} = {eos['id']})"
    )
    spreads = {
        "text": lengths.get("text"),
        "prompt": lengths.get("prompt"),
        "chosen": lengths.get("chosen"),
        "rejected": lengths.get("rejected"),
        "prompt and chosen": lengths.get("prompt_and_chosen"),
    }
    rows = [[name, *map(str, found.values())] for name, found in spreads.items() if found]
    table = aligned(["", "least", "median", "95 %", "greatest"], rows)
    return "\n".join([title, table, *_bars(lengths["histogram"])])


def _bars(bins: list[Bin]) -> Iterator[str]:
    """The last length's histogram, a bar of text per bin."""
    most = max((found["rows"] for found in bins), default=0)
    for found in bins:
        bar = "#" * -(-BAR_WIDTH * found["rows"] // most)
        yield f"  up to {found['up_to']:>6} |{bar:<{BAR_WIDTH}}| {found['rows']}"


def _limits(document: Inspection) -> str:
    header = ["step", "limit", "rows", "truncated", "too long", "identical", "with EOS", "learnt"]
    rows = []
    for step, found in document["limits"].items():
        seen, kept, share = found["rows"], found["kept"], found["trained_token_share"]
        eos = "-" if found["with_eos"] is None else f"{found['with_eos']} of {kept}"
        rows.append(
            [
                _titles(document["alignment"])[step],
                str(found["max_tokens"]),
                str(seen),
                _part(found["truncated"], seen),
                _part(found["dropped_long"], seen),
                _part(found["dropped_identical"], seen),
                eos,
                "-" if share is None else f"{share:.0%} of tokens",
            ]
        )
    return aligned(header, rows)


def _part(count: int, total: int) -> str:
    return f"{count} ({count / total:.0%})" if count else "0"


def _sample(sample: Sample, titles: dict[str, str], color: bool) -> Iterator[str]:
    text = sample.get("text")
    if isinstance(text, str):
        yield f"row {sample['row']}"
        yield _quoted(text)
        return
    cut = ", cut" if sample.get("truncated") else ""
    title = f"row {sample['row']} as step {titles[str(sample['step'])]} sees it"
    if "left_out" in sample:
        yield f"{title}: left out ({sample['left_out']})"
    elif text is not None:
        yield f"{title}: {sample['tokens']} tokens, {sample['learnt']} of them learnt{cut}"
        for piece, learnt in text:
            style = (LEARNT if learnt else NOT_LEARNT) if color else ""
            yield _quoted(piece, "learnt     | " if learnt else "not learnt | ", style)
    else:
        yield title + cut
        texts = {
            "prompt": (sample.get("prompt"), sample.get("prompt_tokens")),
            "chosen": (sample.get("chosen"), sample.get("chosen_tokens")),
            "rejected": (sample.get("rejected"), sample.get("rejected_tokens")),
        }
        for name, (shown, tokens) in texts.items():
            if shown is not None:
                label = f"{name}, {tokens} tokens"
                yield _quoted(shown, f"{label:<20} | ")


def _quoted(text: str, label: str = "| ", style: str = "") -> str:
    """Text line by line after a label, escaped, and cut where it is long."""
    more = len(text) - SHOWN_CHARACTERS
    lines = [clean(line) for line in text[:SHOWN_CHARACTERS].splitlines()] or [""]
    if more > 0:
        lines[-1] += f" [and {more} more characters]"
    if style:
        lines = [f"\x1b[{style}m{line}\x1b[0m" if line else line for line in lines]
    marks = [label, *[" " * (len(label) - 2) + "| "] * (len(lines) - 1)]
    return textwrap.indent(
        "\n".join(mark + line for mark, line in zip(marks, lines, strict=True)), "  "
    )
