"""The run that the Start screen prepares: profiles, the form with its changes, and the plan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dschat_tui.dashboard.form import Form
    from dschat_tui.dashboard.screens.start.work import Need, Planned
    from dschat_tui.profiles import Profile

FIRST_PROFILE = "tiny"


class Draft:
    """A run before it is started.

    Attributes:
        profiles: all that were read.
        needs: what each profile needs of this machine, as far as that is known.
        chosen: the name of the profile.
        form: the profile with its changes; None while there is none, or it cannot be used.
        planned: the plan of the form, None until it is made.
    """

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.profiles: list[Profile] = []
        self.needs: dict[str, Need] = {}
        self.chosen = FIRST_PROFILE
        self.form: Form | None = None
        self.planned: Planned | None = None
        # outlive a profile that cannot be used
        self._changes: dict[str, str] = {}

    def choose(self, name: str) -> str:
        """Take another profile, with the same changes; what is wrong with those, if anything."""
        # here and below, not above: loads the configuration, and the first picture comes first
        from dschat_tui.dashboard.form import Form
        from engine.config.loading import ConfigError

        self.chosen = name
        entry = next((entry for entry in self.profiles if entry.name == name), None)
        if self.form is not None:
            self._changes = self.form.assignments
        self.form = self.planned = None
        if entry is None or entry.config is None:
            return ""
        try:
            self.form = Form(name, entry.config, self._changes)
        except ConfigError as error:
            self.form = Form(name, entry.config)
            return f"changes were discarded: {error}"
        return ""

    def assign(self, changes: Mapping[str, str]) -> str:
        """Change options; what is wrong with a value, or nothing."""
        from engine.config.loading import ConfigError

        assert self.form is not None
        try:
            self.form.assign(changes)
        except ConfigError as error:
            return str(error).removeprefix("the form: ")
        self.planned = None
        return ""

    def save(self, name: str) -> Path:
        """Save the form as a profile, which is then the chosen one as soon as it is read.

        Raises:
            ConfigError: the name cannot be one, or is taken.
            OSError: it cannot be written.
        """
        assert self.form is not None
        path = self.form.save(name)
        self.form, self.chosen, self._changes = None, name, {}
        return path

    def suggested_changes(self) -> dict[str, str]:
        """What a broken rule asks for, else what makes the run fit into memory; else nothing."""
        from dschat_tui.dashboard.form import fix_texts

        assert self.form is not None
        for violation in self.form.violations:
            if changes := fix_texts(violation.fix):
                return changes
        report = self.planned.report if self.planned is not None else None
        if report is None or report.change is None:
            return {}
        return fix_texts(report.change.assignments)

    def output(self) -> Path:
        """The folder that the run would get."""
        from dschat_tui.runs.folder import next_free

        return next_free(self.runs, self.chosen)

    def command_text(self) -> str:
        """The command that runs the form."""
        return "" if self.form is None else shlex.join(self.form.command(self.output()))

    @property
    def step_commands(self) -> list[list[str]]:
        """The commands of the steps, as last planned."""
        return [] if self.planned is None else self.planned.commands
