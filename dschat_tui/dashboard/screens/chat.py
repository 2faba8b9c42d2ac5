"""The chat screen: a conversation with a model of a run, or with two of its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from textual import work
from textual.app import ComposeResult
from textual.containers import Container
from textual.suggester import SuggestFromList
from textual.widgets import Input

from dschat_tui.chat.child import Child, chat_command
from dschat_tui.chat.commands import COMMANDS
from dschat_tui.dashboard import keys
from dschat_tui.dashboard.screens.base import DashboardScreen
from dschat_tui.dashboard.screens.transcript import ANSWERING, ENDED, FAILED, LOADING, Transcript
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.lines import LineList
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.text import ASCII, UNICODE, clean
from engine.config.steps import STEPS

# answers stream, but nobody reads faster than this
DRAW_SECONDS = 0.05
# which of a run's models comes first, and which can be the second
_OF_STEPS = [step.model_name(name) for step in reversed(STEPS) for name in step.chat_models]
ORDER = (*(name for name in _OF_STEPS if name != "actor_ema"), "actor_ema")
BOTH = "both"


class Conversation(Container):
    """One model: its process, its state, and what was said."""

    def __init__(self, name: str, command: list[str], ascii_only: bool) -> None:
        super().__init__(classes="conversation")
        self.model = name
        self.transcript = Transcript(name, ascii_only)
        self.child = Child(command, self.transcript.apply, self.transcript.note)
        self._glyphs = ASCII if ascii_only else UNICODE
        self._drawn: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """The state of the model over its conversation."""
        yield Line(classes="conversation-head")
        yield LineList(follow=True)

    def on_mount(self) -> None:
        """Start the process; only the question gets the focus."""
        self.query_one(LineList).can_focus = False
        self.converse()

    @work(exit_on_error=False)
    async def converse(self) -> None:
        """Run the process to its end."""
        try:
            code = await self.child.run()
        except OSError as error:
            self.transcript.note(f"cannot start {self.child.command[0]}: {error}")
            code = 1
        self.transcript.end(code)

    async def on_unmount(self) -> None:
        """Leave no process behind."""
        await self.child.end()

    def ask(self, text: str) -> None:
        """Send a line to the model."""
        if self.transcript.state in (ENDED, FAILED):
            return
        self.transcript.ask(text)
        self.child.send(text)
        self.query_one(LineList).follow = True

    def scroll(self, pages: int) -> None:
        """Scroll to what was said before, or after."""
        lines = self.query_one(LineList)
        height = max(lines.size.height - 1, 1)
        lines.follow = False
        lines.go_to(lines.top + (-height if pages < 0 else 2 * height))
        lines.follow = lines.cursor >= lines.source.count - 1

    def draw(self) -> None:
        """Show what has changed."""
        if not self.query(LineList):
            return
        lines, transcript = self.query_one(LineList), self.transcript
        drawn = (transcript.version, transcript.state, lines.size)
        if drawn == self._drawn or not lines.size.width:
            return
        self._drawn = drawn
        transcript.lay_out(lines.size.width)
        lines.show(transcript)
        self.query_one(Line).show(self._head())

    def _head(self) -> Row:
        state, detail = self.transcript.state, clean(self.transcript.detail, self._glyphs is ASCII)
        style = {FAILED: "bad", LOADING: "warn", ANSWERING: "line0"}.get(state, "muted")
        dot = f" {self._glyphs.dot} "
        row: Row = [(self.model, "strong"), (f"{dot}{state}", style)]
        return [*row, (f"{dot}{detail}", "muted")] if detail else row


class Prompt(Input):
    """The prompt; the keys of the chat override those of a prompt."""

    # not as priority bindings of the screen: those overtake the keys that were typed before them
    BINDINGS = keys.bindings("chat")

    async def action_submit(self) -> None:
        """Send the line and empty it before the next key."""
        await super().action_submit()
        self.clear()


class ChatScreen(DashboardScreen):
    """Conversations with one or two models of a run; a question goes to both, or to one."""

    CSS_PATH = "chat.tcss"
    BINDINGS = keys.bindings("chat")
    AUTO_FOCUS = "#question"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]  # noqa: RUF012

    def __init__(
        self,
        models: Mapping[str, str],
        command: Callable[[str], list[str]] = chat_command,
    ) -> None:
        """Take the models to chat with.

        Args:
            models: folders by name, of `ORDER`.
            command: what starts a conversation with a folder.
        """
        super().__init__()
        self.offer(models)
        self.command = command
        self.recipient = BOTH

    def compose(self) -> ComposeResult:
        """The first model, and the line to ask."""
        yield Line(id="chat-title")
        with Container(id="conversations"):
            yield self._conversation(next(iter(self.models)))
        with Container(id="ask"):
            yield Line(id="recipient")
            yield Prompt(
                placeholder="ask, or /help",
                suggester=SuggestFromList(list(COMMANDS)),
                id="question",
                compact=True,
            )
        yield Line(id="chat-keys")

    @property
    def is_alive(self) -> bool:
        """Whether any of its models can still answer, or soon will."""
        over = (ENDED, FAILED)
        return not self.conversations or any(
            conversation.transcript.state not in over for conversation in self.conversations
        )

    @property
    def has_begun(self) -> bool:
        """Whether anything was said."""
        return any(conversation.transcript.count for conversation in self.conversations)

    def offer(self, models: Mapping[str, str]) -> None:
        """Set the models that the run has by now."""
        self.models = {name: models[name] for name in ORDER if name in models}

    def _conversation(self, name: str) -> Conversation:
        return Conversation(name, self.command(self.models[name]), self.ascii_only)

    @property
    def conversations(self) -> list[Conversation]:
        """The one or two that are open, in their order."""
        return list(self.query(Conversation))

    def on_mount(self) -> None:
        """Draw what has come, 20 times a second."""
        self.set_interval(DRAW_SECONDS, self.draw)
        self.call_after_refresh(self.draw)

    def draw(self) -> None:
        """Draw what has changed; leave for good when all models have quit."""
        if not self.is_current:
            return
        conversations = self.conversations
        if conversations and all(c.transcript.state == ENDED for c in conversations):
            self.app.pop_screen()
            # a screen that is not installed ends when it is left
            self.app.uninstall_screen(self)
            return
        names = [conversation.model for conversation in conversations]
        folder = clean(self.models[names[0]] if names else "", self.ascii_only)
        title: Row = [(f" chat with {' and '.join(names)}", "strong"), (f"  {folder}", "muted")]
        if self.message:
            title.append((f"  {self.message}", "warn"))
        self.query_one("#chat-title", Line).show(title)
        asked = self.recipient if len(names) > 1 else names[0] if names else ""
        recipient, shown = self.query_one("#recipient", Line), f" to {asked}: "
        recipient.styles.width = len(shown)
        recipient.show([(shown, "strong")])
        self.query_one("#chat-keys", Line).show(self.key_hints())
        for conversation in conversations:
            conversation.draw()

    def on_input_submitted(self, message: Input.Submitted) -> None:
        """Send a question or a command to those it is meant for."""
        text = message.value.strip()
        if not text:
            return
        for conversation in self.conversations:
            if self.recipient in (BOTH, conversation.model) or len(self.conversations) == 1:
                conversation.ask(text)

    def action_address(self) -> None:
        """Ask both models, or one of them."""
        names = [BOTH, *(conversation.model for conversation in self.conversations)]
        if len(names) > 2:
            self.recipient = names[(names.index(self.recipient) + 1) % len(names)]

    async def action_second(self) -> None:
        """Open the next of the run's models beside the first; after the last one, close it."""
        open_names = [conversation.model for conversation in self.conversations]
        others = [name for name in self.models if name != open_names[0]]
        if not others:
            self.show_message("the run has no other model to chat with yet")
            return
        after = others.index(open_names[1]) + 1 if len(open_names) > 1 else 0
        for conversation in self.conversations[1:]:
            await conversation.remove()
        self.recipient = BOTH
        if after < len(others):
            await self.query_one("#conversations").mount(self._conversation(others[after]))

    def action_scroll(self, pages: int) -> None:
        """Scroll the conversations."""
        for conversation in self.conversations:
            conversation.scroll(pages)

    def action_interrupt(self) -> None:
        """Stop the answers that are being generated; another key leaves."""
        answering = [c for c in self.conversations if c.transcript.state == ANSWERING]
        for conversation in answering:
            conversation.child.interrupt()
        if not answering:
            self.show_message("^d leaves the chat, and /quit ends it")

    def action_back(self) -> None:
        """Leave if nothing is typed, as a shell does; the models stay loaded."""
        question = self.query_one("#question", Input)
        if question.value:
            question.action_delete_right()
            return
        self.app.pop_screen()
        below = self.app.screen
        if isinstance(below, DashboardScreen) and self.app.is_screen_installed(self):
            below.show_message("the chat is kept: t returns to it")
