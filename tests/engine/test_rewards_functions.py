"""Reward functions from a file: what they are given, and what is refused."""

from __future__ import annotations

import pytest

from engine.config.schema import RewardFunction, RunConfig
from engine.rewards.functions import RewardError, RewardFunctions

PROMPTS = ["one?", "two?"]


def functions(tmp_path, code: str, name: str = "reward") -> RewardFunctions:
    file = tmp_path / "mine.py"
    file.write_text(code)
    return RewardFunctions([RewardFunction(name=name, path=str(file))])


def score(found: RewardFunctions):
    return found.score(PROMPTS, ["1", "2"], [[5], [6, 7]], {"answer": ["1", "3"]})


def test_a_function_is_given_what_trl_gives_it(tmp_path):
    code = """
def reward(completions, answer, **kwargs):
    assert kwargs == {"prompts": ["one?", "two?"], "completion_ids": [[5], [6, 7]]}
    return [1 if text == known else None for text, known in zip(completions, answer)]
"""
    assert score(functions(tmp_path, code)) == {"reward": [1.0, None]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return 1 / 0", "raised ZeroDivisionError.*'one\\?'"),
        ("return [1.0]", "returned 1 rewards for 2 answers"),
        ("return [1.0, float('nan')]", "returned nan for 'two\\?'"),
        ("return [1.0, 'much']", "returned 'much' for 'two\\?'"),
    ],
)
def test_what_is_no_reward_is_named_with_its_prompt(body, says, tmp_path):
    found = functions(tmp_path, f"def reward(**kwargs):\n    {body}\n")
    with pytest.raises(RewardError, match=f"'reward' {says}"):
        score(found)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def other(): ...", "no function 'reward', only other"),
        ("def reward(:", "is not Python: invalid syntax"),
        ("def reward(): ...\n1 / 0", "cannot be loaded: ZeroDivisionError"),
        ("reward = 5", "no function 'reward'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(code, says, tmp_path):
    with pytest.raises(RewardError, match=says):
        functions(tmp_path, code)
    with pytest.raises(RewardError, match="no Python file"):
        RewardFunctions([RewardFunction(name="reward", path=str(tmp_path / "none.py"))])


def test_a_run_needs_a_reward_model_for_rewards_or_for_a_critic():
    def steps(algorithm, *kinds):
        entries = [{"name": kind, "kind": kind} for kind in kinds]
        config = RunConfig.model_validate(
            {"rlhf": {"algorithm": algorithm}, "rewards": {"functions": entries}}
        )
        return [step.number for step in config.steps]

    assert steps("grpo") == [1, 2, 3]
    assert steps("grpo", "function") == [1, 3]
    assert steps("grpo", "function", "model") == [1, 2, 3]
    assert steps("ppo", "function") == [1, 2, 3]
