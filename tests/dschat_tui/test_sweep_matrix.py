"""The matrix of a sweep before anything starts: cells, names, what is pruned, preparations."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dschat_tui.runs.preflight import Refusal
from dschat_tui.sweep import checks, matrix
from dschat_tui.sweep.matrix import Axis, make, parse_axis, read_matrix
from engine.config.loading import ConfigError, get_value, load_profile

ORIGINAL = re.compile(r"z[23]_he_(true|false)_offload_(true|false)_lora_(true|false)")


def examine(sweep: matrix.Sweep, output: Path) -> dict[str, tuple[str, str]]:
    found = checks.examine(sweep, output)
    return {name: (outcome["state"], outcome["reason"]) for name, outcome in found.items()}


def test_the_default_of_step_3_is_the_original_matrix_with_one_cell_pruned(tmp_path):
    sweep = make("tiny", (3,), [])
    names = [cell.name for cell in sweep.cells]
    assert len(set(names)) == 16
    assert all(ORIGINAL.fullmatch(name) for name in names)
    found = examine(sweep, tmp_path / "sweep")
    pruned = {name: reason for name, (state, reason) in found.items() if state == "pruned"}
    assert list(pruned) == ["z2_he_true_offload_true_lora_false"]
    assert "zero2-offload-hybrid-needs-lora" in pruned["z2_he_true_offload_true_lora_false"]
    assert [state for state, _ in found.values()].count("pending") == 15
    assert not (tmp_path / "sweep").exists()


def test_a_name_says_what_its_cell_is_configured_for():
    for cell in make("tiny", (3,), []).cells:
        stage, hybrid, offload, lora = re.findall(r"[23]|true|false", cell.name)
        assert cell.config.actor.zero_stage == cell.config.critic.zero_stage == int(stage)
        assert cell.config.hybrid_engine.enabled == (hybrid == "true")
        assert cell.config.actor.offload == cell.config.critic.offload == (offload == "true")
        assert (cell.config.actor.lora.rank > 0) == (lora == "true")


@pytest.mark.parametrize(("steps", "axes"), [((1,), 3), ((2,), 2), ((1, 2), 3)])
def test_steps_1_and_2_have_their_own_defaults_without_the_hybrid_engine(steps, axes, tmp_path):
    sweep = make("tiny", steps, [])
    assert len(sweep.axes) == axes
    assert len(sweep.cells) == 2**axes
    assert {state for state, _ in examine(sweep, tmp_path / "sweep").values()} == {"pending"}


def test_other_axes_have_names_of_keys_and_values():
    axes = [parse_axis("ppo.kl_coef=0.05,1e-3"), parse_axis("dtype=fp32,bf16")]
    sweep = make("tiny", (3,), axes, max_steps=7)
    assert [cell.name for cell in sweep.cells] == [
        "ppo.kl_coef=0.05_dtype=fp32",
        "ppo.kl_coef=0.05_dtype=bf16",
        "ppo.kl_coef=1e-3_dtype=fp32",
        "ppo.kl_coef=1e-3_dtype=bf16",
    ]
    assert [cell.config.ppo.kl_coef for cell in sweep.cells] == [0.05, 0.05, 1e-3, 1e-3]
    assert {cell.config.ppo.max_steps for cell in sweep.cells} == {7}


def test_lora_takes_ranks_and_its_false_switches_only_lora_off():
    assignments = ["actor.lora.rank=16", "actor.lora.only=true"]
    cells = make("tiny", (3,), [parse_axis("lora=true,8,false")], assignments).cells
    assert [cell.config.actor.lora.rank for cell in cells] == [16, 8, 0]
    assert [cell.config.actor.lora.only for cell in cells] == [True, True, False]
    # the critic's stays, as in the original
    assert {cell.config.critic.lora.rank for cell in cells} == {0}


def test_lora_without_a_rank_is_the_original_one_and_narrower_in_small_models(tmp_path):
    def rank(width: int) -> int:
        folder = tmp_path / str(width)
        folder.mkdir()
        shape = {"hidden_size": width, "ffn_dim": 4 * width, "num_attention_heads": 8}
        shape |= {"num_hidden_layers": 2, "vocab_size": 100, "max_position_embeddings": 64}
        (folder / "config.json").write_text(json.dumps({"model_type": "opt", **shape}))
        given = [f"models.actor={folder}"]
        return make("tiny", (3,), [Axis("lora", (True,))], given).cells[0].config.actor.lora.rank

    assert rank(2048) == 128
    assert 0 < rank(128) < 128 / 4


@pytest.mark.parametrize(
    "hostile",
    ["../../etc", "/a/b/c", "x\x1b[2J", "a b\nc", "[bold]", "z" * 400, "a|b`c", "\u202eabc"],
)
def test_hostile_values_make_harmless_names(hostile):
    name = matrix.cell_name({"models.actor": hostile})
    assert re.fullmatch(r"[A-Za-z0-9._+=-]+", name)
    assert len(name) <= matrix.LONGEST_NAME
    assert Path(name).name == name


def test_values_that_make_the_same_name_have_cells_of_their_own():
    sweep = make("tiny", (1,), [Axis("models.actor", ("a/b", "a b", "a-b"))])
    names = [cell.name for cell in sweep.cells]
    assert len(set(names)) == 3
    assert [cell.config.models.actor for cell in sweep.cells] == ["a/b", "a b", "a-b"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ppo.kl_ceof=1,2", "ppo.kl_coef"),
        ("hybrid=true", "hybrid_engine"),
        ("ppo.kl_coef", "has no '='"),
        ("ppo.kl_coef=", "has no values"),
        ("ppo.kl_coef=1,1", "twice"),
        ("ppo.kl_coef=[1", "no list"),
    ],
)
def test_an_axis_that_cannot_be_is_refused_with_the_reason(text, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        parse_axis(text)


def test_two_axes_of_one_option_are_refused():
    axes = [parse_axis("zero_stage=2,3"), parse_axis("critic.zero_stage=0,1")]
    with pytest.raises(ConfigError, match=r"both set critic\.zero_stage"):
        make("tiny", (3,), axes)


def test_a_value_of_the_wrong_type_is_refused():
    with pytest.raises(ConfigError, match="much"):
        make("tiny", (3,), [parse_axis("ppo.kl_coef=much")])


def test_a_cell_that_does_not_fit_is_pruned_with_how_much_it_takes(tmp_path):
    axes = [parse_axis("sft.batch_size=8,1000000000")]
    found = examine(make("tiny", (1,), axes), tmp_path / "sweep")
    assert found["sft.batch_size=8"] == ("pending", "")
    state, reason = found["sft.batch_size=1000000000"]
    assert state == "pruned"
    assert re.search(r"does not fit: step 1 takes [\d.e+]+ GiB of [\d.e+]+ GiB", reason)


@pytest.mark.parametrize("step", [1, 3])
def test_what_the_checks_refuse_has_failed_and_the_rest_is_to_run(step, tmp_path):
    axes = [parse_axis(f"data.sources=embedded:facts,{tmp_path}/absent.json")]
    outcomes = list(checks.examine(make("tiny", (step,), axes), tmp_path / "sweep").values())
    assert [outcome["state"] for outcome in outcomes] == ["pending", "failed"]
    assert outcomes[1]["cause"]["id"] == "refused"
    assert "absent.json" in outcomes[1]["cause"]["line"]


def test_a_sweep_of_which_nothing_can_run_is_refused(tmp_path):
    sweep = make("tiny", (1,), [], [f"data.sources={tmp_path}/absent.json"])
    with pytest.raises(Refusal, match="absent"):
        checks.examine(sweep, tmp_path / "sweep")


def test_cells_of_step_3_share_a_preparation_of_the_steps_before(tmp_path):
    sweep = make("tiny", (3,), [], max_steps=5)
    (preparation,) = sweep.preparations
    assert preparation.steps == (1, 2)
    assert preparation.config.sft.max_steps == preparation.config.reward.max_steps == 5
    assert preparation.config.actor == load_profile("tiny").actor
    assert set(sweep.preparation_of.values()) == {preparation.name}
    assert preparation.models(tmp_path) == {
        "models.sft": str(tmp_path / "preparation/step1-sft/model"),
        "models.trained_reward": str(tmp_path / "preparation/step2-reward/model"),
    }


def test_dpo_is_swept_over_the_layout_of_the_actor_that_it_trains(tmp_path):
    sweep = make("tiny", (2,), [], ["alignment=dpo", "models.reward=embedded:tiny-llama"])
    assert [preparation.steps for preparation in sweep.preparations] == [(1,)]
    assert {cell.config.actor.zero_stage for cell in sweep.cells} == {2, 3}
    assert {state for state, _ in examine(sweep, tmp_path / "sweep").values()} == {"pending"}


def test_only_what_is_not_given_is_prepared():
    given = ["models.sft=/models/sft"]
    assert make("tiny", (3,), [], given).preparations[0].steps == (2,)
    assert make("tiny", (2,), [], given).preparations == ()
    assert make("tiny", (2,), []).preparations[0].steps == (1,)
    assert make("tiny", (1, 2, 3), []).preparations == ()
    given.append("models.trained_reward=/models/reward")
    assert make("tiny", (3,), [], given).preparations == ()


def test_values_that_change_the_steps_before_have_preparations_of_their_own():
    axes = [parse_axis("sft.learning_rate=1e-3,2e-3"), parse_axis("ppo.kl_coef=0.1,0.2")]
    sweep = make("tiny", (3,), axes)
    assert len(sweep.preparations) == 2
    rates = {p.name: p.config.sft.learning_rate for p in sweep.preparations}
    assert len(set(rates.values())) == 2
    for cell in sweep.cells:
        assert rates[sweep.preparation_of[cell.name]] == cell.config.sft.learning_rate


@pytest.mark.parametrize("name", matrix.matrix_names())
def test_the_sweeps_that_come_with_dschat_can_run(name, tmp_path):
    given = read_matrix(name)
    sweep = make("tiny", given.steps or (3,), given.axes, given.assignments, given.max_steps)
    states = [state for state, _ in examine(sweep, tmp_path / "sweep").values()]
    assert len(states) > 1
    assert set(states) <= {"pending", "pruned"}


def test_a_sweep_of_a_file_sets_what_it_says(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(
        "profile: tiny\nsteps: 1\nmax_steps: 3\ntime_limit: 60\n"
        "set: {seed: 7}\naxes: {dtype: [fp32, bf16]}\n"
    )
    given = read_matrix(str(file))
    assert (given.profile, given.steps, given.max_steps, given.time_limit) == ("tiny", (1,), 3, 60)
    sweep = make("tiny", (1,), given.axes, given.assignments)
    assert {get_value(cell.config, "seed") for cell in sweep.cells} == {7}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("axis: {}", "unknown key 'axis'"),
        ("axes: [a]", "must be a mapping"),
        ("axes: {dtype: fp32}", "must be a list"),
        ("max_steps: many", "max_steps"),
        ("steps: 4", "steps are 1, 2 and 3"),
        ("steps: [1, 3]", "step 2 lies between"),
    ],
)
def test_a_file_with_mistakes_is_refused(text, told, tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_matrix(str(file))
