"""Warm-ups that do not do what they were set for. Brings in no torch."""

from __future__ import annotations

from engine.config.schema import StepConfig
from engine.config.steps import StepName


def warmup_problem(name: StepName, options: StepConfig, steps: int | None) -> str | None:
    """What is wrong with a step's warm-up, and what to do; None if it ends before training does.

    Args:
        name: of the step.
        options: of the step.
        steps: the length of training; None if it is not known.
    """
    key, warmup = f"{name}.warmup_steps", options.warmup_steps
    if warmup and options.scheduler == "constant":
        return (
            f"{key}={warmup} does nothing with {name}.scheduler=constant; set "
            f"{name}.scheduler=constant_with_warmup, or {key}=0"
        )
    updates = options.updates_per_step
    if not warmup or steps is None or warmup < steps * updates:
        return None
    counted = f"{steps * updates} optimizer steps"
    if updates > 1:
        counted += f" ({steps} steps of {updates} updates)"
    # The learning rate of optimizer step k, counted from 0, is k / warmup of the one that is set.
    reached = (steps * updates - 1) / warmup
    return (
        f"{key}={warmup}, but training has only {counted}: the learning rate rises to "
        f"{reached:.0%} of its value and no further; lower {key} or train for longer"
    )
