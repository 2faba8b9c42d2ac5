"""The hybrid engine: an actor laid out for training, answered from a layout for generation.

Between training steps the weights are gathered once and LoRA is merged into a copy; tokens then
cost neither a gathering nor a second product. Training finds every tensor as it left it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine.config.schema import HybridEngineConfig
from engine.generation import plain
from engine.generation.cache import KeyValueCache
from engine.generation.decode import Decoder, ModuleDecoder, decode
from engine.generation.packed import (
    GatherFailed,
    PackedDecoder,
    effective_weight,
    gathered,
    unsupported_reason,
)
from engine.generation.sampling import Generation, Sampling

# Share of the largest logit by which two correct forwards may differ.
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_CHECK_ROWS = 4
_CHECK_TOKENS = 8
_ROWS = 8


class HybridEngine:
    """Generation for an actor in training, under ZeRO 0 to 3, with LoRA or without.

    Families with a packed decoder leave the model alone and read a copy of its weights; others
    run their own forward on gathered and merged parameters, without ZeRO-3's hooks.

    Attributes:
        off_reason: why the engine switched itself off, in words for the log; None while on.

    Args:
        engine: what `deepspeed.initialize` returned, or a plain model.
        config: `enabled` False makes every call plain `generate`.
    """

    def __init__(self, engine: nn.Module, config: HybridEngineConfig | None = None) -> None:
        self.model: nn.Module = getattr(engine, "module", engine)
        self.config = config or HybridEngineConfig(enabled=True)
        self.off_reason: str | None = None
        self._checked = False
        self._pinned = False
        self._cache = KeyValueCache()
        self._decoder: Decoder | None = None
        self._weights = ExitStack()

    @property
    def enabled(self) -> bool:
        """Whether answers come from the generation layout."""
        return self.config.enabled and self.off_reason is None

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Between entering and leaving, weights must not change. A collective under ZeRO-3."""
        self._pinned = not self.config.unpin_actor_parameters
        try:
            # Before the check it is not known whether the weights can be taken at all.
            if self.enabled and self._checked and self._pinned:
                self._take_weights()
            yield
        finally:
            self._pinned = False
            self._give_back_weights()
            if self.config.release_inference_cache:
                self._cache.release()

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> Generation:
        """Generate answers; as `engine.generation.plain.generate`.

        The first call checks the engine against the model's own forward and, beyond near-ties,
        switches it off; that and every call with unpinned or plain weights is a collective.
        """
        if self.enabled and not self._checked:
            self._check(input_ids[:_CHECK_ROWS], attention_mask[:_CHECK_ROWS], sampling)
        if not self.enabled:
            return plain.generate(self.model, input_ids, attention_mask, sampling, generator)
        with self._weights_at_hand() as decoder:
            return decode(decoder, input_ids, attention_mask, sampling, generator, self._cache)

    @contextmanager
    def _weights_at_hand(self) -> Iterator[Decoder]:
        """The decoder of the rollout, or one for this call."""
        if self._decoder is not None:
            yield self._decoder
            return
        try:
            yield self._take_weights()
        finally:
            self._give_back_weights()

    def _take_weights(self) -> Decoder:
        inner = plain.causal_lm(self.model)
        if unsupported_reason(inner) is None:
            self._decoder = PackedDecoder(inner, _ROWS)
            return self._decoder
        with ExitStack() as stack:
            stack.enter_context(gathered(self.model))
            stack.enter_context(_without_deepspeed_hooks(self.model))
            stack.enter_context(_lora_merged(self.model))
            stack.enter_context(plain.evaluation_mode(self.model))
            self._weights = stack.pop_all()
        self._decoder = ModuleDecoder(inner)
        return self._decoder

    def _give_back_weights(self) -> None:
        self._decoder = None
        self._weights.close()

    def _check(self, input_ids: Tensor, attention_mask: Tensor, sampling: Sampling) -> None:
        """Compare greedy tokens with the model as training sees it; a collective.

        Ranks agree after each part that may fail on one of them alone, since all must go the same
        way into the next collective.
        """
        greedy = Sampling(
            max_new_tokens=min(_CHECK_TOKENS, sampling.max_new_tokens),
            eos_ids=sampling.eos_ids,
            pad_id=sampling.pad_id,
            greedy=True,
            ignore_eos=True,
        )
        results: list[Generation] = []

        def answer() -> None:
            with self._weights_at_hand() as decoder:
                results.append(decode(decoder, input_ids, attention_mask, greedy))

        self._checked = True
        self.off_reason = _failure_on_any_rank(answer)
        if self.off_reason is not None:
            return
        # A failure of the model's own forward is not caught: plain generation would fail as well.
        logits = self._own_logits(input_ids, attention_mask, results[0].answers)
        self.off_reason = _failure_on_any_rank(self._difference, logits, results[0])
        del logits
        if self._pinned and self.enabled:
            self.off_reason = _failure_on_any_rank(self._take_weights)
            if not self.enabled:
                self._give_back_weights()

    @torch.no_grad()
    def _own_logits(self, input_ids: Tensor, attention_mask: Tensor, answers: Tensor) -> Tensor:
        """Logits that predict the answers under the model's own forward; a collective."""
        whole = torch.cat((input_ids, answers), dim=1)
        mask = torch.cat((attention_mask, torch.ones_like(answers)), dim=1)
        inputs: dict[str, Any] = {"input_ids": whole, "attention_mask": mask}
        if ModuleDecoder(plain.causal_lm(self.model)).takes_positions:
            inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
        with plain.evaluation_mode(self.model):
            return self.model(**inputs).logits[:, input_ids.shape[1] - 1 : -1].float()

    def _difference(self, logits: Tensor, result: Generation) -> str | None:
        """What sets the tokens apart from the likeliest under the model's own logits."""
        chosen = logits.gather(2, result.answers.unsqueeze(2)).squeeze(2)
        behind = logits.amax(dim=2) - chosen
        log_probs = chosen - logits.logsumexp(dim=2)
        apart = (log_probs - result.log_probs).abs()
        share = _TOLERANCE[next(self.model.parameters()).dtype]
        bound = max(share * logits.abs().max().item(), torch.finfo(torch.float32).eps)
        # Written so that NaN counts as a difference.
        if not bool((behind <= bound).all()):
            wrong = int((~(behind <= bound)).sum())
            return (
                f"{wrong} of {behind.numel()} greedy tokens differ from plain generation beyond "
                f"near-ties (logits {behind.max().item():.3g} apart, {bound:.3g} allowed)"
            )
        if not bool((apart <= 2 * bound).all()):
            return (
                f"log-probabilities are {apart.max().item():.3g} from those of plain generation, "
                f"{2 * bound:.3g} allowed"
            )
        return None


def _failure_on_any_rank(attempt: Callable[..., object], *arguments: object) -> str | None:
    """Why an attempt failed on any rank, the same for all; None if on none. A collective.

    Args:
        attempt: fails with an exception or by returning the reason as a string. It may hold
            gathers of ZeRO-3 if it runs through all of them even when it fails.
        arguments: of the attempt.

    Raises:
        GatherFailed: other ranks may wait in that gather, so that no agreement can be had.
    """
    # A family may fail in any way under a cache that is not its own.
    try:
        outcome = attempt(*arguments)
        reason = outcome if isinstance(outcome, str) else None
    except GatherFailed:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return reason
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    return next((each for each in reasons if each is not None), None)


@contextmanager
def _without_deepspeed_hooks(model: nn.Module) -> Iterator[None]:
    """Take DeepSpeed's hooks off all modules: they would drop gathered parameters layer by layer.

    The same hooks come back at the same places, so that ZeRO-3 keeps its record of the order in
    which parameters are needed.
    """
    saved = []
    try:
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                saved.append((hooks, list(hooks.items())))
                for key, hook in saved[-1][1]:
                    if hook.__module__.startswith("deepspeed."):
                        del hooks[key]
        yield
    finally:
        for hooks, items in saved:
            hooks.clear()
            hooks.update(items)


@contextmanager
def _lora_merged(model: nn.Module) -> Iterator[None]:
    """Point adapted weights to merged copies and switch the adapters off.

    On leaving they point to the tensors from before: subtracting the update again would drift.
    """
    saved = []
    try:
        for module in model.modules():
            if not hasattr(module, "base_layer") or not hasattr(module, "_disable_adapters"):
                continue
            weight = module.base_layer.weight
            saved.append((module, module._disable_adapters, weight, weight.data))
            with torch.no_grad():
                weight.data = effective_weight(module)
            module._disable_adapters = True
        yield
    finally:
        for module, disabled, weight, data in saved:
            weight.data = data
            module._disable_adapters = disabled
