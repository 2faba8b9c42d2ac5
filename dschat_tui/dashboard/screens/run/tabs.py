"""The tabs below the charts, in their order: a tab is a class of `RunTab` in a file of its own."""

from __future__ import annotations

from dschat_tui.dashboard.screens.run.answers import AnswersTab
from dschat_tui.dashboard.screens.run.events import EventsTab
from dschat_tui.dashboard.screens.run.health import HealthTab
from dschat_tui.dashboard.screens.run.log import LogTab
from dschat_tui.dashboard.screens.run.system import SystemTab

TABS = (HealthTab, AnswersTab, LogTab, EventsTab, SystemTab)
