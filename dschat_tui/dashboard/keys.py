"""The keys of the dashboard: each is one entry, which makes its binding, its hint and its help.

The table has the keys of screens and of lists. Those of charts, of a tab or of a
panel are in the file of that widget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from textual.binding import Binding, BindingType

from engine.config.steps import STEPS


class Key(NamedTuple):
    """A key: its heading in the help, its id, Textual's names of it, its action, what it is for.

    `display` is how it is shown. `hint` orders the keys in the bottom row, the lowest first; those
    with 0 are in the help only. `acts`: it starts, stops or deletes something, so it is refused
    right after the screen has changed.
    """

    scope: str
    id: str
    keys: str
    action: str
    description: str
    display: str
    hint: int = 0
    acts: bool = False


KEYS = (
    Key("app", "app.quit", "q,ctrl+c", "leave", "quit", "q", 10),
    Key("app", "app.help", "question_mark", "help", "help", "?", 12),
    Key("start", "start.start", "s", "start", "start it", "s", 1, acts=True),
    Key("start", "start.next", "tab", "panel(1)", "panel", "tab", 20),
    Key("start", "start.previous", "shift+tab", "panel(-1)", "previous panel", "shift+tab"),
    Key("start", "start.filter", "slash", "filter", "filter", "/", 21),
    Key("start", "start.fix", "w", "apply_fix", "apply the fix", "w", 22),
    Key("start", "start.data", "d", "data", "view the data", "d", 25),
    Key("start", "start.copy", "y", "copy", "copy command", "y", 23),
    Key("start", "start.save", "v", "save", "save as profile", "v", 24),
    Key("start", "start.runs", "r", "app.show_runs", "runs", "r", 11),
    Key(
        "start",
        "start.back",
        "escape",
        "back",
        "close the prompt or this screen",
        "esc",
    ),
    Key("pages", "pages.close", "escape,q,question_mark", "close", "close", "esc", 1),
    Key("sweep", "sweep.back", "escape", "back", "previous screen", "esc"),
    Key("steps", "steps.step1", "1", "show_step(0)", "step 1", "1"),
    Key("steps", "steps.step2", "2", "show_step(1)", "step 2", "2"),
    Key("steps", "steps.step3", "3", "show_step(2)", "step 3", "3"),
    Key("run", "run.back", "escape", "back", "back to the charts, or to the runs", "esc"),
    Key("run", "run.latest", "0", "latest_step", "the running step", "0"),
    Key("run", "run.pause", "p", "pause", "pause", "p", 45),
    Key("run", "run.stop", "x", "stop", "stop", "x", 11, acts=True),
    Key("run", "run.resume", "u", "resume", "resume a stopped or paused run", "u", acts=True),
    Key("run", "run.search", "slash", "search", "search", "/", 32),
    Key("run", "run.chat", "t", "chat", "chat with its model", "t", 33),
    Key("chat", "chat.stop", "escape,ctrl+c", "screen.interrupt", "stop the answer", "esc", 1),
    Key("chat", "chat.back", "ctrl+d", "screen.back", "leave, keep it running", "^d", 2),
    Key("chat", "chat.second", "ctrl+n", "screen.second", "second model", "^n", 3),
    Key("chat", "chat.address", "tab", "screen.address", "which model you ask", "tab", 4),
    Key("chat", "chat.up", "pageup", "screen.scroll(-1)", "earlier", "pgup", 5),
    Key("chat", "chat.down", "pagedown", "screen.scroll(1)", "later", "pgdn", 6),
    Key("runs", "runs.back", "escape", "back", "back", "esc"),
    Key("runs", "runs.open", "o", "open", "open", "enter", 1),
    Key("runs", "runs.mark", "m", "mark", "mark", "m", 2),
    Key("runs", "runs.compare", "c", "compare", "compare marked runs", "c", 3),
    Key("runs", "runs.chat", "t", "chat", "chat with its model", "t"),
    Key("runs", "runs.stop", "x", "stop", "stop", "x", 4, acts=True),
    Key("runs", "runs.resume", "u", "resume", "resume", "u", 5, acts=True),
    Key("runs", "runs.new", "n", "app.show_start", "new run", "n", 7),
    Key("runs", "runs.delete", "d,delete", "delete", "delete", "d", 6, acts=True),
    Key("compare", "compare.back", "escape", "back", "back", "esc", 1),
    # Beside the steps of PPO, which have their keys on every screen with steps.
    *(
        Key(
            "compare",
            f"compare.step{place}",
            str(place),
            f"show_step({place - 1})",
            f"step {step.number} of {step.short_title}",
            str(place),
        )
        for place, step in enumerate(STEPS[3:], 4)
    ),
    Key("compare", "compare.differences", "d", "differences", "differences", "d", 2),
    Key("list", "list.up", "up,k", "line(-1)", "up", "up"),
    Key("list", "list.down", "down", "line(1)", "down", "down"),
    Key("list", "list.page_up", "pageup", "page(-1)", "page up", "pgup"),
    Key("list", "list.page_down", "pagedown,space", "page(1)", "page down", "pgdn"),
    Key("list", "list.first", "home", "first", "first", "home"),
    Key("list", "list.last", "end,G", "last", "last", "end"),
    Key("list", "list.shift_left", "left_square_bracket", "shift(-1)", "scroll left", "["),
    Key("list", "list.shift_right", "right_square_bracket", "shift(1)", "scroll right", "]"),
    Key("list", "list.pick", "enter", "pick", "open", "enter"),
)


@dataclass(frozen=True)
class KeyBinding(Binding):
    """A binding that remembers the entry it was made from."""

    entry: Key | None = None


def bind(entries: Iterable[Key], through: str = "") -> list[BindingType]:
    """Textual's bindings of some keys.

    Args:
        entries: the keys.
        through: the screen's action that takes theirs as an argument and passes it to a widget, for
            keys that work wherever the focus is.
    """
    return [
        KeyBinding(
            key.keys,
            f"{through}({key.action!r})" if through else key.action,
            key.description,
            show=False,
            id=key.id,
            entry=key,
        )
        for key in entries
    ]


def bindings(*scopes: str) -> list[BindingType]:
    """Textual's bindings of some scopes of the table."""
    return bind(key for key in KEYS if key.scope in scopes)


def keys_of(kinds: Iterable[type]) -> list[Key]:
    """The keys that classes of screens and widgets bind, each once."""
    entries = (
        binding.entry
        for kind in kinds
        for base in kind.__mro__
        for binding in base.__dict__.get("BINDINGS", ())
        if isinstance(binding, KeyBinding)
    )
    return list(dict.fromkeys(entry for entry in entries if entry is not None))


@lru_cache(maxsize=64)
def acting(kind: type) -> frozenset[str]:
    """The actions of a class's keys that start, stop or delete something."""
    return frozenset(key.action.partition("(")[0] for key in keys_of([kind]) if key.acts)


def hints(*kinds: type) -> list[tuple[str, str]]:
    """Keys of some classes and what they do, the most useful first: for the bottom row."""
    shown = sorted((key for key in keys_of(kinds) if key.hint), key=lambda key: key.hint)
    return [(key.display, key.description) for key in shown]
