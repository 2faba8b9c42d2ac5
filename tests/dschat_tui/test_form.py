"""The form of the Start screen, without a screen: rules, texts of values, profiles, bars."""

from __future__ import annotations

import typing
from pathlib import Path

import hypothesis.strategies as st
import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from dschat_tui import profiles
from dschat_tui.dashboard import form as forms
from dschat_tui.dashboard.form import Form, value_text
from dschat_tui.dashboard.screens.start import plan as plans
from dschat_tui.dashboard.screens.start.options import GROUPS
from dschat_tui.dashboard.widgets.rows import row_text
from dschat_tui.machine import GIB
from dschat_tui.runs import memory_plan
from dschat_tui.text import ASCII, UNICODE
from engine.config.loading import (
    ConfigError,
    apply_overrides,
    get_value,
    load_profile,
    options,
    profile_names,
    resolve,
    user_profiles,
)
from engine.config.rules import check
from engine.config.schema import Group, RunConfig

WITH_CHOICES = [option.key for option in options() if forms.choices(option.key)]


@pytest.fixture
def tiny() -> Form:
    """The form of the profile tiny, unchanged."""
    return Form("tiny", load_profile("tiny"))


def test_the_tabs_are_the_groups_of_the_schema_and_all_has_every_option():
    assert list(GROUPS) == [*typing.get_args(Group), forms.ALL]
    assert [option.key for option in forms.options_of("LoRA")][:2] == [
        "actor.lora.rank",
        "actor.lora.alpha",
    ]
    grouped = [option.key for group in GROUPS[:-1] for option in forms.options_of(group)]
    assert len(grouped) == len(set(grouped))
    known = [option.key for option in options()]
    assert set(grouped) < set(known)
    assert [option.key for option in forms.options_of(forms.ALL)] == known


def test_the_stages_of_zero_are_choices_and_free_numbers_are_not():
    assert forms.choices("actor.zero_stage") == (0, 1, 2, 3)
    assert forms.choices("actor.offload") == (False, True)
    assert "bf16" in forms.choices("dtype")
    assert forms.choices("sft.batch_size") == forms.choices("ppo.kl_target") == ()


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m", "opt-66b"])
def test_the_text_of_every_value_gives_the_value_back(name: str):
    config = load_profile(name)
    texts = [f"{o.key}={value_text(get_value(config, o.key))}" for o in options()]
    assert resolve(apply_overrides({}, texts), "texts") == config


@pytest.mark.parametrize(
    "sources",
    [
        [{"path": "a,b.json"}],
        [{"path": "Dahoas/rm-static", "subset": "x"}],
        [{"path": "a.json", "columns": {"prompt": "q"}}, {"path": "true"}],
        [],
    ],
)
def test_sources_that_are_more_than_a_name_survive_as_text(sources: list):
    config = resolve({"data": {"sources": sources}}, "test")
    text = value_text(config.data.sources)
    again = resolve(apply_overrides({}, [f"data.sources={text}"]), "text")
    assert again.data.sources == config.data.sources


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(WITH_CHOICES), st.sampled_from([1, -1])), max_size=6))
def test_no_series_of_allowed_changes_breaks_a_rule_and_the_command_tells_all(changes):
    form = Form("tiny", load_profile("tiny"))
    for key, by in changes:
        form.assign({key: value_text(form.next_value(key, by))})
        assert form.violations == check(form.config) == []
    command = form.command(Path("output/x"))
    assert command[:4] == ["dschat", "run", "--profile", "tiny"]
    assignments = [command[i + 1] for i, part in enumerate(command) if part == "--set"]
    assert load_profile("tiny", assignments) == form.config


def test_what_a_rule_forbids_is_greyed_with_its_way_out(tiny: Form):
    assert tiny.is_greyed("mixz.enabled")
    assert not tiny.is_greyed("actor.zero_stage")
    assert not tiny.is_greyed("sft.batch_size")
    [(value, violation)] = tiny.obstacles("mixz.enabled")
    assert value is True
    assert violation.id == "mixz-needs-zero3-and-lora"
    tiny.assign(tiny.suggested_fix("mixz.enabled"))
    assert tiny.config.mixz.enabled
    assert tiny.violations == []
    # now the other way round: what MixZ needs cannot be taken from it
    assert tiny.is_greyed("actor.zero_stage")
    assert tiny.suggested_fix("actor.zero_stage") == {}
    assert tiny.next_value("actor.zero_stage", 1) == 3


def test_a_change_back_is_no_change_and_a_bad_one_leaves_the_form_as_it_was(tiny: Form):
    tiny.assign({"sft.batch_size": "32"})
    assert tiny.assignments == {"sft.batch_size": "32"}
    with pytest.raises(ConfigError, match=r"sft\.batch_size"):
        tiny.assign({"sft.batch_size": "many"})
    assert tiny.config.sft.batch_size == 32
    tiny.reset("sft.batch_size")
    assert tiny.assignments == {}
    assert tiny.config == load_profile("tiny")


def test_a_saved_form_is_a_profile_with_only_what_differs(tiny: Form):
    tiny.assign({"actor.gradient_checkpointing": "true", "ppo.kl_coef": "0.05"})
    path = tiny.save("saved-by-test")
    try:
        assert path.parent == user_profiles()
        assert "saved-by-test" in profile_names()
        assert load_profile("saved-by-test") == tiny.config
        values = yaml.safe_load(path.read_text())
        assert values["actor"]["gradient_checkpointing"] is True
        assert list(values) == ["extends", "actor", "ppo"]
        saved = profiles.examine("saved-by-test")
        assert saved.first_sentence == "Made in the dashboard from the profile tiny."
        assert not saved.problems
        for taken in ("saved-by-test", "tiny", "no name", "../up", ""):
            with pytest.raises(ConfigError):
                tiny.save(taken)
    finally:
        path.unlink()


def test_a_change_of_what_its_profile_has_in_one_step_alone_is_saved_whole():
    base = load_profile("opt-66b")
    [step] = [s for s in ("sft", "reward", "ppo") if get_value(base, f"{s}.overrides")][:1]
    form = Form("opt-66b", base)
    form.assign({f"{step}.overrides": "{}"})
    path = form.save("saved-by-test")
    try:
        assert load_profile("saved-by-test") == form.config != base
    finally:
        path.unlink()


def everything() -> RunConfig:
    """A configuration with all that a plan can hold."""
    values = {
        "dtype": "bf16",
        "actor": {"zero_stage": 3, "offload": True, "lora": {"rank": 8, "only": True}},
        "critic": {"zero_stage": 2},
        "ref": {"share_actor": False},
        "hybrid_engine": {"enabled": True},
        "ema": {"enabled": True},
        "data": {"unsupervised_sources": ["embedded:facts"]},
        "launch": {"deployment": "single_node", "num_accelerators": 2},
    }
    return resolve(values, "test")


@pytest.mark.parametrize("memory_gib", [None, 0.5, 80.0])
def test_the_parts_of_a_bar_are_all_that_a_step_holds(memory_gib: float | None):
    report = memory_plan.make(everything(), memory_gib, find_change=False, offline=True)
    for step in report.plan.steps:
        whole_of = {
            None: step.device_bytes,
            1: step.host_bytes,
            2: max(step.node_phases(2).values()),
        }
        for ranks, whole in whole_of.items():
            sizes = plans.parts_of(step, ranks)
            assert sum(sizes.values()) == whole
            assert min(sizes.values(), default=1) > 0
    ppo = report.plan.steps[-1]
    held = plans.parts_of(ppo, None).keys() | plans.parts_of(ppo, 2).keys()
    assert {"actor", "reference", "critic", "reward", "optimizer", "actor_ema"} <= held
    assert "cache" in held


@given(
    st.dictionaries(st.sampled_from([p.name for p in plans.PARTS]), st.integers(1, 10**12)),
    st.integers(1, 10**12),
    st.integers(10, 120),
    st.sampled_from([UNICODE, ASCII]),
)
def test_a_bar_is_as_wide_as_its_place_and_shows_where_memory_ends(sizes, capacity, width, glyphs):
    text = row_text(plans.bar(sizes, capacity, width, glyphs))
    assert len(text) == width
    assert (glyphs.cursor in text) == (sum(sizes.values()) > capacity)
    letters = [sign for sign in text if sign.isupper()]
    order = [part.letter for part in plans.PARTS if part.name in sizes]
    assert letters == [letter for letter in order if letter in letters]
    if glyphs is ASCII:
        assert text.isascii()


@pytest.mark.parametrize("width", [56, 80, 160])
def test_the_plan_says_what_to_change_where_it_does_not_fit(width: int):
    config = load_profile("tiny")
    whole = memory_plan.make(config, 80.0, offline=True).plan.device_bytes / GIB
    short = memory_plan.make(config, 0.97 * whole, offline=True)
    assert short.change is not None
    rows = [row_text(row) for row in plans.plan_rows(short, True, width, ASCII)]
    assert rows[0].startswith("X does not fit")
    assert max(map(len, rows)) <= width
    for key in short.change.assignments:
        assert key in "".join(row.strip() for row in rows)
    looking = [row_text(row) for row in plans.plan_rows(short, False, width, ASCII)]
    assert any("looking for a change that fits" in row for row in looking)
