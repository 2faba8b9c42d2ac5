"""The trainers on one rank, in this process: PPO.md's properties that need whole models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_reads import HostReads
from small_run import configuration, with_empty_answers

from engine.algorithms.log_probs import token_log_probs
from engine.rlhf.experience import Experience
from engine.rlhf.trainer import PPOTrainer, UpdateStats
from engine.trainers.context import StepContext
from engine.trainers.reward import RewardTrainer
from engine.trainers.sft import SFTTrainer

pytestmark = pytest.mark.usefixtures("group")


def ppo_trainer(run: Path, *assignments: str) -> PPOTrainer:
    return PPOTrainer(StepContext.create(configuration(*assignments), run, "ppo"))


def first_experience(trainer: PPOTrainer) -> Experience:
    batches = trainer.prompt_batches(trainer.batches.epoch(0)[0])
    return trainer.add_targets(trainer.generate_experience(batches)[0])


def weights(engine) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in engine.module.parameters()])


@pytest.mark.parametrize("trainer_type", [SFTTrainer, RewardTrainer])
def test_micro_batches_do_not_change_an_optimizer_step(trainer_type, run, tmp_path):
    step = "sft" if trainer_type is SFTTrainer else "reward"
    results = []
    for micro in (8, 1):
        config = configuration(
            f"{step}.micro_batch_size={micro}", f"models.sft={run}/step1-sft/model"
        )
        trainer = trainer_type(StepContext.create(config, tmp_path / str(micro), step))
        # Adam's first step is the gradient's sign, whatever its size: with an epsilon as large as
        # gradients, rounding of those near 0 moves no weight, and a wrong scale moves all.
        for parameters in trainer.engine.optimizer.param_groups:
            parameters["eps"] = 1e-4
        trainer.train()
        results.append(weights(trainer.engine))
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=0)


def test_sft_writes_the_same_numbers_into_the_log_and_metrics(tmp_path, capfd):
    trainer = SFTTrainer(StepContext.create(configuration(), tmp_path, "sft"))
    trainer.train()
    rows = [
        json.loads(line) for line in (tmp_path / "step1-sft/metrics.jsonl").read_text().splitlines()
    ]
    log = capfd.readouterr().out
    losses = [row["loss"] for row in rows if row["kind"] == "metrics"]
    assert len(losses) == 2
    assert all(f"loss: {loss:.6g}" in log for loss in losses)
    evaluations = [row["ppl"] for row in rows if row["kind"] == "eval"]
    assert len(evaluations) == 2
    assert evaluations[1] < evaluations[0]


def test_first_minibatch_starts_from_the_policy_that_answered(run):
    trainer = ppo_trainer(run, "ppo.temperature=0.7")
    experience = first_experience(trainer)
    torch.testing.assert_close(
        experience.log_probs * experience.mask, experience.ref_log_probs * experience.mask
    )
    assert experience.kl.abs().max() < 1e-4
    minibatch = next(trainer.minibatches(experience))
    stats = UpdateStats()
    trainer.train_rlhf(experience.rows(minibatch.micro_batches[0]), tokens=100.0, stats=stats)
    tokens = stats.sums["tokens"]
    assert tokens > 0
    assert stats.sums["ratio"] / tokens == pytest.approx(1.0, abs=1e-5)
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert stats.sums["approx_kl"] / tokens == pytest.approx(0.0, abs=1e-6)
    assert stats.sums["clipped"] == 0


def test_more_padding_changes_nothing(run):
    trainer = ppo_trainer(run)
    prompts, mask = trainer.prompt_batches(trainer.batches.epoch(0)[0])[0]
    state = trainer.rollouts.sampler.get_state()
    plain, _ = trainer.generate_experience([(prompts, mask)])
    trainer.rollouts.sampler.set_state(state)
    pad = trainer.tokenizer.pad_token_id
    wide = torch.nn.functional.pad(prompts, (5, 0), value=pad)
    padded, _ = trainer.generate_experience([(wide, torch.nn.functional.pad(mask, (5, 0)))])
    assert torch.equal(plain.answers, padded.answers)
    for name in ("log_probs", "values", "ref_log_probs"):
        torch.testing.assert_close(
            getattr(plain, name) * plain.mask,
            getattr(padded, name) * padded.mask,
            atol=1e-4,
            rtol=1e-4,
        )
    torch.testing.assert_close(plain.scores, padded.scores, atol=1e-4, rtol=1e-4)


def test_pad_equal_to_eos_keeps_the_first_eos_as_an_action(run):
    trainer = ppo_trainer(run, "ppo.max_answer_length=30")
    prompts, mask = trainer.prompt_batches(trainer.batches.epoch(0)[0])[0]
    state = trainer.rollouts.sampler.get_state()
    own, _ = trainer.generate_experience([(prompts, mask)])
    trainer.rollouts.sampler.set_state(state)
    trainer.rollouts.sampling = replace(
        trainer.rollouts.sampling, pad_id=trainer.tokenizer.eos_token_id
    )
    same, _ = trainer.generate_experience([(prompts, mask)])
    assert torch.equal(own.mask, same.mask)
    assert torch.equal(own.answers[own.mask], same.answers[same.mask])
    torch.testing.assert_close(own.scores, same.scores)


@pytest.mark.parametrize("score", [-5.0, 5.0], ids=["punished", "rewarded"])
def test_an_answer_that_is_eos_alone_is_unlearnt_or_learnt_by_its_reward(score, run):
    trainer = ppo_trainer(run, "ppo.inner_epochs=1", "ppo.batch_size=8")
    empty = [2, 5]
    with_empty_answers(trainer, empty)
    batches = trainer.prompt_batches(trainer.batches.epoch(0)[0])
    experience, _ = trainer.generate_experience(batches)
    assert experience.mask.sum(dim=1)[empty].tolist() == [1, 1]
    experience.scores.fill_(-score)
    experience.scores[empty] = score
    experience = trainer.add_targets(experience)
    stats = UpdateStats()
    (minibatch,) = trainer.minibatches(experience)
    trainer.update(experience, minibatch, stats)
    assert stats.sums["tokens"] == experience.mask.sum()

    ids, mask, width = experience.ids, experience.attention_mask, experience.mask.shape[1]
    engine = trainer.engine
    with torch.no_grad():
        logits = engine.answer_logits(engine.actor, ids, mask, width)
    log_probs = token_log_probs(logits, experience.answers)
    change = (log_probs - experience.log_probs)[empty, 0]
    assert torch.equal(change.sign(), torch.full((2,), score).sign())


def test_a_step_of_answers_that_are_eos_alone_is_a_step_like_others(run, tmp_path):
    trainer = ppo_trainer(
        tmp_path,
        "ppo.max_steps=1",
        "ppo.normalize_reward=true",
        f"models.sft={run}/step1-sft/model",
        f"models.trained_reward={run}/step2-reward/model",
    )
    with_empty_answers(trainer, list(range(8)))
    before = weights(trainer.engine.actor), weights(trainer.engine.critic)
    assert trainer.train()
    for old, engine in zip(before, (trainer.engine.actor, trainer.engine.critic), strict=True):
        assert weights(engine).isfinite().all()
        assert not torch.equal(old, weights(engine))
        assert engine.global_steps == trainer.options.updates_per_step
    folder = tmp_path / "step3-rlhf"
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert metrics["empty_answers"] == 8
    assert metrics["answer_length"] == metrics["eos_share"] == 1
    numbers = [
        value for name, value in metrics.items() if name not in ("kind", "unsupervised_loss")
    ]
    assert all(math.isfinite(value) for value in numbers)
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    for metric, column in (("reward", "reward"), ("score_mean", "score"), ("kl", "kl")):
        mean = sum(row[column] for row in rollouts) / 8
        assert metrics[metric] == pytest.approx(mean, abs=1e-5)


def test_scores_in_ppo_are_those_of_the_reward_step(run):
    trainer = ppo_trainer(run)
    experience = first_experience(trainer)
    reward = RewardTrainer(
        StepContext.create(
            configuration(
                f"models.trained_reward={run}/step2-reward/model",
                f"models.reward={run}/step2-reward/model",
            ),
            run,
            "reward",
        )
    )
    reward.engine.eval()
    texts = [
        ids[mask.bool()]
        for ids, mask in zip(experience.ids, experience.attention_mask, strict=True)
    ]
    batch = reward.collate(
        [{"chosen_ids": ids.tolist(), "rejected_ids": ids.tolist()} for ids in texts]
    )
    with torch.no_grad():
        _, chosen, _ = reward.loss(batch)
    torch.testing.assert_close(chosen, experience.scores, atol=1e-4, rtol=1e-4)


def test_rows_of_the_experience_lose_only_padding(run):
    trainer = ppo_trainer(
        run, "ppo.generation_batch_size=3", "ppo.rollout_batch_size=6", "ppo.batch_size=6"
    )
    experience = first_experience(trainer)
    assert len(experience) == 6
    for row in range(len(experience)):
        (one,) = (experience.rows([row]),)
        assert one.mask.all()
        assert one.attention_mask.all()
        assert torch.equal(one.answers[0], experience.answers[row][experience.mask[row]])
        assert torch.equal(one.advantages[0], experience.advantages[row][experience.mask[row]])


def test_step_3_moves_both_models_and_tells_what_it_did(run, capfd):
    trainer = ppo_trainer(run, "ema.enabled=true", "logging.print_answers=true")
    before = weights(trainer.engine.actor), weights(trainer.engine.critic)
    trainer.train()
    trainer.save()
    assert not torch.equal(before[0], weights(trainer.engine.actor))
    assert not torch.equal(before[1], weights(trainer.engine.critic))
    # 8 answers in minibatches of 4, twice a step, in two steps.
    assert trainer.engine.actor.global_steps == trainer.engine.critic.global_steps == 8
    folder = run / "step3-rlhf"
    assert {p.name for p in folder.iterdir()} >= {"actor", "critic", "actor_ema"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert rows[0]["kl"] == pytest.approx(0.0, abs=1e-2)
    rollouts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    mean = sum(row["reward"] for row in rollouts[:8]) / 8
    assert mean == pytest.approx(rows[0]["reward"], abs=1e-5)
    assert rows[0]["reward_ema"] == pytest.approx(rows[0]["reward"])
    log = capfd.readouterr().out
    assert "Average reward score" in log
    assert "--- ans" in log


def test_mixture_loss_changes_the_actor_but_not_its_number_of_steps(run, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(
            json.dumps({"text": "the sun is hot and the sea is wet. " * 40}) + "\n"
            for _ in range(20)
        )
    )
    results = {}
    for name, extra in (("off", []), ("on", [f"data.unsupervised_sources={text}"])):
        trainer = ppo_trainer(run, "ppo.max_steps=1", "ppo.micro_batch_size=2", *extra)
        trainer.train()
        results[name] = trainer.engine.actor.global_steps, weights(trainer.engine.actor)
    assert results["on"][0] == results["off"][0] == 4
    assert not torch.equal(results["on"][1], results["off"][1])


def test_more_micro_batches_read_nothing_more_from_the_device(run, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text((json.dumps({"text": "the sun is hot and the sea is wet. " * 40}) + "\n") * 20)
    reads, sums = [], []
    for micro in (4, 2, 1):
        trainer = ppo_trainer(
            run, f"ppo.micro_batch_size={micro}", f"data.unsupervised_sources={text}"
        )
        experience = first_experience(trainer)
        stats = UpdateStats()
        counter = HostReads(trainer.engine.actor.module, trainer.engine.critic.module)
        minibatch = next(trainer.minibatches(experience))
        with counter:
            trainer.update(experience, minibatch, stats)
        reads.append(counter.counts)
        sums.append({name: float(value) for name, value in stats.sums.items()})
        assert float(stats.ratio_max) == pytest.approx(1.0, abs=1e-4)
    assert reads[0] == reads[1] == reads[2]
    for name in ("tokens", "actor_loss", "critic_loss", "ratio", "approx_kl", "clipped_low"):
        values = [each[name] for each in sums]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-4)


def test_more_micro_batches_of_pairs_bring_nothing_more_to_the_host(run, tmp_path):
    copies = []
    for micro in (8, 2):
        config = configuration(
            f"reward.micro_batch_size={micro}", f"models.sft={run}/step1-sft/model"
        )
        trainer = RewardTrainer(StepContext.create(config, tmp_path / str(micro), "reward"))
        with HostReads(trainer.engine.module) as counter:
            trainer.train_step(0, trainer.batches.epoch(0)[0])
        copies.append(counter.counts["cpu"])
    assert copies[0] == copies[1]


def test_reference_of_lora_alone_is_the_actor_without_adapters(run):
    lora = ("actor.lora.rank=4", "actor.lora.only=true")
    shared = ppo_trainer(run, *lora)
    assert shared.engine.ref is None
    before = first_experience(shared)
    assert before.kl.abs().max() == 0
    shared.train()
    own_copy = ppo_trainer(run, *lora, "ref.share_actor=false")
    assert own_copy.engine.ref is not None
    ids, mask, answers = before.ids, before.attention_mask, before.answers
    with shared.engine.evaluation():
        after = shared.engine.ref_log_probs(ids, mask, answers)
    assert torch.equal(after, own_copy.engine.ref_log_probs(ids, mask, answers))


def test_average_moves_on_real_steps_alone(run):
    trainer = ppo_trainer(run, "ema.enabled=true", "ema.decay=0.5")
    engine = trainer.engine.actor

    def average() -> torch.Tensor:
        with trainer.engine.actor_ema.values(list(engine.module.parameters())) as values:
            return torch.cat([value.reshape(-1) for value in values])

    start = weights(engine)
    experience = first_experience(trainer)
    minibatch = next(trainer.minibatches(experience))
    trainer.update(experience, minibatch, UpdateStats())
    once = (start + weights(engine)) / 2
    torch.testing.assert_close(average(), once)
    assert not torch.equal(once, start)
    engine.was_step_applied = lambda: False
    trainer.update(experience, minibatch, UpdateStats())
    torch.testing.assert_close(average(), once)


def test_whitened_rollouts_keep_their_returns(run):
    plain = ppo_trainer(run, "ppo.whiten_advantages=false")
    experience = first_experience(plain)
    whitened = ppo_trainer(run)
    other = whitened.add_targets(experience)
    assert torch.equal(other.returns, experience.returns)
    chosen = other.advantages[other.mask]
    assert abs(float(chosen.mean())) < 1e-5
    assert float(chosen.std(correction=0)) == pytest.approx(1.0, abs=1e-3)


def test_too_little_data_for_one_batch_is_refused(tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text(
        "".join(
            json.dumps({"prompt": f"q {i}", "chosen": "yes", "rejected": "no"}) + "\n"
            for i in range(6)
        )
    )
    config = configuration(f"data.sources={few}", "sft.batch_size=64")
    with pytest.raises(ValueError, match="fewer than its batch of 64"):
        SFTTrainer(StepContext.create(config, tmp_path, "sft"))


def test_tensorboard_has_the_engines_and_the_pipeline(run, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = ppo_trainer(
        run, "logging.tensorboard=true", f"logging.tensorboard_dir={tmp_path}", "ppo.max_steps=1"
    )
    trainer.train()
    folder = tmp_path / "step3-rlhf"

    def tags(name: str) -> set[str]:
        events = EventAccumulator(str(folder / name)).Reload()
        return set(events.Tags()["scalars"])

    names = {"reward", "actor_loss", "actor_loss_sum", "critic_loss", "critic_loss_sum"}
    assert tags("pipeline") == names
    for engine in ("actor", "critic"):
        assert "Train/Samples/lr" in tags(engine)


def test_each_rank_prints_its_loss_where_asked(tmp_path, capfd):
    context = StepContext.create(configuration("logging.print_loss=true"), tmp_path, "sft")
    SFTTrainer(context).train()
    lines = [line for line in capfd.readouterr().out.splitlines() if "Rank: 0, loss = " in line]
    assert [line.split(", loss")[0] for line in lines] == [
        "Epoch: 0, Step: 0, Rank: 0",
        "Epoch: 0, Step: 1, Rank: 0",
    ]
