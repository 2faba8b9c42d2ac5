"""What `dschat data` prints: the table of known data sets, and the report on one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from dschat_tui.text import aligned, clean
from engine.config.steps import pipeline

BAR_WIDTH = 40
SHOWN_CHARACTERS = 600
LEARNT, NOT_LEARNT = "32", "2"


def as_table(entries: list[dict[str, Any]]) -> str:
    """The known data sets, one per line."""
    header = ["name", "language", "steps", "licence", "size"]
    rows = [
        [e["name"], e["language"], ",".join(map(str, e["steps"])), e["licence"], e["size"]]
        for e in entries
    ]
    return aligned(header, rows)


def as_text(document: dict[str, Any], color: bool = False) -> str:
    """The report on one data set; words say, beside the colour, whether a token is learnt."""
    parts = ["\n".join(_head(document)), _lengths(document)]
    if document.get("limits"):
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


def _head(document: dict[str, Any]) -> Iterator[str]:
    rows = document["rows"]
    held_out = "" if rows["held_out"] is None else f", {rows['held_out']} of its own test part"
    yield clean(document["source"])
    yield f"schema  {clean(document['schema'])}"
    yield f"rows    {rows['usable']} usable{held_out}"
    for reason, count in rows["dropped"].items():
        if count:
            first = clean(rows["first_dropped"][reason])
            yield f"        {count} left out ({reason}), first {first}"
    for step, title in _titles(document["alignment"]).items():
        reason = document["steps"][step]["reason"]
        yield f"step {title}: " + (f"no: {reason}" if reason else "yes")


def _lengths(document: dict[str, Any]) -> str:
    eos, lengths = document["eos"], document["lengths"]
    title = (
        f"tokens of {document['rows']['looked_at']} rows (tokenizer of "
        f"{clean(document['tokenizer'])}, EOS {clean(eos['token'])} = {eos['id']})"
    )
    names = [name for name, found in lengths.items() if name != "histogram" and found]
    ends = ("least", "median", "p95", "greatest")
    rows = [[name.replace("_", " "), *(str(lengths[name][end]) for end in ends)] for name in names]
    table = aligned(["", "least", "median", "95 %", "greatest"], rows)
    return "\n".join([title, table, *_bars(lengths["histogram"])])


def _bars(bins: list[dict[str, int]]) -> Iterator[str]:
    """The last length's histogram, a bar of text per bin."""
    most = max((found["rows"] for found in bins), default=0)
    for found in bins:
        bar = "#" * -(-BAR_WIDTH * found["rows"] // most)
        yield f"  up to {found['up_to']:>6} |{bar:<{BAR_WIDTH}}| {found['rows']}"


def _limits(document: dict[str, Any]) -> str:
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


def _sample(sample: dict[str, Any], titles: dict[str, str], color: bool) -> Iterator[str]:
    if "step" not in sample:
        yield f"row {sample['row']}"
        yield _quoted(sample["text"])
        return
    cut = ", cut" if sample.get("truncated") else ""
    title = f"row {sample['row']} as step {titles[str(sample['step'])]} sees it"
    if "left_out" in sample:
        yield f"{title}: left out ({sample['left_out']})"
    elif "text" in sample:
        yield f"{title}: {sample['tokens']} tokens, {sample['learnt']} of them learnt{cut}"
        for text, learnt in sample["text"]:
            style = (LEARNT if learnt else NOT_LEARNT) if color else ""
            yield _quoted(text, "learnt     | " if learnt else "not learnt | ", style)
    else:
        yield title + cut
        for name in ("prompt", "chosen", "rejected"):
            if name in sample:
                label = f"{name}, {sample[f'{name}_tokens']} tokens"
                yield _quoted(sample[name], f"{label:<20} | ")


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
