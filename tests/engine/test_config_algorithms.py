"""The presets of step 3: what wins, what is refused, and that the page says what they are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_run import configuration

from engine.config.algorithms import PRESETS
from engine.config.rules import ModelFacts, check

PAGE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def test_the_page_has_every_preset_as_it_is():
    rows = {
        cells[0].strip("`"): cells[1:]
        for line in PAGE.read_text().splitlines()
        if line.startswith("| `")
        for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    }
    assert list(rows) == list(PRESETS)
    for name, preset in PRESETS.items():
        assert rows[name][:-1] == [
            str(preset.answers_per_prompt),
            preset.baseline,
            preset.scale + (", whitened" if preset.whiten else ""),
            preset.ratio,
            preset.aggregation,
            f"{preset.clip_low:g}, {preset.clip_high:g}".replace("e-0", "e-"),
            f"{preset.kl_estimator} in the {preset.kl_in}, {preset.kl_coef:g}",
        ]
        assert re.fullmatch(r"\d{4}\.\d{5}|TRL", rows[name][-1])


def test_without_a_choice_step_3_is_ppo_with_the_values_it_always_had():
    found = configuration().algorithm
    assert found == PRESETS["ppo"]
    assert (found.kl_coef, found.clip_low, found.clip_high, found.whiten) == (0.1, 0.2, 0.2, True)


def test_a_value_beside_a_preset_wins_and_the_rest_stays():
    found = configuration(
        "rlhf.algorithm=gspo", "rlhf.scale=none", "ppo.kl_coef=0.3", "ppo.whiten_advantages=true"
    ).algorithm
    assert (found.scale, found.kl_coef, found.whiten) == ("none", 0.3, True)
    assert (found.ratio, found.clip_low, found.clip_high) == ("sequence_mean", 3e-4, 4e-4)
    both = configuration("rlhf.algorithm=dapo", "ppo.clip=0.1").algorithm
    assert (both.clip_low, both.clip_high) == (0.1, 0.1)
    upper = configuration("rlhf.algorithm=dapo", "rlhf.clip_high=0.5").algorithm
    assert (upper.clip_low, upper.clip_high) == (0.2, 0.5)


REFUSED = {
    "groups-need-answers": ("rlhf.algorithm=grpo", "rlhf.answers_per_prompt=1"),
    "rollout-batch-divides": ("rlhf.algorithm=grpo", "rlhf.answers_per_prompt=3"),
    "needs-groups": ("rlhf.scale=group",),
    "critic-options-need-a-critic": ("rlhf.algorithm=rloo", "ppo.gae_lambda=0.9"),
    "second-clip-beyond-the-first": ("rlhf.algorithm=grpo", "rlhf.clip_delta=1.1"),
    "kl-target-needs-a-coefficient": ("rlhf.algorithm=grpo", "ppo.kl_target=1"),
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_does_not_go_together_is_refused_and_its_fix_is_not(rule):
    broken = check(configuration(*REFUSED[rule]))
    assert [violation.id for violation in broken] == [rule]
    fix = [f"{key}={value}" for key, value in broken[0].fix.items()]
    assert check(configuration(*REFUSED[rule], *fix)) == []
    assert check(configuration("alignment=dpo", *REFUSED[rule])) == []


@pytest.mark.parametrize(
    "changes", [("rlhf.resampling_tries=2",), ("rlhf.ratio=sequence_sum",)], ids=str
)
def test_what_compares_answers_to_a_prompt_needs_groups(changes):
    assert [violation.id for violation in check(configuration(*changes))] == ["needs-groups"]
    assert check(configuration("rlhf.algorithm=rloo", *changes)) == []


def test_a_reward_model_that_is_not_needed_is_not_held_against_the_actor():
    facts = ModelFacts(
        actor_positions=1024, reward_positions=8, actor_vocabulary="a", reward_vocabulary="b"
    )
    functions = "rewards.functions=[{name: mine, path: mine.py}]"
    found = check(configuration("rlhf.algorithm=grpo", "models.reward=other"), facts)
    assert {each.id for each in found} == {"same-tokenizer", "fits-position-embeddings"}
    assert (
        check(configuration("rlhf.algorithm=grpo", "models.reward=other", functions), facts) == []
    )


@pytest.mark.parametrize("algorithm", PRESETS)
def test_every_preset_passes_the_rules(algorithm):
    assert check(configuration(f"rlhf.algorithm={algorithm}")) == []
