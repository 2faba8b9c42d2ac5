"""The reference of all options, as text for the terminal and as Markdown for the documentation."""

from __future__ import annotations

import json

from dschat_tui.text import option_text
from engine.config.loading import ConfigError, Option, describe_type, options


def find_options(prefix: str) -> list[Option]:
    """Options of a key or a group; all of them for an empty prefix.

    Raises:
        ConfigError: nothing has that name.
    """
    found = [
        o for o in options() if not prefix or o.key == prefix or o.key.startswith(f"{prefix}.")
    ]
    if not found:
        raise ConfigError(f"no option or group {prefix!r}; `dschat options` lists all")
    return found


def as_text(found: list[Option]) -> str:
    """One paragraph per option: key, title, type, unit, default, help."""
    blocks = []
    for option in found:
        unit = f", {option.unit}" if option.unit else ""
        facts = f"{describe_type(option.annotation)}{unit}; default {option_text(option.default)}"
        blocks.append(f"{option.key}  ({facts})\n    {option.title}: {option.help}")
    return "\n".join(blocks)


def as_json(found: list[Option]) -> str:
    """A JSON list of the options."""
    rows = [
        {
            "key": option.key,
            "title": option.title,
            "type": describe_type(option.annotation),
            "unit": option.unit,
            "default": option_text(option.default),
            "help": option.help,
        }
        for option in found
    ]
    return json.dumps(rows, indent=2)


def as_markdown() -> str:
    """The whole of docs/options.md, one table per group."""
    lines = [
        "# Options",
        "",
        "Made by `dschat options --markdown` from the typed configuration; not edited by hand.",
        "Each can stand in a profile, or be set for one run: `dschat run --set KEY=VALUE`.",
    ]
    group = ""
    for option in options():
        head = option.key.split(".")[0] if "." in option.key else "general"
        if head != group:
            group = head
            lines += ["", f"## {group}", "", "| option | type | default | what it does |"]
            lines += ["| --- | --- | --- | --- |"]
        kind = describe_type(option.annotation).replace("|", " or ")
        unit = f" ({option.unit})" if option.unit else ""
        text = f"{option.title}. {option.help}".replace("|", "\\|")
        lines.append(f"| `{option.key}` | {kind}{unit} | {option_text(option.default)} | {text} |")
    return "\n".join(lines) + "\n"
