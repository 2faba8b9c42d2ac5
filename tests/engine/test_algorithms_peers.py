"""Advantages, losses and gradients are those of TRL, and of the papers for what TRL does not have.

TRL's own methods are called, with a trainer in place of `self` that answers nothing by itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections import defaultdict
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launched import free_environment
from torch import nn

from engine.algorithms.advantages import discounted_returns, group_advantages
from engine.algorithms.masks import length_mask, whiten
from engine.algorithms.policy import Objective, policy_loss
from engine.algorithms.rewards import token_rewards, weighted_sum
from engine.config.algorithms import PRESETS

BATCHES = 200
LONGEST = 12
WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)


@pytest.fixture(autouse=True)
def _double():
    """TRL divides whole numbers in the default dtype, so its std has 8 digits in fp32."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Batch:
    """Ragged answers to some prompts, with random log-probabilities and rewards, in fp64.

    Some answers have no reward by one function, some by none, and some groups no spread.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.size = int(rng.choice([2, 3, 4, 8]))
        prompts = int(rng.integers(1, 5))
        rows = self.rows = prompts * self.size
        self.lengths = torch.tensor(rng.integers(1, LONGEST + 1, rows))
        width = int(self.lengths.max())
        self.mask = length_mask(self.lengths, width)

        def random(scale: float) -> torch.Tensor:
            return torch.tensor(rng.normal(scale=scale, size=(rows, width)))

        self.old = -2.0 + random(1.0)
        # near enough that sequence ratios lie on both sides of their bounds
        self.new = self.old + random(float(rng.choice([1e-4, 0.05, 0.5])))
        self.ref = self.old + random(0.3)
        self.rewards = torch.tensor(rng.normal(size=(rows, 2)))
        self.rewards[torch.tensor(rng.random((rows, 2)) < 0.1)] = torch.nan
        if seed % 5 == 0:
            self.rewards[: self.size] = 0.25

    @property
    def total(self) -> torch.Tensor:
        return weighted_sum(self.rewards, WEIGHTS)

    def cuts(self) -> list[list[int]]:
        rows = self.rows
        return [[], list(range(1, rows)), [rows // 2], sorted({1, rows - 1})]


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0

    def gather(self, value):
        return value

    def reduce(self, value, reduction):
        return value


class Blank(SimpleNamespace):
    """A trainer of TRL's without anything: what is not set is None."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


def trl_trainer(batch: Batch, beta: float, low: float, high: float, **options) -> Blank:
    model = nn.Module().train()
    model.is_gradient_checkpointing = False

    def log_probs(of, *arguments, **named):
        return batch.ref if of == "ref" else batch.old, torch.zeros_like(batch.old), None

    ids = [[5] * length for length in batch.lengths.tolist()]
    answers = ([[1]] * batch.rows, ids, None, ["-"] * batch.rows, None, {}, None, None)
    args = Blank(
        steps_per_generation=1, delta=options.pop("delta", None), report_to=[],
        per_device_train_batch_size=batch.rows,
    )  # fmt: skip
    return Blank(
        accelerator=Accelerator(), model=model, args=args, beta=beta,
        epsilon_low=low, epsilon_high=high, num_generations=batch.size, num_iterations=2,
        # old log-probabilities are computed where it is not a multiple
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST, top_entropy_quantile=1.0,
        multi_objective_aggregation="sum_then_normalize", reward_weights=WEIGHTS,
        reward_func_names=[], ref_model="ref", _tokenizer=SimpleNamespace(pad_token_id=0),
        _pending_extra_logs={}, _pending_metrics={},
        _metrics=defaultdict(lambda: defaultdict(list)), _logs=defaultdict(list),
        _get_per_token_logps_and_entropies=log_probs,
        _calculate_rewards=lambda *_: batch.rewards.clone(),
        _generate=lambda _: answers if "loss_type" in options else (answers[0], ids, answers[3]),
        **options,
    )  # fmt: skip


def of_trl(trainer_type, trainer: Blank, batch: Batch):
    """Advantages, loss and its gradient with respect to the log-probabilities, by TRL."""
    module = __import__(trainer_type.__module__, fromlist=["trainer"])
    trainer.args.gradient_accumulation_steps = 1
    with (
        patch.object(module, "gather_object", lambda x: x),
        patch.object(module, "gather", lambda x: x, create=True),
    ):
        inputs = trainer_type._generate_and_score_completions(
            trainer, [{"prompt": "-"}] * batch.rows
        )
        leaf = batch.new.clone().requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
            leaf, torch.zeros_like(leaf), None,
        )  # fmt: skip
        loss = trainer_type._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    return inputs["advantages"], loss.detach(), leaf.grad


def ours(batch: Batch, advantages: torch.Tensor, objective: Objective, cut: list[int]):
    """Loss and gradient, summed over micro batches, each padded to its own longest answer."""
    leaf = batch.new.clone().requires_grad_()
    total = objective.normalizer(float(batch.lengths.sum()), float(batch.rows))
    loss = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(batch.rows).tensor_split(cut):
        width = int(batch.lengths[rows].max())
        log_probs, old, ref, part, mask = (
            x[rows, :width] for x in (leaf, batch.old, batch.ref, advantages, batch.mask)
        )
        loss = loss + policy_loss(log_probs, old, part, mask, objective, ref).loss_sum / total
    loss.backward()
    return loss.detach(), leaf.grad


def objective_of(name: str, **changes) -> Objective:
    """What the preset of an algorithm has the actor learn."""
    preset = PRESETS[name]
    names = ("ratio", "surrogate", "clip_low", "clip_high", "aggregation", "kl_estimator")
    values = {each: getattr(preset, each) for each in names}
    return Objective(**{**values, "longest_answer": LONGEST, **changes})


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-10 of the largest; rounding of sums that cancel is relative to their terms."""
    largest = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * max(largest, 1e-3))


TRL_METHODS = {
    "grpo": {"loss_type": "grpo", "scale_rewards": "group"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dapo": {"loss_type": "dapo", "scale_rewards": "group"},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": "group"},
    "gspo": {"loss_type": "grpo", "scale_rewards": "group"},
    "cispo": {"loss_type": "cispo", "scale_rewards": "group"},
    "lite_ppo": {"loss_type": "bnpo", "scale_rewards": "batch"},
    "two_sided": {"loss_type": "grpo", "scale_rewards": "group", "delta": 1.4},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", TRL_METHODS)
def test_methods_of_grpo_are_those_of_trl_for_every_cut(method):
    """Advantages, loss and gradients on random ragged batches."""
    peers = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    name = {"lite_ppo": "bnpo", "two_sided": "grpo"}.get(method, method)
    preset, options = PRESETS[name], TRL_METHODS[method]
    clipped = set()
    for seed in range(BATCHES):
        batch = Batch(seed)
        beta = 0.0 if seed % 2 else 0.04
        objective = objective_of(name, kl_coef=beta, clip_delta=options.get("delta"))
        # TRL's bound of CISPO is that of the ratio, ours its distance from 1 as in all methods.
        high = preset.clip_high + (1.0 if name == "cispo" else 0.0)
        level = "sequence" if name == "gspo" else "token"
        trainer = trl_trainer(
            batch, beta, preset.clip_low, high, importance_sampling_level=level, **options
        )
        advantages, loss, gradient = of_trl(peers.GRPOTrainer, trainer, batch)
        found = group_advantages(batch.total, batch.size, options["scale_rewards"])
        assert_equal(found, advantages)
        per_token = found.unsqueeze(1).expand_as(batch.mask)
        for cut in batch.cuts():
            own_loss, own_gradient = ours(batch, per_token, objective, cut)
            assert_equal(own_loss, loss)
            assert_equal(own_gradient, gradient)
        clipped |= set((gradient == 0).flatten().tolist())
    assert clipped == {True, False}


@pytest.mark.slow
def test_rloo_is_that_of_trl_for_every_cut():
    """Advantages with the KL in the reward, loss and gradients on random ragged batches."""
    peers = pytest.importorskip("trl.trainer.rloo_trainer", reason="TRL is not installed")
    preset, objective = PRESETS["rloo"], objective_of("rloo")
    for seed in range(BATCHES):
        batch = Batch(seed)
        trainer = trl_trainer(batch, preset.kl_coef, preset.clip_low, preset.clip_high)
        advantages, loss, gradient = of_trl(peers.RLOOTrainer, trainer, batch)
        kl = ((batch.old - batch.ref) * batch.mask).sum(dim=1)
        rewards = batch.total - preset.kl_coef * kl
        found = group_advantages(rewards, batch.size, preset.scale, leave_one_out=True)
        assert_equal(found, advantages)
        per_token = found.unsqueeze(1).expand_as(batch.mask)
        for cut in batch.cuts():
            own_loss, own_gradient = ours(batch, per_token, objective, cut)
            assert_equal(own_loss, loss)
            assert_equal(own_gradient, gradient)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reinforce++", "reinforce++-baseline"])
def test_reinforce_pp_is_that_of_its_paper(name):
    """TRL has neither: whitened over all tokens of the batch (arXiv 2501.03262), in NumPy."""
    preset, objective = PRESETS[name], objective_of(name, kl_coef=0.0)
    for seed in range(BATCHES):
        batch = Batch(seed)
        rewards = batch.total.nan_to_num(0.0).numpy()
        mask, kl = batch.mask.numpy(), (batch.old - batch.ref).numpy()
        # every token's advantage before whitening, one by one
        raw = np.zeros(mask.shape)
        for row, length in enumerate(batch.lengths.tolist()):
            group = row // batch.size * batch.size
            for t in range(length):
                if name == "reinforce++":
                    raw[row, t] = rewards[row] - preset.kl_coef * kl[row, t:length].sum()
                else:
                    raw[row, t] = rewards[row] - rewards[group : group + batch.size].mean()
        std = np.sqrt(raw[mask].var() + 1e-8)
        expected = np.where(mask, (raw - raw[mask].mean()) / std, 0.0)
        if name == "reinforce++":
            terms = token_rewards(
                torch.tensor(rewards), batch.old, batch.ref, batch.mask, preset.kl_coef
            )
            found = discounted_returns(terms, batch.mask, 1.0)
        else:
            answers = group_advantages(torch.tensor(rewards), batch.size, preset.scale)
            found = answers.unsqueeze(1).expand_as(batch.mask)
        found = whiten(found, batch.mask)
        assert_equal(found, torch.tensor(expected))
        # PPO's surrogate, a mean over all tokens
        ratio = np.exp((batch.new - batch.old).numpy())
        terms = np.minimum(ratio * expected, np.clip(ratio, 0.8, 1.2) * expected)
        for cut in batch.cuts():
            loss, _ = ours(batch, found, objective, cut)
            assert_equal(loss, torch.tensor(-terms[mask].mean()))


def test_where_trl_is_not_its_paper_under_accumulation():
    """BNPO's mean is over the batch: TRL takes a mean of micro batches' means, ours does not."""
    peers = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed")
    batch = Batch(3)
    objective = objective_of("bnpo")
    advantages = group_advantages(batch.total, batch.size, "group")
    per_token = advantages.unsqueeze(1).expand_as(batch.mask)
    whole, _ = ours(batch, per_token, objective, [])
    half = batch.rows // 2
    parts = []
    for rows in (slice(0, half), slice(half, None)):
        inputs = {
            "prompt_ids": torch.ones(half, 1), "prompt_mask": torch.ones(half, 1),
            "completion_ids": torch.ones(half, batch.mask.shape[1]),
            "completion_mask": batch.mask[rows].long(), "advantages": advantages[rows],
            "old_per_token_logps": batch.old[rows],
        }  # fmt: skip
        trainer = trl_trainer(
            batch, 0.0, 0.2, 0.2, loss_type="bnpo", importance_sampling_level="token"
        )
        trainer.current_gradient_accumulation_steps = 2
        new = batch.new[rows]
        trainer._get_per_token_logps_and_entropies = lambda *_, new=new, **__: (
            new, torch.zeros_like(new), None,
        )  # fmt: skip
        parts.append(peers.GRPOTrainer._compute_loss(trainer, trainer.model, inputs))
    assert abs(sum(parts) / whole - 1) > 0.01
    for cut in batch.cuts():
        assert_equal(ours(batch, per_token, objective, cut)[0], whole)


def two_rank_cases() -> list[tuple[str, str, Batch]]:
    """Methods with statistics or a mean over the whole batch, on batches of several prompts."""
    kinds = (
        ("bnpo", "batch"),
        ("dapo", "group"),
        ("gspo", "group"),
        ("reinforce++-baseline", "none"),
    )
    batches = [batch for seed in range(60) if (batch := Batch(seed)).rows > batch.size]
    return [(*kind, batch) for kind in kinds for batch in batches]


def learnt(name: str, scale: str, batch: Batch, rows: slice):
    """Advantages of some rows, and loss and gradient that all ranks sum up to."""
    answers = group_advantages(batch.total[rows], batch.size, scale)
    advantages = answers.unsqueeze(1).expand_as(batch.mask[rows])
    if PRESETS[name].whiten:
        advantages = whiten(advantages, batch.mask[rows])
    objective = objective_of(name, kl_coef=0.1)
    totals = torch.tensor([float(batch.mask[rows].sum()), float(batch.mask[rows].any(dim=1).sum())])
    if dist.is_initialized():
        dist.all_reduce(totals)
    leaf = batch.new[rows].clone().requires_grad_()
    part = policy_loss(
        leaf, batch.old[rows], advantages, batch.mask[rows], objective, batch.ref[rows]
    )
    loss = part.loss_sum / objective.normalizer(*totals.tolist())
    loss.backward()
    loss = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(loss)
    return advantages, loss, leaf.grad


def run_rank(rank: int, folder: str) -> None:
    """One of two ranks, with an uneven part of the groups."""
    torch.set_default_dtype(torch.float64)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    found = []
    for name, scale, batch in two_rank_cases():
        rows = slice(0, batch.size) if rank == 0 else slice(batch.size, None)
        found.append(learnt(name, scale, batch, rows))
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(tmp_path):
    """One rank's numbers are TRL's, as above."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env={**free_environment(), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    cases = two_rank_cases()
    assert len(first) == len(second) == len(cases)
    for (name, scale, batch), one, other in zip(cases, first, second, strict=True):
        advantages, loss, gradient = learnt(name, scale, batch, slice(None))
        assert_equal(torch.cat((one[0], other[0])), advantages)
        assert_equal(torch.cat((one[2], other[2])), gradient)
        assert_equal(one[1], loss)
        assert_equal(other[1], loss)


if __name__ == "__main__":
    run_rank(int(sys.argv[1]), sys.argv[2])
