"""Text from logs and models made safe to print, short numbers, and the glyphs of both alphabets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dschat_tui.machine import GIB

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
# control characters, and those that reverse the direction of text or are invisible
_INVISIBLE = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
# Control characters as their pictures; the marks that reorder text, and C1 controls, as escapes.
_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_HIDDEN = [*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
_VISIBLE = str.maketrans(
    {**_PICTURES, 0x7F: "\u2421", **{code: f"\\u{code:04x}" for code in _HIDDEN}}
)
_LONG_SECONDS = 48 * 3600
_NOT_ASCII = re.compile(r"[^\x20-\x7e]")


def clean(text: str, ascii_only: bool = False) -> str:
    """One line of text without terminal escapes and control characters.

    Of a line that carriage returns overwrite, the last text is taken, as a terminal would show it.
    """
    text = _ESCAPE.sub("", text).rstrip("\r\n")
    if "\r" in text:
        text = next((part for part in reversed(text.split("\r")) if part.strip()), "")
    text = _INVISIBLE.sub("", text.expandtabs(4))
    return _NOT_ASCII.sub("?", text) if ascii_only else text


def visible(text: str) -> str:
    """Text in which nothing can move the cursor, colour the screen or reorder lines."""
    return text.translate(_VISIBLE)


def plain(text: str) -> str:
    """Text of any number of lines, each made safe by `clean`."""
    return "\n".join(clean(line) for line in text.split("\n"))


def one_line(text: str) -> str:
    """Text of any number of lines made safe and joined into one, with single spaces."""
    return " ".join(plain(text.replace("\n", " ")).split())


def short_number(value: float, width: int = 6) -> str:
    """A number in at most `width` cells (of 6 or more), with as many digits as fit."""
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if 1e3 <= abs(value) < 10 ** (width - (value < 0)) - 1:
        return f"{value:.0f}"
    for form in (".4g", ".3g", ".2g", ".1g", ".1e", ".0e"):
        text = f"{value:{form}}"
        if "e" in text:
            mantissa, exponent = text.split("e")
            text = f"{mantissa}e{int(exponent)}"
        if len(text) <= width:
            return text
    return "0" if abs(value) < 1 else text[:width]


def figure(value: object) -> str:
    """A float with four significant digits; anything else as it is, None as `-`."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def gib(size: int) -> str:
    """Bytes as GiB with three significant digits; 0 as `-`."""
    return f"{size / GIB:.3g}" if size else "-"


def duration(seconds: float) -> str:
    """Seconds as `4:05`, `1:02:03` or `9 d 8 h`."""
    if seconds >= _LONG_SECONDS:
        return f"{int(seconds) // 86400} d {int(seconds) // 3600 % 24} h"
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shown_path(path: Path) -> str:
    """A path relative to the working folder if it is inside it, else unchanged."""
    working = Path.cwd()
    return str(path.relative_to(working)) if path.is_relative_to(working) else str(path)


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell, with a rule under the header."""
    rule = ["-" * max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return padded([header, rule, *rows])


def padded(lines: Sequence[Sequence[str]]) -> str:
    """Cells line by line, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = ("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def option_text(value: object) -> str:
    """The value of an option as it would be written in a profile."""
    if value is None or value == {}:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        import yaml

        return yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
    if isinstance(value, (list, tuple)):
        return ",".join(str(getattr(item, "path", item)) for item in value) or "empty"
    return str(value)


@dataclass(frozen=True)
class Glyphs:
    """The characters that the screens draw with."""

    done: str
    running: str
    pending: str
    failed: str
    stopped: str
    arrow: str
    dot: str
    axis: str
    tick: str
    bad: str
    above: str
    below: str
    cursor: str
    parts: tuple[str, str, str]
    lines: tuple[str, ...]
    check: str
    cut: str


UNICODE = Glyphs(
    done="✓",
    running="●",
    pending="○",
    failed="✗",
    stopped="■",
    arrow="→",
    dot="·",
    axis="│",
    tick="┤",
    bad="×",
    above="↑",
    below="↓",
    cursor="│",
    parts=("█", "▒", "░"),
    lines=("━", "┄", "┈", "╍", "═", "╌"),
    check="▲",
    cut="…",
)
ASCII = Glyphs(
    done="+",
    running=">",
    pending=".",
    failed="X",
    stopped="#",
    arrow="->",
    dot="-",
    axis="|",
    tick="+",
    bad="X",
    above="^",
    below="v",
    cursor="|",
    parts=("#", "=", "."),
    lines=("*", "o", "+", "x", "=", "%"),
    check="!",
    cut="~",
)
