"""The panels of the Start screen, in their order: a panel is a class in a file of its own."""

from __future__ import annotations

from dschat_tui.dashboard.screens.start.command import CommandPanel
from dschat_tui.dashboard.screens.start.options import OptionsPanel
from dschat_tui.dashboard.screens.start.plan import PlanPanel
from dschat_tui.dashboard.screens.start.profiles import ProfilesPanel

PANELS = (ProfilesPanel, OptionsPanel, PlanPanel, CommandPanel)
