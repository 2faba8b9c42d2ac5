"""The decode loop: a cache allocated once, finished rows dropped, nothing past the last EOS."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from engine.algorithms.masks import answer_lengths, length_mask
from engine.generation.cache import KeyValueCache, transformers_view
from engine.generation.packed import PackedDecoder, unsupported_reason
from engine.generation.plain import causal_lm
from engine.generation.sampling import (
    Generation,
    Sampling,
    choose_tokens,
    draw_uniforms,
    without_padding,
)


class Decoder(Protocol):
    """A causal language model as the decode loop sees it."""

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        ...

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        cache: KeyValueCache,
    ) -> Tensor:
        """Run new tokens `(rows, new)` behind the cache and advance it.

        Args:
            input_ids: the new tokens, `(rows, new)`.
            positions: their position ids, `(rows, new)`.
            attention_mask: 1 on tokens and 0 on padding of the cache and the new tokens,
                `(rows, length + new)`; None if there is no padding.
            cache: what came before.

        Returns:
            logits behind the last token, `(rows, vocabulary)`.
        """
        ...


class ModuleDecoder:
    """A decoder through the model's own forward, for any family of transformers.

    The model must be in evaluation mode, and its parameters must be whole.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.takes_positions = "position_ids" in parameters
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._views: tuple[KeyValueCache, Any] | None = None

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        cache: KeyValueCache,
    ) -> Tensor:
        """See `Decoder`."""
        if self._views is None or self._views[0] is not cache:
            layers = self.model.config.get_text_config().num_hidden_layers
            self._views = (cache, transformers_view(cache, layers))
        inputs: dict[str, Any] = {self._cache_name: self._views[1], **self._options}
        if self.takes_positions:
            inputs["position_ids"] = positions
        output = self.model(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=True, **inputs
        )
        cache.advance(input_ids.shape[1])
        return output.logits[:, -1]


def decode(
    decoder: Decoder,
    input_ids: Tensor,
    attention_mask: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None = None,
    cache: KeyValueCache | None = None,
) -> Generation:
    """Generate answers for a batch of prompts.

    With a generator in the same state this samples the tokens that `plain.generate` samples, up
    to rounding of the logits.

    Args:
        decoder: the model.
        input_ids: left-padded prompts, `(batch, prompt)`.
        attention_mask: 1 on tokens, 0 on padding, `(batch, prompt)`.
        sampling: how to sample.
        generator: source of random numbers; the global one if None.
        cache: buffers to use again; new ones if None.
    """
    with torch.inference_mode():
        answers, log_probs = _decode(
            decoder, input_ids, attention_mask, sampling, generator, cache or KeyValueCache()
        )
    # Tensors of inference mode cannot enter autograd; these copies can.
    answers, log_probs = answers.clone(), log_probs.clone()
    lengths = answer_lengths(answers, () if sampling.ignore_eos else sampling.eos_ids)
    outside = ~length_mask(lengths, answers.shape[1])
    return Generation(answers, lengths, log_probs.masked_fill_(outside, 0.0))


def _decode(
    decoder: Decoder,
    input_ids: Tensor,
    attention_mask: Tensor,
    sampling: Sampling,
    generator: torch.Generator | None,
    cache: KeyValueCache,
) -> tuple[Tensor, Tensor]:
    batch, device = len(input_ids), input_ids.device
    # Columns that are padding in every row cost time and say nothing.
    filled = int(attention_mask.any(dim=0).int().argmax())
    input_ids, attention_mask = input_ids[:, filled:], attention_mask[:, filled:].long()
    width, limit = input_ids.shape[1], sampling.max_new_tokens
    answers = torch.full((batch, limit), sampling.pad_id, dtype=torch.long, device=device)
    log_probs = torch.zeros(batch, limit, device=device)
    eos = torch.tensor(() if sampling.ignore_eos else sampling.eos_ids, device=device).long()
    positions = (attention_mask.cumsum(dim=1) - 1).clamp_(min=0)
    mask = torch.cat((attention_mask, attention_mask.new_ones(batch, limit)), dim=1)
    has_padding = (attention_mask == 0).any(dim=1)
    padded = bool(has_padding.any())
    prompts = without_padding(input_ids, attention_mask)
    rows = torch.arange(batch, device=device)
    cache.start(batch, width + limit - 1)

    logits = decoder.step(input_ids, positions, attention_mask if padded else None, cache)
    positions = positions[:, -1:]
    step = 0
    while True:
        uniforms = None
        if not sampling.greedy:
            uniforms = draw_uniforms(batch, device, generator)[rows]
        history = None
        if sampling.repetition_penalty != 1.0:
            history = torch.cat((prompts[rows], answers[rows, :step]), dim=1)
        tokens, chosen = choose_tokens(logits, sampling, uniforms, history)
        answers[rows, step] = tokens
        log_probs[rows, step] = chosen
        step += 1
        if step == limit:
            break
        if len(eos):
            unfinished = ~torch.isin(tokens, eos)
            # The one wait for the device in a step.
            left, left_padded = torch.stack((unfinished, unfinished & has_padding)).sum(1).tolist()
            if not left:
                break
            if left < len(rows):
                order = cache.keep_rows(unfinished, left)
                rows, tokens, positions = rows[order], tokens[order], positions[order]
                mask, has_padding = mask[order], has_padding[order]
                padded = left_padded > 0
        positions = positions + 1
        seen = mask[:, : cache.length + 1] if padded else None
        logits = decoder.step(tokens.unsqueeze(1), positions, seen, cache)
    return answers[:, :step], log_probs[:, :step]


def build_decoder(model: nn.Module, rows: int, copy: bool = True) -> Decoder:
    """The fastest decoder for a model: packed if its family has one, else its own forward.

    Args:
        model: a causal language model of transformers, peft's wrapper allowed.
        rows: sequences that are decoded at once, on average.
        copy: allow a copy of the weights in a faster layout.
    """
    inner = causal_lm(model)
    if unsupported_reason(inner) is None:
        return PackedDecoder(inner, rows, copy)
    return ModuleDecoder(inner)


class DecodeSession:
    """One sequence that grows, as a conversation does: only new tokens are computed.

    Args:
        decoder: the model, as from `build_decoder(model, rows=1)`.
        offload_cache: keep keys and values in host memory.
    """

    def __init__(self, decoder: Decoder, offload_cache: bool = False) -> None:
        self.decoder = decoder
        self.tokens: list[int] = []
        self._cache = KeyValueCache(offload_cache)
        self._cache.start(1, 256)

    def truncate(self, length: int) -> None:
        """Forget all tokens from index `length` on."""
        del self.tokens[length:]
        self._cache.truncate(length)

    def feed(self, tokens: list[int]) -> None:
        """Put the sequence at `tokens`: their longest common start with it stays computed."""
        common = 0
        for ours, theirs in zip(self.tokens, tokens, strict=False):
            if ours != theirs:
                break
            common += 1
        self.truncate(common)
        self.tokens.extend(tokens[common:])

    def stream(
        self, sampling: Sampling, generator: torch.Generator | None = None
    ) -> Iterator[tuple[int, float]]:
        """Continue the sequence, a token and its log-probability at a time, EOS included.

        Stop iterating and the session holds what was yielded.

        Raises:
            ValueError: the sequence is empty.
        """
        if not self.tokens:
            raise ValueError("The session holds no tokens; feed it a prompt before streaming.")
        for _ in range(sampling.max_new_tokens):
            token, log_prob = self._next(sampling, generator)
            self.tokens.append(token)
            yield token, log_prob
            if token in sampling.eos_ids and not sampling.ignore_eos:
                return

    @torch.inference_mode()
    def _next(self, sampling: Sampling, generator: torch.Generator | None) -> tuple[int, float]:
        # The last token's logits are not kept, so that one at least is always computed.
        self._cache.truncate(len(self.tokens) - 1)
        start = self._cache.length
        device = self.decoder.device
        ids = torch.tensor([self.tokens[start:]], device=device)
        positions = torch.arange(start, len(self.tokens), device=device).unsqueeze(0)
        logits = self.decoder.step(ids, positions, None, self._cache)
        uniforms = None if sampling.greedy else draw_uniforms(1, device, generator)
        history = torch.tensor([self.tokens], device=device)
        token, log_prob = choose_tokens(logits, sampling, uniforms, history)
        return int(token), float(log_prob)
