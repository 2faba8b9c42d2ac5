"""Step 3 without a critic, on one rank in this process: groups of answers and what is learnt."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from small_run import configuration

from engine.data.phases import PromptColumns
from engine.rlhf.experience import Experience
from engine.rlhf.groups import has_spread
from engine.rlhf.rewards import Rewards
from engine.rlhf.scoring import FunctionRewards
from engine.rlhf.trainer import PPOTrainer
from engine.rlhf.update_stats import UpdateStats
from engine.trainers.context import StepContext

pytestmark = pytest.mark.usefixtures("group")

GRPO = ("rlhf.algorithm=grpo", "rlhf.answers_per_prompt=4")
PPO = (("ppo", "true"), ("ppo", "false"))


def trainer_of(run: Path, *assignments: str) -> PPOTrainer:
    return PPOTrainer(StepContext.create(configuration(*assignments), run, "ppo"))


def scored(trainer: PPOTrainer, scores: list[float] | None = None) -> Experience:
    """The first experience, with the given scores in place of the reward model's."""
    experience, _ = trainer.generate_experience(trainer.prompt_batches(trainer.batches.epoch(0)[0]))
    if scores is not None:
        experience.scores.copy_(torch.tensor(scores))
    return trainer.add_targets(experience)


def weights(engine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


def test_the_answers_to_a_prompt_stand_next_to_each_other_also_where_batches_cut_them(run):
    """Trap: batch sizes count answers, and the answers per prompt divide them."""
    trainer = trainer_of(run, *GRPO, "ppo.generation_batch_size=2")
    assert trainer.batches.batch_size == 2  # prompts of 8 answers
    batches = trainer.prompt_batches(trainer.batches.epoch(0)[0])
    assert [len(prompts) for prompts, _ in batches] == [2, 2, 2, 2]
    experience, _ = trainer.generate_experience(batches)
    width = experience.ids.shape[1] - experience.mask.shape[1]
    prompts = [tuple(row) for row in experience.ids[:, :width].tolist()]
    assert prompts == [prompts[0]] * 4 + [prompts[4]] * 4
    assert prompts[0] != prompts[4]
    assert len({tuple(row) for row in experience.answers.tolist()}) > 2


def test_an_advantage_is_one_number_for_all_tokens_of_an_answer(run):
    trainer = trainer_of(run, *GRPO, "ppo.reward_clip=100")
    experience = scored(trainer, [1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0])
    assert trainer.engine.critic is None
    assert experience.values is experience.returns is None
    first = experience.advantages[:, 0]
    assert torch.equal(experience.advantages, first.unsqueeze(1) * experience.mask)
    # the standard deviation of 1, 2, 3, 6 is the root of 14 / 3
    spread = math.sqrt(14 / 3) + 1e-4
    assert first[:4].tolist() == pytest.approx([-2 / spread, -1 / spread, 0, 3 / spread])
    assert first[4:].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "algorithm", ["grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "reinforce++-baseline"]
)
def test_every_algorithm_moves_the_actor_and_reports_by_trls_names(algorithm, run, tmp_path):
    G = 1 if algorithm == "reinforce++" else 4
    trainer = trainer_of(
        run, f"rlhf.algorithm={algorithm}", f"rlhf.answers_per_prompt={G}",
        f"logging.tensorboard_dir={tmp_path}", "rlhf.resampling_tries=1" if G > 1 else "seed=1234",
    )  # fmt: skip
    (trainer.context.folder / "metrics.jsonl").unlink(missing_ok=True)
    (trainer.context.folder / "rollouts.jsonl").unlink(missing_ok=True)
    before = weights(trainer.engine.actor)
    trainer.train_step(0, 0, trainer.batches.epoch(0)[0])
    assert not torch.equal(weights(trainer.engine.actor), before)
    (record,) = map(json.loads, (trainer.context.folder / "metrics.jsonl").read_text().splitlines())
    assert record["first_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert record["reward_std"] > 0
    assert (record.get("frac_reward_zero_std") is None) == (G == 1)
    assert record["completions/min_length"] <= record["completions/mean_length"]
    assert record["completions/max_length"] <= 12
    assert record["completions/clipped_ratio"] == pytest.approx(1 - record["eos_share"])
    assert record["policy_loss"] == record["actor_loss"]
    region = record["clip_ratio/low_mean"] + record["clip_ratio/high_mean"]
    assert record["clip_ratio/region_mean"] == pytest.approx(region)
    assert record["num_tokens"] > 8
    assert not [name for name in record if "critic" in name or "value" in name]
    rollouts = (trainer.context.folder / "rollouts.jsonl").read_text().splitlines()
    groups = [json.loads(line).get("group") for line in rollouts]
    assert groups == ([None] * 8 if G == 1 else [0, 0, 0, 0, 1, 1, 1, 1])


def test_the_loss_is_0_where_the_policy_is_the_one_that_answered(run):
    """Trap: advantages have mean 0 and the ratio is 1, so a flat first loss is no failure."""
    trainer = trainer_of(run, *GRPO, "ppo.batch_size=8", "ppo.temperature=0.7")
    experience = scored(trainer, [1.0, 2.0, 3.0, 4.0, -1.0, 0.0, 0.0, 2.0])
    stats = UpdateStats()
    minibatch = next(trainer.minibatches(experience))
    before = weights(trainer.engine.actor)
    trainer.update(experience, minibatch, stats)
    found = stats.over_ranks(trainer.objective).metrics
    assert found["actor_loss"] == pytest.approx(0.0, abs=1e-5)
    assert found["actor_gradient_norm"] > 1e-3
    assert not torch.equal(weights(trainer.engine.actor), before)
    # Trap: the temperature divides the logits in the old and in the new log-probabilities.
    assert found["first_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert found["ratio_max"] == pytest.approx(1.0, abs=1e-4)


def test_a_batch_of_answers_that_were_all_cut_off_leaves_the_update_out(run, capfd):
    """Trap: masked, they have no token to take a mean over, and NaN would be learnt."""
    trainer = trainer_of(run, *GRPO, "rlhf.mask_truncated=true")
    experience, _ = trainer.generate_experience(trainer.prompt_batches(trainer.batches.epoch(0)[0]))
    experience.ended.fill_(False)
    experience = trainer.add_targets(experience)
    before, stats = weights(trainer.engine.actor), UpdateStats()
    for minibatch in trainer.minibatches(experience):
        assert (minibatch.tokens, minibatch.answers) == (0, 0)
        trainer.update(experience, minibatch, stats)
    assert torch.equal(weights(trainer.engine.actor), before)
    assert stats.over_ranks(trainer.objective).metrics["actor_loss"] is None
    assert "the update is left out" in capfd.readouterr().out


@pytest.mark.parametrize("aggregation", ["answer", "token", "constant"])
def test_answers_that_were_cut_off_count_in_no_mean_where_they_are_masked(aggregation, run):
    """Trap: the update is that of the other answers alone, in numerator and denominator."""
    trainer = trainer_of(
        run, *GRPO, "rlhf.mask_truncated=true", f"rlhf.aggregation={aggregation}",
        "ppo.batch_size=8", "ppo.micro_batch_size=2",
    )  # fmt: skip
    experience, _ = trainer.generate_experience(trainer.prompt_batches(trainer.batches.epoch(0)[0]))
    experience.scores.copy_(torch.arange(8.0))
    experience.ended.copy_(torch.tensor([True, False, True, True, False, True, True, False]))
    experience = trainer.add_targets(experience)
    (minibatch, *_) = trainer.minibatches(experience)
    lengths = experience.mask.sum(dim=1)[experience.ended]
    assert (minibatch.tokens, minibatch.answers) == (lengths.sum(), 5)
    stats = UpdateStats()
    trainer.update(experience, minibatch, stats)
    # the ratio is 1, so the loss is the mean of minus the advantages, over what counts
    first = experience.advantages[experience.ended, 0]
    expected = {
        "answer": -first.mean(),
        "token": -(first * lengths).sum() / lengths.sum(),
        "constant": -(first * lengths).sum() / 5 / 12,
    }[aggregation]
    found = stats.over_ranks(trainer.objective).metrics["actor_loss"]
    assert found == pytest.approx(expected.item(), abs=1e-4)


def test_groups_without_spread_are_counted_and_replaced_at_most_so_often(run, monkeypatch):
    """Trap: they teach nothing and dilute the mean."""
    trainer = trainer_of(run, *GRPO, "rlhf.resampling_tries=3")
    generated = []
    generate = trainer.rollouts.answer

    def answer(batches):
        generated.append(sum(len(prompts) for prompts, _ in batches))
        return generate(batches)

    def with_scores(kinds):
        """Scores of one group after another: flat, or with spread."""
        kinds = iter(kinds)

        def scores(ids, mask):
            groups = [next(kinds) for _ in range(len(ids) // 4)]
            return torch.tensor([x for kind in groups for x in ([1.0] * 3 + [1.0 + kind])])

        return scores

    monkeypatch.setattr(trainer.rollouts, "answer", answer)
    rows = trainer.batches.epoch(0)[0]
    # the second group is flat, as is its first replacement; the next is not
    monkeypatch.setattr(trainer.engine, "scores", with_scores([1, 0, 0, 1]))
    first, cost = trainer.generate_experience(trainer.prompt_batches(rows))
    found, total, replaced = trainer.with_spread(first, cost)
    assert generated == [8, 4, 4]
    assert replaced == 1
    assert total.passes > cost.passes
    assert has_spread(trainer.rewards(found), 4).tolist() == [True, True]
    assert torch.equal(found.rows([0, 1, 2, 3]).ids, first.rows([0, 1, 2, 3]).ids)
    # without end, only as often as allowed
    generated.clear()
    monkeypatch.setattr(trainer.engine, "scores", with_scores([0] * 99))
    first, cost = trainer.generate_experience(trainer.prompt_batches(rows))
    found, _, replaced = trainer.with_spread(first, cost)
    assert generated == [8, 8, 8, 8]
    assert replaced == 0
    assert torch.equal(found.ids, first.ids)


def test_an_answer_without_reward_learns_nothing_with_any_baseline(run):
    for algorithm, whiten in (("grpo", "null"), ("rloo", "null"), ("reinforce++", "true"), *PPO):
        trainer = trainer_of(
            run, f"rlhf.algorithm={algorithm}", "rlhf.answers_per_prompt=4", "ppo.kl_coef=0",
            f"ppo.whiten_advantages={whiten}",
        )  # fmt: skip
        experience = scored(trainer, [1.0, 2.0, math.nan, 3.0, 4.0, math.nan, math.nan, math.nan])
        assert torch.isfinite(experience.advantages).all(), algorithm
        assert not experience.advantages[[2, 5, 6, 7]].any(), algorithm
        assert experience.advantages[[0, 1, 3]].any(), algorithm
        if algorithm == "ppo":
            assert torch.equal(experience.returns[2], experience.values[2])


def test_no_option_filters_what_is_sampled(run):
    """Trap: top-p, top-k and penalties would bias the ratio; a model's own are not read."""
    from engine.config.loading import ConfigError

    for key in ("ppo.top_p", "ppo.top_k", "ppo.repetition_penalty", "rlhf.top_p"):
        with pytest.raises(ConfigError, match="unknown option"):
            configuration(f"{key}=0.8")
    trainer = trainer_of(run, *GRPO)
    sampling = trainer.rollouts.sampling
    assert (sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0, 1.0, 1.0)
    batches = trainer.prompt_batches(trainer.batches.epoch(0)[0])
    state = trainer.rollouts.sampler.get_state()
    plain, _ = trainer.rollouts.answer(batches)
    own = trainer.engine.actor.module.generation_config
    own.top_p, own.top_k, own.repetition_penalty, own.temperature = 0.01, 1, 5.0, 0.1
    trainer.rollouts.sampler.set_state(state)
    again, _ = trainer.rollouts.answer(batches)
    assert torch.equal(plain[0].answers, again[0].answers)


class Spy:
    """Two functions: one of the answer's length, one that can say something of few answers."""

    def __init__(self) -> None:
        self.seen = []

    def score(self, prompts, completions, completion_ids, columns):
        self.seen.append((prompts, completions, completion_ids, columns))
        few = [1.0, None, None, 3.0, None, None, None, None]
        return {"length": [-float(len(ids)) for ids in completion_ids], "few": few}


def with_functions(trainer: PPOTrainer, functions, weights=(0.5, 2.0)) -> PPOTrainer:
    columns = PromptColumns(trainer.context.config)
    trainer.functions = FunctionRewards(functions, ("length", "few"), columns, trainer.tokenizer)
    trainer.rewards = Rewards(trainer.context.config, weights)
    return trainer


def test_functions_are_asked_as_trl_asks_them_and_none_counts_nowhere(run):
    spy = Spy()
    trainer = with_functions(trainer_of(run, *GRPO), spy)
    rows = trainer.own_rows(trainer.batches.epoch(0)[0])
    experience, _ = trainer.generate_experience(trainer.repeated_prompts(rows), rows)
    ((prompts, completions, ids, columns),) = spy.seen
    assert [len(x) for x in (prompts, completions, ids, *columns.values())] == [8] * (
        3 + len(columns)
    )
    # the corpus holds dialogues, so prompts and completions are messages
    assert prompts[0] == prompts[3] != prompts[4]
    assert [turn["role"] for turn in prompts[0]] == ["user"]
    assert [turn["role"] for turn in completions[0]] == ["assistant"]
    asked = trainer.tokenizer.decode(experience.ids[0], skip_special_tokens=True)
    assert prompts[0][0]["content"] in asked
    assert asked.strip().endswith(completions[0][0]["content"].strip())
    assert columns["references"][0] == columns["references"][3]
    assert "phases" not in columns
    lengths = experience.mask.sum(dim=1).tolist()
    assert [len(each) for each in ids] == lengths
    # weighted, with the reward model's score beside them
    scores = trainer.rewards.shaped_scores(experience).tolist()
    few = [2.0, 0, 0, 6.0, 0, 0, 0, 0]
    expected = [s - 0.5 * n + f for s, n, f in zip(scores, lengths, few, strict=True)]
    assert trainer.rewards(experience).tolist() == pytest.approx(expected, rel=1e-5)


def test_the_metrics_of_each_function_and_its_rewards_in_the_rollouts(run):
    """Trap: summed, a small reward is lost behind a large one; each is shown by itself."""
    trainer = with_functions(trainer_of(run, *GRPO), Spy())
    for name in ("metrics", "rollouts"):
        (trainer.context.folder / f"{name}.jsonl").unlink(missing_ok=True)
    trainer.train_step(0, 0, trainer.batches.epoch(0)[0])
    (record,) = map(json.loads, (trainer.context.folder / "metrics.jsonl").read_text().splitlines())
    assert record["rewards/few/mean"] == 2.0
    assert record["rewards/few/std"] == pytest.approx(math.sqrt(2))
    assert record["rewards/length/mean"] == -record["completions/mean_length"]
    rollouts = (trainer.context.folder / "rollouts.jsonl").read_text().splitlines()
    rewards = [json.loads(line)["rewards"] for line in rollouts]
    assert [each["few"] for each in rewards] == [1.0, None, None, 3.0, None, None, None, None]
    assert [each["length"] for each in rewards] == [
        -json.loads(line)["length"] for line in rollouts
    ]


def test_without_a_reward_model_the_functions_alone_are_the_reward(run, monkeypatch):
    trainer = with_functions(trainer_of(run, *GRPO, "ppo.missing_eos_penalty=10"), Spy())
    trainer.engine.reward = None
    rows = trainer.own_rows(trainer.batches.epoch(0)[0])
    experience, _ = trainer.generate_experience(trainer.repeated_prompts(rows), rows)
    assert experience.scores is None
    few = [2.0, 0, 0, 6.0, 0, 0, 0, 0]
    lengths, ended = experience.mask.sum(dim=1).tolist(), experience.ended.tolist()
    expected = [f - 0.5 * n - 10 * (not e) for f, n, e in zip(few, lengths, ended, strict=True)]
    # a function's scale is the user's: nothing clips it
    assert trainer.rewards(experience).tolist() == pytest.approx(expected)
    trainer.train_step(0, 0, trainer.batches.epoch(0)[0])


def test_a_function_of_a_file_may_be_ppos_reward_and_a_weight_joins_it_with_the_model(
    run, tmp_path
):
    file = tmp_path / "mine.py"
    file.write_text("def mine(completions, **kwargs):\n    return [2.0] * len(completions)\n")
    function = f"{{name: mine, path: {file}, weight: 0.5}}"
    alone = trainer_of(run, f"rewards.functions=[{function}]", "ppo.normalize_reward=true")
    assert alone.engine.reward is None
    assert alone.engine.critic is not None
    rows = alone.own_rows(alone.batches.epoch(0)[0])
    experience, _ = alone.generate_experience(alone.repeated_prompts(rows), rows)
    assert alone.rewards(experience).tolist() == [1.0] * 8
    assert alone.train()
    both = trainer_of(
        run, f"rewards.functions=[{function}, {{kind: model, weight: 3}}]", "ppo.reward_clip=100"
    )
    experience, _ = both.generate_experience(both.repeated_prompts(rows), rows)
    expected = 1.0 + 3 * experience.scores
    torch.testing.assert_close(both.rewards(experience), expected)


def test_one_temperature_divides_the_logits_in_sampling_and_in_old_log_probabilities(run):
    """Trap: probabilities at temperature 1 of answers sampled at 0.5 would bias every ratio."""
    trainer = trainer_of(run, *GRPO, "ppo.temperature=0.5")
    (prompts,) = trainer.prompt_batches(trainer.batches.epoch(0)[0])
    (generation,), _ = trainer.rollouts.answer([prompts])
    found, mask = trainer._experience(prompts, generation), generation.log_probs != 0
    torch.testing.assert_close(
        found.log_probs * mask, generation.log_probs * mask, atol=1e-3, rtol=1e-3
    )
    # the first token's, from the logits
    logits = trainer.engine.answer_logits(
        trainer.engine.actor, found.ids, found.attention_mask, found.mask.shape[1]
    )[:, 0].detach()
    expected = torch.distributions.Categorical(logits=2 * logits).log_prob(found.answers[:, 0])
    torch.testing.assert_close(found.log_probs[:, 0], expected, atol=1e-4, rtol=1e-4)
