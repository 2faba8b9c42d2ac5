"""How far a step of a run is, and how long it will take: one reading for all that show it."""

from __future__ import annotations

from dataclasses import dataclass

from dschat_tui.logs.health import seconds_per_step
from dschat_tui.logs.model import LogModel
from dschat_tui.text import clean


@dataclass(frozen=True)
class Progress:
    """How far a step is; `total` is 0, and `seconds_per_step` None, where the log has not said."""

    phase: str
    percent: int | None
    done: int
    total: int
    seconds_per_step: float | None

    @property
    def remaining_seconds(self) -> float | None:
        """Time left at the pace of the log, or None before there is a pace."""
        if self.seconds_per_step is None or not self.total > self.done > 0:
            return None
        return self.seconds_per_step * (self.total - self.done)

    def phase_text(self, ascii_only: bool = False) -> str:
        """The phase, with how much of it is done where the log says so."""
        percent = "" if self.percent is None else f" {self.percent} %"
        return clean(self.phase, ascii_only) + percent


def progress_of(model: LogModel) -> Progress:
    """The progress that a log shows."""
    status = model.status
    return Progress(
        status.phase, status.percent, status.done, status.total, seconds_per_step(model.series)
    )
