"""The generator behind the chat: one conversation, streamed, its cache kept over the rounds."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.data.files import DataError
from engine.data.templates import (
    HUMAN_ASSISTANT_CHAT_TEMPLATE,
    Template,
    encode_answer,
    encode_prompt,
    install_template,
)
from engine.generation.decode import Decoder, DecodeSession, build_decoder
from engine.generation.sampling import Sampling
from engine.models.load import load_causal_lm, load_tokenizer, resize_for
from engine.models.reward import RewardModel

Message = dict[str, str]

# Up to this size of weights a faster copy beside the model is worth its memory.
_COPIED_BYTES = 4 * 2**30

# ALiBi models such as BLOOM name no longest context; this is what BLOOM was trained with.
_UNNAMED_CONTEXT = 2048


@dataclass
class Usage:
    """Tokens of one answer, up to date while it streams.

    Attributes:
        prompt_tokens: tokens of the rendered conversation.
        kept_tokens: those whose keys and values were still in the cache.
        new_tokens: tokens generated, the one that ended the answer included.
        finish: stop (EOS or the next turn's mark), else length.
    """

    prompt_tokens: int = 0
    kept_tokens: int = 0
    new_tokens: int = 0
    finish: Literal["stop", "length"] = "length"


class ChatGenerator:
    """Answers conversations with one model, in the template its tokenizer was saved with."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        context: int | None = None,
        decoder: Decoder | None = None,
        offload_cache: bool = False,
    ) -> None:
        """Take a model in evaluation mode.

        Args:
            model: a causal language model.
            tokenizer: its tokenizer; without a chat template it gets that of Human/Assistant.
            name: what to call the model.
            context: most tokens of prompt and answer; None takes the model's own.
            decoder: computes in place of the fastest one for the model.
            offload_cache: keep keys and values in host memory.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.name = name
        self.context = context or context_length(model, tokenizer)
        self.usage = Usage()
        if not tokenizer.chat_template:
            install_template(tokenizer, "human_assistant")
        self.stop_ids, self.stop_mark = next_turn(tokenizer)
        eos = model.generation_config.eos_token_id
        self.stop_ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
        if decoder is None:
            copied = model.num_parameters() * model.dtype.itemsize <= _COPIED_BYTES
            decoder = build_decoder(model, rows=1, copy=copied)
        self.session = DecodeSession(decoder, offload_cache)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        name: str,
        dtype: torch.dtype,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
    ) -> ChatGenerator:
        """Load a model onto the accelerator if there is one.

        Args:
            path: local folder or Hub id.
            name: what to call the model.
            dtype: format of the weights.
            tokenizer: local folder or Hub id, where the model's own has none.
            trust_remote_code: run Python code that comes with the model.

        Raises:
            ModelError: not found or not readable.
        """
        model = load_causal_lm(path, dtype, trust_remote_code=trust_remote_code)
        own_tokenizer = load_tokenizer(tokenizer or path, trust_remote_code)
        resize_for(model, own_tokenizer)
        return cls(model.to(_device()), own_tokenizer, name)

    def encode(self, messages: list[Message]) -> list[int]:
        """Render a conversation into ids, up to the mark after which the model answers.

        Raises:
            ValueError: the template refuses the conversation.
        """
        try:
            return encode_prompt(messages, self.tokenizer, "chat_template")
        except DataError as error:
            raise ValueError(
                f"The dialogue template of {self.name} refuses this conversation: "
                f"{error.__cause__ or error}"
            ) from error

    def count(self, messages: list[Message]) -> int:
        """Return the tokens of a conversation, as `encode` renders it."""
        return len(self.encode(messages))

    def stream(
        self,
        messages: list[Message],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
    ) -> Generator[str, None, None]:
        """Yield the answer in pieces, one a token; pieces may be empty.

        Only tokens that the kept cache does not hold are computed. The end of the answer and the
        mark of the next turn are not part of it. `usage` tells the tokens.

        Raises:
            ValueError: the conversation leaves no room for an answer.
        """
        ids = self.encode(messages)
        room = self.context - len(ids)
        if room < 1:
            raise ValueError(
                f"The conversation takes {len(ids)} tokens, the context of {self.name} holds "
                f"{self.context}; shorten it or start a new one."
            )
        sampling = Sampling(
            max_new_tokens=min(max_new_tokens, room),
            eos_ids=tuple(sorted(self.stop_ids)),
            pad_id=self.tokenizer.pad_token_id,
            temperature=temperature or 1.0,
            top_p=top_p,
            top_k=top_k,
            repetition_penalty=repetition_penalty,
            greedy=temperature == 0,
        )
        random = torch.Generator()
        if seed is None:
            random.seed()
        else:
            random.manual_seed(seed)
        # The last token of either sequence has no keys and values yet.
        pairs = zip(self.session.tokens[:-1], ids[:-1], strict=False)
        kept = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        usage = self.usage = Usage(len(ids), kept)
        text = AnswerText(self.tokenizer, self.stop_mark)
        self.session.feed(ids)
        for token, _ in self.session.stream(sampling, random):
            usage.new_tokens += 1
            if token in self.stop_ids:
                usage.finish = "stop"
                break
            yield text.push(token)
            if text.ended:
                usage.finish = "stop"
                break
        yield text.rest()


class AnswerText:
    """Turns tokens into the text of an answer, without its surrounding space and its end.

    Attributes:
        ended: the mark of the next turn came; it and what follows are not part of the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, mark: str) -> None:
        self.ended = False
        self._tokenizer = tokenizer
        self._mark = mark
        self._ids: list[int] = []
        self._decoded = 0
        self._held = ""
        self._started = False

    def push(self, token: int) -> str:
        """Take a token; return the text that is certain now."""
        self._ids.append(token)
        before = self._decode(self._ids[: self._decoded])
        now = self._decode(self._ids)
        # A character of several tokens decodes to the replacement sign until its last one.
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._held += now[len(before) :]
        # The last few tokens suffice as context, and keep a long answer linear.
        self._ids = self._ids[self._decoded :]
        self._decoded = len(self._ids)
        return self._release()

    def rest(self) -> str:
        """Return what was held back at the end of the answer."""
        if self.ended:
            return ""
        before = self._decode(self._ids[: self._decoded])
        # Of a character that the end cut in two, nothing can be shown.
        tail = self._decode(self._ids)[len(before) :].rstrip("\ufffd")
        held, self._held = self._held + tail, ""
        return (held if self._started else held.lstrip()).rstrip()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _release(self) -> str:
        if not self._started:
            self._held = self._held.lstrip()
        if self._mark and self._mark in self._held:
            self.ended = True
            piece, self._held = self._held.split(self._mark)[0].rstrip(), ""
            return piece
        end = len(self._held.rstrip())
        for size in range(min(len(self._mark) - 1, len(self._held)), 0, -1):
            if self._held.endswith(self._mark[:size]):
                end = len(self._held[: len(self._held) - size].rstrip())
                break
        piece, self._held = self._held[:end], self._held[end:]
        self._started = self._started or bool(piece)
        return piece


def context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that a model can read and write in one go."""
    longest = getattr(model.config, "max_position_embeddings", None) or _UNNAMED_CONTEXT
    return min(longest, tokenizer.model_max_length)


def next_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[set[int], str]:
    """Find out how a template ends an answer and begins the next question.

    Returns:
        ids that end an answer, and the text that begins a question or "". Where special tokens
        begin one, they are among the ids and there is no text.
    """
    question, answer, following = "QUESTION", "ANSWER", "FOLLOWING"
    rendered = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": following},
        ],
        tokenize=False,
    )
    between = rendered.split(answer, 1)[1].split(following, 1)[0]
    special = {
        token.content: index
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special and token.content in between
    }
    stop_ids = {tokenizer.eos_token_id, *special.values()}
    if special.keys() - {tokenizer.eos_token}:
        return stop_ids, ""
    return stop_ids, between.replace(tokenizer.eos_token, "").strip()


class ChatJudge:
    """Scores the answers of conversations with a reward model."""

    def __init__(self, model: RewardModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.model = model
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            install_template(tokenizer, "human_assistant")

    @classmethod
    def from_pretrained(
        cls, path: str, dtype: torch.dtype, trust_remote_code: bool = False
    ) -> ChatJudge:
        """Load a reward model onto the accelerator if there is one.

        Raises:
            ModelError: not found or not readable.
        """
        model = RewardModel.from_pretrained(path, dtype, trust_remote_code=trust_remote_code)
        return cls(model.to(_device()).eval(), load_tokenizer(path, trust_remote_code))

    @torch.inference_mode()
    def score(self, messages: list[Message]) -> float:
        """Return the reward of a conversation that ends with an answer."""
        prompt, answer = _encode_answered(self.tokenizer, messages)
        inputs = torch.tensor([prompt + answer], device=self.model.model.device)
        return float(self.model.scores(inputs, torch.ones_like(inputs)))


@torch.inference_mode()
def divergence(first: ChatGenerator, second: ChatGenerator, messages: list[Message]) -> float:
    """KL from one model to another, exact over the vocabulary, mean over an answer's tokens.

    Args:
        first: the model whose expectation is taken, such as the actor.
        second: the other, such as the SFT model; both share a vocabulary.
        messages: a conversation that ends with the answer.

    Returns:
        nats a token.

    Raises:
        ValueError: the vocabularies differ.
    """
    prompt, answer = _encode_answered(first.tokenizer, messages)
    if (prompt, answer) != _encode_answered(second.tokenizer, messages):
        raise ValueError(
            f"{first.name} and {second.name} do not share tokenizer and template, so their "
            "tokens cannot be compared."
        )
    logs = []
    for generator in (first, second):
        inputs = torch.tensor([prompt + answer], device=generator.model.device)
        logits = generator.model(input_ids=inputs, use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        logs.append(logits.float().log_softmax(dim=-1).cpu())
    vocabulary = min(len(logs[0][0]), len(logs[1][0]))
    left, right = (log[:, :vocabulary] for log in logs)
    return float((left.exp() * (left - right)).sum(dim=-1).mean())


def _encode_answered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message]
) -> tuple[list[int], list[int]]:
    """Ids of a conversation up to its last answer, and of that answer with EOS, as in training."""
    own = str(tokenizer.chat_template).endswith(HUMAN_ASSISTANT_CHAT_TEMPLATE)
    template: Template = "human_assistant" if own else "chat_template"
    answer = encode_answer(messages[-1]["content"], tokenizer, template)
    return encode_prompt(messages[:-1], tokenizer, "chat_template"), answer


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
