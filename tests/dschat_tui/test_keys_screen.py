"""Every key of every screen, tab and panel: it has an action, a help text, and no double."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from textual.actions import parse
from textual.dom import DOMNode

from dschat_tui.dashboard import screens
from dschat_tui.dashboard.app import Dashboard
from dschat_tui.dashboard.keys import KEYS, KeyBinding, keys_of
from dschat_tui.dashboard.screens.chat import ChatScreen
from dschat_tui.dashboard.screens.compare import ComparedCharts, CompareScreen
from dschat_tui.dashboard.screens.help import SCOPE_TITLES
from dschat_tui.dashboard.screens.run.charts import ChartsTab
from dschat_tui.dashboard.screens.run.screen import RunScreen
from dschat_tui.dashboard.screens.run.tabs import TABS
from dschat_tui.dashboard.screens.start.panels import PANELS
from dschat_tui.dashboard.screens.start.screen import StartScreen

# the screens that pass keys on, to what
CHARTS = {RunScreen: ChartsTab, CompareScreen: ComparedCharts}


def owners() -> list[type]:
    """All classes of the dashboard that bind keys of their own."""
    for module in pkgutil.walk_packages(screens.__path__, f"{screens.__name__}."):
        importlib.import_module(module.name)
    found: list[type] = [DOMNode]
    for kind in found:
        found += [each for each in kind.__subclasses__() if each not in found]
    return [k for k in found if k.__module__.startswith("dschat_tui") and "BINDINGS" in vars(k)]


def own_bindings(kind: type) -> Iterator[KeyBinding]:
    for binding in vars(kind)["BINDINGS"]:
        assert isinstance(binding, KeyBinding), kind
        yield binding


@pytest.mark.parametrize("kind", owners(), ids=lambda kind: kind.__name__)
def test_every_key_does_something(kind: type) -> None:
    used: list[str] = []
    for binding in own_bindings(kind):
        target, name, arguments = parse(binding.action)
        owner = {"app": Dashboard, "screen": ChatScreen}.get(target, kind)
        assert callable(getattr(owner, f"action_{name}", None)), binding
        if name == "charts":
            _, passed_on, _ = parse(str(arguments[0]))
            assert callable(getattr(CHARTS[kind], f"action_{passed_on}", None)), binding
        used += binding.key.split(",")
    assert used
    assert len(used) == len(set(used))


def test_no_two_keys_have_one_id_or_no_heading() -> None:
    keys = keys_of(owners())
    ids = [key.id for key in keys]
    assert len(ids) == len(set(ids))
    assert all(key.description and key.display for key in keys)
    # test_safe_keys_screen.py tries each of the table that starts, stops or deletes
    assert {key for key in keys if key.acts} <= set(KEYS)
    # a tab's own keys stand under its name; the help has no keys of pages, which it is one of
    names = {"pages"} | {part.tab_name for part in (*TABS, *PANELS)}
    assert {key.scope for key in keys} <= SCOPE_TITLES.keys() | names


@pytest.mark.parametrize(("screen", "parts"), [(RunScreen, TABS), (StartScreen, PANELS)])
def test_no_part_takes_a_key_away_from_its_screen(screen: type, parts: tuple[type, ...]) -> None:
    def names(kind: type) -> set[str]:
        return {name for key in keys_of([kind]) for name in key.keys.split(",")}

    for part in parts:
        assert not names(part) & names(screen), part
