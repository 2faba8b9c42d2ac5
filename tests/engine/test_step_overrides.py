"""A step trains under its own view of the configuration."""

from __future__ import annotations

import pytest

from engine.config.loading import resolve
from engine.trainers.context import StepContext


@pytest.mark.parametrize(("step", "stage"), [("sft", 3), ("reward", 0), ("ppo", 3)])
def test_a_step_has_its_overrides_and_no_other_step_has(tmp_path, step, stage):
    config = resolve(
        {"critic": {"zero_stage": 3}, "reward": {"overrides": {"critic": {"zero_stage": 0}}}},
        "test",
    )
    assert StepContext.create(config, tmp_path, step).config.critic.zero_stage == stage
