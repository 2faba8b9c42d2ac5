"""Going on with a run from a screen: what would change, what speaks against it, a reason asked."""

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
    """The ways in which a run can go on, by key: `y` as it is, `f` with what mends its failure.

    Attributes:
        gates: what it waits at; with these a reason is wanted first.
        ways: the ways, checked.
        reasons: what speaks against those that are missing.
    """

    gates: list[str] = field(default_factory=list)
    ways: dict[str, Resumption] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)


def propose(path: Path, accept: str | None = None) -> Proposal:
    """Look at how a run can go on; `accept` is why it goes past a gate."""
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
            proposal.reasons += [told for told in refusal.reasons if told not in proposal.reasons]
    return proposal


def question_of(proposal: Proposal) -> Question:
    """What to ask a person about going on."""
    lines = list(proposal.reasons)
    choices: list[Choice] = []
    plain, mending = proposal.ways.get("y"), proposal.ways.get("f")
    if plain is not None:
        lines += [_where(plain)]
        choices.append(Choice("y", "go on as it is" if mending else "go on", "y"))
    if mending is not None:
        lines += ["What mends its failure:", *(f"  {change}" for change in mending.changes)]
        if mending.restarted is not None:
            lines.append(f"  step {mending.restarted.number} starts over: no checkpoint fits")
        choices.insert(0, Choice("f", "change that and go on", "f"))
    cancel = ("n", "leave it" if proposal.ways else "back")
    return Question([clean(line) for line in lines], choices, cancel)


def _where(resumption: Resumption) -> str:
    first, after = resumption.first, resumption.after
    begin = "from its beginning" if after is None else f"after {after} steps"
    return f"{resumption.run.path.name} goes on with step {first.number} ({first.title}) {begin}."


class ResumingScreen(DashboardScreen):
    """A screen on which a run can be told to go on."""

    def has_resumed(self, path: Path) -> None:
        """What the screen does when a run goes on."""

    def resume(self, path: Path) -> None:
        """Show how a run would go on, and start it after a key; a gate wants a reason first."""
        self._propose(path, None)

    @work(thread=True, exclusive=True, exit_on_error=False, group="resume")
    def _propose(self, path: Path, accept: str | None) -> None:
        self.app.call_from_thread(self._ask, path, propose(path, accept))

    def _ask(self, path: Path, proposal: Proposal) -> None:
        if proposal.gates:
            lines = [f"{path.name} is paused:", *proposal.gates, "Why does it go on regardless?"]
            placeholder = "the reason, which run.json keeps"
            entry = Entry([clean(line) for line in lines], placeholder, "go on", "leave it")

            def told(reason: str | None) -> None:
                if reason:
                    self._propose(path, reason)

            self.app.push_screen(entry, told)
            return

        def answered(key: str | None) -> None:
            if key:
                self._go_on(proposal.ways[key])

        self.app.push_screen(question_of(proposal), answered)

    @work(thread=True, exclusive=True, exit_on_error=False, group="resume")
    def _go_on(self, resumption: Resumption) -> None:
        from dschat_tui.runs import resume, supervisor
        from dschat_tui.runs.preflight import Refusal

        try:
            resume.apply(resumption)
            supervisor.start(resumption.run)
        except (Refusal, OSError) as error:
            self.app.call_from_thread(self.show_message, f"it cannot go on: {error}")
            return
        self.app.call_from_thread(self.has_resumed, resumption.run.path)
