"""Resuming a run from a screen: what would change, why it cannot be, a reason for a gate."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from textual import work

from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.screens.dialogs import Choice, Entry, Question
from dschat_tui.text import clean

if TYPE_CHECKING:
    from dschat_tui.runs.resume import Resumption


@dataclass
class Proposal:
    """How a run can be resumed, by key: `y` as it is, `f` with a fix of its failure.

    Attributes:
        gates: what it waits at; these need a reason first.
        ways: the ways, checked.
        reasons: why the others are not possible.
    """

    gates: list[str] = field(default_factory=list)
    ways: dict[str, Resumption] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def propose(path: Path, accept: str | None = None) -> Proposal:
    """Find out how a run can be resumed; `accept` is the reason to ignore a gate."""
    from dschat_tui.runs import gates, resume
    from dschat_tui.runs.folder import RunFolder
    from dschat_tui.runs.preflight import Refusal
    from dschat_tui.runs.state import FAILED, RUNNING, unknown_run_state

    run = RunFolder(path)
    proposal = Proposal()
    try:
        state = run.read_state() or unknown_run_state()
    except (OSError, ValueError) as error:
        return Proposal(reasons=[str(error)])
    if accept is None and state["state"] != RUNNING:
        proposal.gates = [gates.told(record) for record in gates.waiting(state)]
    if proposal.gates:
        return proposal
    has_failed = any(record["state"] == FAILED for record in state["steps"].values())
    for key, fix in (("f", True), ("y", False)):
        if fix and not has_failed:
            continue
        try:
            proposal.ways[key] = resume.prepare_resume(run, [], fix, accept)
        except Refusal as refusal:
            proposal.reasons += [
                reason for reason in refusal.reasons if reason not in proposal.reasons
            ]
    return proposal


def question_of(proposal: Proposal) -> Question:
    """What to ask a person about resuming."""
    lines = list(proposal.reasons)
    choices: list[Choice] = []
    plain, fixed = proposal.ways.get("y"), proposal.ways.get("f")
    if plain is not None:
        lines += [_where(plain)]
        choices.append(Choice("y", "resume as it is" if fixed else "resume", "y"))
    if fixed is not None:
        lines += ["What fixes its failure:", *(f"  {change}" for change in fixed.changes)]
        if fixed.restarted is not None:
            lines.append(f"  step {fixed.restarted.number} starts over: no checkpoint fits")
        choices.insert(0, Choice("f", "change that and resume", "f"))
    cancel = ("n", "leave it" if proposal.ways else "back")
    return Question([clean(line) for line in lines], choices, cancel)


def _where(resumption: Resumption) -> str:
    first, after = resumption.first, resumption.after
    begin = "from its beginning" if after is None else f"after {after} steps"
    return f"{resumption.run.path.name} resumes with step {first.number} ({first.title}) {begin}."


class ResumingScreen(DashboardScreen):
    """A screen from which a run can be resumed."""

    def has_resumed(self, path: Path) -> None:
        """What the screen does when a run was resumed."""

    def resume(self, path: Path) -> None:
        """Show how a run would be resumed, then resume it; a gate needs a reason first."""
        self._propose(path, None)

    @work(thread=True, exclusive=True, exit_on_error=False, group="resume")
    def _propose(self, path: Path, accept: str | None) -> None:
        self.app.call_from_thread(self._ask, path, propose(path, accept))

    def _ask(self, path: Path, proposal: Proposal) -> None:
        if proposal.gates:
            lines = [f"{path.name} is paused:", *proposal.gates, "Why resume it regardless?"]
            placeholder = "the reason, which is kept in run.json"
            entry = Entry([clean(line) for line in lines], placeholder, "resume", "leave it")

            def reason_given(reason: str | None) -> None:
                if reason:
                    self._propose(path, reason)

            self.app.push_screen(entry, reason_given)
            return

        def answered(key: str | None) -> None:
            if key:
                self._resume(proposal.ways[key])

        self.app.push_screen(question_of(proposal), answered)

    @work(thread=True, exclusive=True, exit_on_error=False, group="resume")
    def _resume(self, resumption: Resumption) -> None:
        from dschat_tui.runs import resume, supervisor
        from dschat_tui.runs.preflight import Refusal

        try:
            resume.apply(resumption)
            supervisor.start(resumption.run)
        except (Refusal, OSError) as error:
            self.app.call_from_thread(self.show_message, f"it cannot be resumed: {error}")
            return
        self.app.call_from_thread(self.has_resumed, resumption.run.path)
