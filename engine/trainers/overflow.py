"""fp16: the loss scale, and steps that actor and critic skip together if either overflowed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from deepspeed import DeepSpeedEngine
from deepspeed.utils import logger


def loss_scale(engine: DeepSpeedEngine) -> float:
    """The factor that the engine's gradients are computed with; 1 in formats that need none."""
    return float(engine.optimizer.loss_scale) if engine.fp16_enabled() else 1.0


def log_overflows() -> None:
    """Let DeepSpeed log each overflow, as the dashboard counts them; it logs only warnings itself.

    Its other lines at level INFO stay hidden.
    """
    # DeepSpeed's loss scalers log an overflow at level INFO, in a function named update_scale.
    logger.setLevel(min(logger.level, logging.INFO))
    for handler in logger.handlers:
        if handler.level > logging.INFO:
            handler.setLevel(logging.INFO)
            handler.addFilter(_is_warning_or_overflow)


def _is_warning_or_overflow(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or record.funcName.endswith("update_scale")


@contextmanager
def scale_updated_afterwards(engine: DeepSpeedEngine) -> Iterator[None]:
    """During an optimizer step, change the loss scale only after the step.

    DeepSpeed 0.19 raises the scale first and then divides the gradients by the new one, so that
    every step that raises it would take half of its gradients.
    """
    if not engine.fp16_enabled():
        yield
        return
    update_scale = engine.optimizer._update_scale
    updates: list[bool] = []
    with _replaced(engine.optimizer, "_update_scale", updates.append):
        yield
    for overflowed in updates:
        update_scale(overflowed)


@contextmanager
def aligned_overflow(
    actor: DeepSpeedEngine, critic: DeepSpeedEngine
) -> Iterator[tuple[bool, bool]]:
    """Between the backward passes and the steps: decide for both engines whether they skip.

    An engine that skips only because the other did keeps its loss scale. A collective of all ranks.

    Yields:
        whether the actor and whether the critic overflowed; both False between optimizer steps.
    """
    if not actor.is_gradient_accumulation_boundary():
        yield False, False
        return
    found = _overflowed(actor), _overflowed(critic)
    with ExitStack() as stack:
        for engine, own in zip((actor, critic), found, strict=True):
            stack.enter_context(_decided(engine, any(found), keep_scale=not own and any(found)))
        yield found


def _overflowed(engine: DeepSpeedEngine) -> bool:
    """Whether the current gradients are infinite or NaN on any rank.

    DeepSpeed checks this once per step and resets it, so the step must be given the result.
    """
    optimizer = engine.optimizer
    # Stage 0's wrappers have a checker; ZeRO's optimizers have a method, whose argument
    # is whether each rank holds only a part of the gradients.
    if hasattr(optimizer, "overflow_checker"):
        return bool(optimizer.overflow_checker.check())
    return bool(optimizer.has_overflow(engine.zero_optimization_stage() > 1))


@contextmanager
def _decided(engine: DeepSpeedEngine, overflow: bool, keep_scale: bool) -> Iterator[None]:
    """Give the optimizer this result instead of letting it check again."""
    optimizer = engine.optimizer
    checker = getattr(optimizer, "overflow_checker", optimizer)
    with ExitStack() as stack:
        stack.enter_context(_replaced(checker, "has_overflow", lambda *_, **__: overflow))
        if keep_scale:
            stack.enter_context(_replaced(optimizer, "_update_scale", lambda *_, **__: None))
        yield


@contextmanager
def _replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object; whatever was there before is restored afterwards."""
    hidden = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if hidden is None:
            delattr(owner, name)
        else:
            setattr(owner, name, hidden)
