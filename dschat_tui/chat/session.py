"""One conversation: its turns, its settings, and which part of it still fits the context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Generator as Stream
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dschat_tui.chat.events import Answer, Event, Note, Statistics, Token
from dschat_tui.chat.settings import Generation, Settings

Message = dict[str, str]


class Usage(Protocol):
    """Tokens of the latest answer, kept up to date while it streams; see `Statistics`."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def kept_tokens(self) -> int: ...

    @property
    def new_tokens(self) -> int: ...

    @property
    def finish(self) -> Literal["stop", "length"]: ...


class Generator(Protocol):
    """A model that answers. A conversation that it cannot take is a ValueError."""

    @property
    def name(self) -> str:
        """What the model is called."""
        ...

    @property
    def context(self) -> int:
        """Most tokens of prompt and answer."""
        ...

    @property
    def usage(self) -> Usage:
        """Tokens of the latest answer."""
        ...

    def count(self, messages: list[Message]) -> int:
        """Return the tokens of a conversation as the model would see it."""
        ...

    def stream(
        self,
        messages: list[Message],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        repetition_penalty: float,
        seed: int | None,
    ) -> Stream[str, None, None]:
        """Yield an answer in pieces, one per token, which may be empty."""
        ...


class Judge(Protocol):
    """A reward model."""

    def score(self, messages: list[Message]) -> float:
        """Return the reward of a conversation's last answer."""
        ...


@dataclass
class Relatives:
    """The models to compare with; each is loaded at its first use.

    Attributes:
        generators: by name, such as base, sft, actor.
        judge: loads the reward model, if there is one.
        divergence: mean KL per token from the first generator to the second over the last answer
            of a conversation, in nats.
    """

    generators: Mapping[str, Callable[[], Generator]] = field(default_factory=dict)
    judge: Callable[[], Judge] | None = None
    divergence: Callable[[Generator, Generator, list[Message]], float] | None = None


class Session:
    """A conversation with one model.

    Attributes:
        messages: turns of user and assistant in order, whole, also where the model no longer
            sees them.
        system: the system message, or empty.
        stopping: set from outside (Ctrl-C) to end the answer after the token in work.
        history: the work behind every answer so far.
        candidates: two answers to the last question, while the person has to pick one.
    """

    def __init__(
        self,
        generator: Generator,
        settings: Settings | None = None,
        relatives: Relatives | None = None,
        system: str = "",
    ) -> None:
        self.generator = generator
        self.settings = settings or Settings()
        self.relatives = relatives or Relatives()
        self.messages: list[Message] = []
        self.system = ""
        self.stopping = False
        self.history: list[Statistics] = []
        self.candidates: list[str] = []
        self._first = 0
        self._attempt = 0
        if system:
            self.set_system(system)

    def set_system(self, text: str) -> None:
        """Set the system message; empty removes it.

        Raises:
            ValueError: the template of the model has no place for one.
        """
        lengths = {
            self.generator.count(
                [{"role": "system", "content": each}, {"role": "user", "content": "?"}]
            )
            for each in (text, f"{text} {text}")
        }
        if text and len(lengths) == 1:
            raise ValueError(
                f"The dialogue template of {self.generator.name} leaves system messages out; "
                "say it in the first question instead."
            )
        self.system = text

    def conversation(self) -> list[Message]:
        """Return the whole conversation, with its system message."""
        return self._with_system(self.messages)

    def visible(self) -> list[Message]:
        """Return the part of the conversation that the model still sees."""
        return self._with_system(self.messages[self._first :])

    def clear(self) -> None:
        """Forget all turns; the system message and the settings stay."""
        self.messages.clear()
        self._first = 0

    def undo(self) -> Message:
        """Take the last question and its answer back; return the question.

        Raises:
            ValueError: nothing was asked yet.
        """
        if not self.messages:
            raise ValueError("There is nothing to take back yet.")
        question = self.messages[-2]
        del self.messages[-2:]
        if self._first >= len(self.messages):
            self._first = 0
        return question

    def replace(self, messages: list[Message], system: str) -> None:
        """Replace the conversation by another, such as one from a file."""
        self.set_system(system)
        self.messages = list(messages)
        self._first = 0

    def ask(self, question: str) -> Iterator[Event]:
        """Ask, and yield the answer as it comes; an interrupted answer is kept, too.

        Raises:
            ValueError: the question does not fit the model's context.
        """
        self._attempt = 0
        yield from self._answer({"role": "user", "content": question})

    def retry(self) -> Iterator[Event]:
        """Take the last answer back and generate another.

        Raises:
            ValueError: nothing was asked yet.
        """
        question = self.undo()
        self._attempt += 1
        if self.settings.temperature == 0:
            yield Note("Temperature 0 answers the same again; /set temperature 0.8 varies it.")
        yield from self._answer(question)

    def generation(self, attempt: int = 0) -> Generation:
        """Return the settings for a generator; each retry, and each attempt, has its own seed."""
        now = self.settings
        return {
            "max_new_tokens": now.max_new_tokens,
            "temperature": now.temperature,
            "top_p": now.top_p,
            "top_k": now.top_k,
            "repetition_penalty": now.repetition_penalty,
            "seed": None if now.seed is None else now.seed + self._attempt + attempt,
        }

    def fit(self, question: Message) -> tuple[list[Message], int]:
        """Cut the oldest whole turns until a question and room for its answer fit.

        Returns:
            the conversation to send, and how many rounds were cut.

        Raises:
            ValueError: the question alone is too long.
        """
        context = self.generator.context
        limit = context - min(self.settings.max_new_tokens, context // 2)
        start = self._first
        window = self._with_system([*self.messages[start:], question])
        tokens = self.generator.count(window)
        if tokens > limit:
            # Down to half: a cut in every round would discard the cache in every round.
            while start < len(self.messages) and tokens > limit // 2:
                start += 2
                window = self._with_system([*self.messages[start:], question])
                tokens = self.generator.count(window)
        if tokens >= context:
            raise ValueError(
                f"The question takes {tokens} tokens, but the context of {self.generator.name} "
                f"holds {context} with the answer; ask a shorter one."
            )
        cut, self._first = (start - self._first) // 2, start
        return window, cut

    def open_with(self, question: str) -> list[Message]:
        """Return a conversation of one question, with the system message."""
        return self._with_system([{"role": "user", "content": question}])

    def whole_answer(
        self, generator: Generator, conversation: list[Message], settings: Generation
    ) -> str:
        """Return an answer outside of the conversation, by any model.

        Raises:
            KeyboardInterrupt: `stopping` was set meanwhile.
        """
        text = ""
        with closing(generator.stream(conversation, **settings)) as pieces:
            for piece in pieces:
                text += piece
                if self.stopping:
                    raise KeyboardInterrupt
        return text

    def _answer(self, question: Message) -> Iterator[Event]:
        window, cut = self.fit(question)
        if cut:
            rounds = "round" if cut == 1 else f"{cut} rounds"
            yield Note(f"The context is full: the model no longer sees the oldest {rounds}.")
        begin = time.perf_counter()
        first = 0.0
        text = ""
        self.stopping = False
        finished = False
        interrupted = False
        try:
            with closing(self.generator.stream(window, **self.generation())) as pieces:
                for piece in pieces:
                    first = first or time.perf_counter() - begin
                    text += piece
                    if piece:
                        yield Token(piece)
                    if self.stopping:
                        interrupted = True
                        break
            finished = True
        except KeyboardInterrupt:
            interrupted = finished = True
        finally:
            # Even if the reader of the events left midway.
            if text or finished:
                self.messages += [question, {"role": "assistant", "content": text}]
        usage = self.generator.usage
        statistics = Statistics(
            usage.prompt_tokens,
            usage.kept_tokens,
            usage.new_tokens,
            first,
            time.perf_counter() - begin,
        )
        self.history.append(statistics)
        finish: Literal["stop", "length", "interrupted"]
        finish = "interrupted" if interrupted else usage.finish
        yield Answer(text, finish, statistics)
        if interrupted and not text:
            self.undo()
            yield Note("Stopped before the first word; the question was taken back.")
        elif interrupted:
            yield Note("Stopped; what was said so far is kept.")
        elif not text.strip():
            yield Note("The model ended its answer without a word.")
        elif finish == "length":
            yield Note(f"The answer was cut at {usage.new_tokens} tokens.")

    def _with_system(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": self.system}, *messages] if self.system else messages
