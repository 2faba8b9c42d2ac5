"""Every key of the dashboard: one table for bindings, hints, help and a keymap by ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from textual.binding import Binding, BindingType


class Key(NamedTuple):
    """A key: where it works, its id, Textual's names of it, what it does, and how it is shown.

    `hint` orders the keys in the row at the bottom, the lowest first; 0 stands in help alone.
    `acts`: it starts, stops or deletes something, so a letter typed for another screen must not.
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
    *(
        Key(
            "start",
            f"start.group{n}",
            str(n),
            f"group({n - 1})",
            f"group {n} of the options",
            str(n),
        )
        for n in range(1, 8)
    ),
    Key("start", "start.filter", "slash", "filter", "filter", "/", 21),
    Key("start", "start.way_out", "w", "way_out", "set what is needed", "w", 22),
    Key("start", "start.data", "d", "data", "look at the data", "d", 25),
    Key("start", "start.copy", "y", "copy", "copy command", "y", 23),
    Key("start", "start.save", "v", "save", "save as profile", "v", 24),
    Key("start", "start.runs", "r", "app.show_runs", "runs", "r", 11),
    Key("start", "start.back", "escape", "back", "end typing, the filter, this screen", "esc"),
    Key("form", "form.change", "space,enter,right", "screen.change(1)", "change, or type", "space"),
    Key("form", "form.change_back", "left", "screen.change(-1)", "the value before", "left"),
    Key("form", "form.reset", "backspace,delete", "screen.reset", "as in the profile", "backspace"),
    Key("pages", "pages.close", "escape,q,question_mark", "close", "close", "esc", 1),
    Key("sweep", "sweep.back", "escape", "back", "back to the screen before", "esc"),
    Key("charts", "charts.step1", "1", "show_step(0)", "step 1", "1"),
    Key("charts", "charts.step2", "2", "show_step(1)", "step 2", "2"),
    Key("charts", "charts.step3", "3", "show_step(2)", "step 3", "3"),
    Key("charts", "charts.next", "tab", "panel(1)", "panel", "tab", 30),
    Key("charts", "charts.previous", "shift+tab", "panel(-1)", "previous panel", "shift+tab"),
    Key("charts", "charts.maximise", "m", "maximise", "maximise", "m", 31),
    Key("charts", "charts.left", "left", "cursor(-1)", "cursor to the left", "left"),
    Key("charts", "charts.right", "right", "cursor(1)", "cursor", "right", 40),
    Key("charts", "charts.far_left", "shift+left", "cursor(-10)", "ten columns", "shift+left"),
    Key("charts", "charts.far_right", "shift+right", "cursor(10)", "ten columns", "shift+right"),
    Key("charts", "charts.smooth", "o", "smooth", "smoothing", "o", 43),
    Key("charts", "charts.log_scale", "g", "log_scale", "log scale", "g", 44),
    Key("charts", "charts.markers", "b", "markers", "braille, blocks or ASCII", "b"),
    Key("run", "run.back", "escape", "back", "back to the charts, or to the runs", "esc"),
    Key("run", "run.latest", "0", "latest_step", "the step that runs", "0"),
    Key("run", "run.charts", "c", "tab('charts')", "charts alone", "c"),
    Key("run", "run.health", "h", "tab('health')", "health", "h"),
    Key("run", "run.answers", "a", "tab('answers')", "answers", "a"),
    Key("run", "run.log", "l", "tab('log')", "log", "l"),
    Key("run", "run.events", "e", "tab('events')", "events", "e"),
    Key("run", "run.system", "s", "tab('system')", "system", "s"),
    Key("run", "run.jump", "j", "jump", "line in log", "j", 41),
    Key("run", "run.zoom_in", "plus,equals_sign", "zoom(0.5)", "zoom", "+", 42),
    Key("run", "run.zoom_out", "minus", "zoom(2.0)", "zoom out", "-"),
    Key("run", "run.pause", "p", "pause", "pause", "p", 45),
    Key("run", "run.stop", "x", "stop", "stop", "x", 11, acts=True),
    Key("run", "run.resume", "u", "resume", "go on with a stopped or paused run", "u", acts=True),
    Key("run", "run.search", "slash", "search", "search", "/", 32),
    Key("run", "run.next_found", "n", "found(1)", "next that was found", "n"),
    Key("run", "run.previous_found", "N", "found(-1)", "previous that was found", "N"),
    Key("run", "run.follow", "f", "follow", "follow the end of the log", "f"),
    Key("run", "run.sort", "r", "sort", "sort the answers another way", "r"),
    Key("run", "run.chat", "t", "chat", "talk with its model", "t", 33),
    Key("chat", "chat.stop", "escape,ctrl+c", "screen.interrupt", "stop the answer", "esc", 1),
    Key("chat", "chat.back", "ctrl+d", "screen.back", "leave, keep it", "^d", 2),
    Key("chat", "chat.beside", "ctrl+n", "screen.beside", "second model", "^n", 3),
    Key("chat", "chat.hear", "tab", "screen.hear", "who hears you", "tab", 4),
    Key("chat", "chat.up", "pageup", "screen.scroll(-1)", "earlier", "pgup", 5),
    Key("chat", "chat.down", "pagedown", "screen.scroll(1)", "later", "pgdn", 6),
    Key("runs", "runs.back", "escape", "back", "back", "esc"),
    Key("runs", "runs.open", "o", "open", "open", "enter", 1),
    Key("runs", "runs.mark", "m", "mark", "mark", "m", 2),
    Key("runs", "runs.compare", "c", "compare", "compare the marked", "c", 3),
    Key("runs", "runs.chat", "t", "chat", "talk with its model", "t"),
    Key("runs", "runs.stop", "x", "stop", "stop", "x", 4, acts=True),
    Key("runs", "runs.resume", "u", "resume", "go on", "u", 5, acts=True),
    Key("runs", "runs.new", "n", "app.show_start", "new run", "n", 7),
    Key("runs", "runs.delete", "d,delete", "delete", "delete", "d", 6, acts=True),
    Key("compare", "compare.back", "escape", "back", "back", "esc", 1),
    Key("compare", "compare.step4", "4", "show_step(3)", "DPO beside RLHF", "4"),
    Key("compare", "compare.differences", "d", "differences", "differences", "d", 2),
    Key("list", "list.up", "up,k", "line(-1)", "up", "up"),
    Key("list", "list.down", "down", "line(1)", "down", "down"),
    Key("list", "list.page_up", "pageup", "page(-1)", "a page up", "pgup"),
    Key("list", "list.page_down", "pagedown,space", "page(1)", "a page down", "pgdn"),
    Key("list", "list.first", "home", "first", "first", "home"),
    Key("list", "list.last", "end,G", "last", "last", "end"),
    Key("list", "list.shift_left", "left_square_bracket", "shift(-1)", "look left", "["),
    Key("list", "list.shift_right", "right_square_bracket", "shift(1)", "look right", "]"),
    Key("list", "list.pick", "enter", "pick", "open", "enter"),
)


# the actions of the keys that start, stop or delete
ACTING = frozenset(key.action for key in KEYS if key.acts)


def bindings(*scopes: str) -> list[BindingType]:
    """Textual's bindings of some scopes."""
    return [
        Binding(key.keys, key.action, key.description, show=False, id=key.id, priority=False)
        for key in KEYS
        if key.scope in scopes
    ]


def scopes_of(kinds: Iterable[type]) -> list[str]:
    """The scopes whose keys some classes of screens and widgets bind."""
    scopes = {key.id: key.scope for key in KEYS}
    bound = [
        binding.id
        for kind in kinds
        for base in kind.__mro__
        for binding in base.__dict__.get("BINDINGS", ())
        if isinstance(binding, Binding)
    ]
    return list(dict.fromkeys(scopes[id] for id in bound if id in scopes))


def hints(*scopes: str) -> list[tuple[str, str]]:
    """Keys and what they do, the most useful first: for the row at the bottom."""
    shown = sorted((k for k in KEYS if k.hint and k.scope in scopes), key=lambda key: key.hint)
    return [(key.display, key.description) for key in shown]
