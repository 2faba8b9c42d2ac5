"""run.json: what older versions wrote is read, and what is damaged is refused."""

from __future__ import annotations

import json

import pytest

from dschat_tui.runs.state import (
    DONE,
    PENDING,
    RunState,
    StepState,
    has_state,
    in_order,
    new_run_state,
    new_step_state,
    parse_run_state,
    steps_of,
)
from engine.config.steps import BY_NAME, STEPS


def test_what_a_run_writes_is_what_it_reads() -> None:
    state = new_run_state("tiny")
    state["steps"] = {step.name: new_step_state(step) for step in STEPS[:3]}
    assert parse_run_state(json.dumps(state)) == state


def test_an_older_file_gets_what_its_version_did_not_write() -> None:
    content = {"profile": "old", "state": "stopped", "steps": {"sft": {"state": "done"}}}
    state = parse_run_state(json.dumps(content))
    assert state.keys() >= RunState.__annotations__.keys()
    ((step, record),) = steps_of(state)
    assert step is BY_NAME["sft"]
    assert record.keys() == StepState.__annotations__.keys()
    assert (record["state"], record["metrics"], record["process"]) == (DONE, {}, None)
    assert (state["gates"], state["changes"], state["supervisor"]) == ([], [], None)


def test_what_a_later_version_adds_is_kept_and_its_steps_are_left_out() -> None:
    content = {"steps": {"sft": {"state": "done"}, "grpo": {"state": "done"}}, "later": 1}
    state = parse_run_state(json.dumps(content))
    assert dict(state)["later"] == 1
    assert [step.name for step, _ in steps_of(state)] == ["sft"]


@pytest.mark.parametrize("text", ["", "[]", "3", '{"steps": []}', '{"steps": {"sft": 1}}'])
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_run_state(text)


def test_steps_stand_in_the_order_of_the_table() -> None:
    steps = {step.name: new_step_state(step) for step in reversed(STEPS)}
    assert list(in_order(dict(steps))) == [step.name for step in STEPS]
    state = new_run_state("tiny")
    state["steps"] = {"sft": new_step_state(BY_NAME["sft"])}
    assert has_state(state, "sft", PENDING)
    assert not has_state(state, "ppo", PENDING)
