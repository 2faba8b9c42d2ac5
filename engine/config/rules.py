"""The table of rules on combinations of options: what is wrong, why, and the change that mends it.

The dashboard greys out by it, the command line refuses by it, the sweep prunes by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from engine.config.layout import PIPELINES
from engine.config.schema import RunConfig, StepConfig


@dataclass(frozen=True)
class ModelFacts:
    """What rules need to know of the two models, read from their folders without weights."""

    actor_positions: int | None = None
    reward_positions: int | None = None
    actor_vocabulary: str | None = None
    reward_vocabulary: str | None = None


@dataclass(frozen=True)
class Rule:
    """One forbidden combination.

    `violated` returns what is wrong in words, or None; `mend` the assignments that repair it.
    """

    id: str
    violated: Callable[[RunConfig, ModelFacts], str | None]
    why: str
    mend: Callable[[RunConfig], dict[str, Any]]


@dataclass(frozen=True)
class Violation:
    """A rule that a configuration breaks."""

    id: str
    wrong: str
    why: str
    mend: dict[str, Any]

    def __str__(self) -> str:
        change = " and ".join(f"{key}={_text(value)}" for key, value in self.mend.items())
        way_out = f" Way out: {change}." if change else ""
        return f"{self.wrong}: {self.why}.{way_out} [{self.id}]"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check(config: RunConfig, facts: ModelFacts | None = None) -> list[Violation]:
    """All rules that `config` breaks, in the order of the table."""
    facts = facts or ModelFacts()
    found = []
    views = [config.for_step(step) for step in PIPELINES[config.alignment]]
    for rule in RULES:
        for view in views:
            wrong = rule.violated(view, facts)
            if wrong is not None:
                found.append(Violation(rule.id, wrong, rule.why, rule.mend(view)))
                break
    return found


def _ranks(config: RunConfig) -> int:
    return config.launch.num_accelerators * (config.launch.num_nodes or 1)


def _offload_hybrid_without_lora(config: RunConfig, facts: ModelFacts) -> str | None:
    actor = config.actor
    if (
        actor.zero_stage == 2
        and actor.offload
        and config.hybrid_engine.enabled
        and actor.lora.rank == 0
    ):
        return "actor.zero_stage=2 with actor.offload and hybrid_engine.enabled but without LoRA"
    return None


def _mixz_needs(config: RunConfig, facts: ModelFacts) -> str | None:
    if not config.mixz.enabled:
        return None
    if config.actor.zero_stage != 3 or config.actor.lora.rank == 0 or not config.actor.lora.only:
        lora = config.actor.lora
        return (
            f"mixz.enabled with actor.zero_stage={config.actor.zero_stage}, "
            f"actor.lora.rank={lora.rank} and actor.lora.only={_text(lora.only)}"
        )
    return None


def _align_overflow(config: RunConfig, facts: ModelFacts) -> str | None:
    if config.ppo.align_overflow and config.dtype != "fp16":
        return f"ppo.align_overflow with dtype={config.dtype}"
    return None


_ZERO_PLUS_PLUS = ("zero_quantized_weights", "zero_quantized_gradients", "hierarchical_partition")


def _zero_plus_plus(config: RunConfig) -> dict[str, str]:
    """From the key of each ZeRO++ option that cannot work to what is wrong with it."""
    wrong = {}
    for name, role in (("actor", config.actor), ("critic", config.critic)):
        for field in _ZERO_PLUS_PLUS:
            if getattr(role, field) and role.zero_stage != 3:
                wrong[f"{name}.{field}"] = (
                    f"{name}.{field} with {name}.zero_stage={role.zero_stage}"
                )
    return wrong


def _zero_plus_plus_needs(config: RunConfig, facts: ModelFacts) -> str | None:
    return next(iter(_zero_plus_plus(config).values()), None)


def _hierarchical_needs_nodes(config: RunConfig, facts: ModelFacts) -> str | None:
    for name, role in (("actor", config.actor), ("critic", config.critic)):
        if role.hierarchical_partition and config.launch.deployment != "multi_node":
            return (
                f"{name}.hierarchical_partition with launch.deployment={config.launch.deployment}"
            )
    return None


def _nvme_needs(config: RunConfig, facts: ModelFacts) -> str | None:
    for name, role in (("actor", config.actor), ("critic", config.critic)):
        if role.nvme_path is not None and not (role.offload and role.zero_stage == 3):
            return (
                f"{name}.nvme_path={role.nvme_path} with {name}.zero_stage={role.zero_stage} and "
                f"{name}.offload={_text(role.offload)}"
            )
    return None


def _mixz_on_nvme(config: RunConfig, facts: ModelFacts) -> str | None:
    if config.mixz.enabled and config.actor.nvme_path is not None:
        return f"mixz.enabled with actor.nvme_path={config.actor.nvme_path}"
    return None


def _hpz_partition(config: RunConfig, facts: ModelFacts) -> str | None:
    size = config.mixz.hpz_partition_size
    if size is None:
        return None
    if config.launch.deployment != "multi_node":
        return f"mixz.hpz_partition_size={size} on one node"
    if size != config.launch.num_accelerators:
        return (
            f"mixz.hpz_partition_size={size} with {config.launch.num_accelerators} "
            "accelerators a node"
        )
    return None


def _offload_needs_sharding(config: RunConfig, facts: ModelFacts) -> str | None:
    for name, role in (("actor", config.actor), ("critic", config.critic)):
        if role.offload and role.zero_stage < 2:
            return f"{name}.offload with {name}.zero_stage={role.zero_stage}"
    return None


def _lora_only_without_rank(config: RunConfig, facts: ModelFacts) -> str | None:
    for name, role in (("actor", config.actor), ("critic", config.critic)):
        if role.lora.only and role.lora.rank == 0:
            return f"{name}.lora.only with {name}.lora.rank=0"
    return None


def _export_without_only(config: RunConfig, facts: ModelFacts) -> str | None:
    for name, role in (("actor", config.actor), ("critic", config.critic)):
        if role.lora.export and not role.lora.only:
            return f"{name}.lora.export with {name}.lora.only=false"
    return None


def _deployment(config: RunConfig, facts: ModelFacts) -> str | None:
    launch = config.launch
    if launch.deployment == "multi_node" and launch.hostfile is None:
        return "launch.deployment=multi_node without launch.hostfile"
    if launch.deployment != "multi_node" and launch.hostfile is not None:
        return f"launch.hostfile={launch.hostfile} with launch.deployment={launch.deployment}"
    if launch.deployment != "multi_node" and (launch.num_nodes or 1) > 1:
        return f"launch.num_nodes={launch.num_nodes} with launch.deployment={launch.deployment}"
    return None


def _steps(config: RunConfig) -> list[tuple[str, StepConfig]]:
    """The options of the steps that the configuration leads through, by name."""
    return [(name, getattr(config, name)) for name in PIPELINES[config.alignment]]


def _batch_divides(config: RunConfig, facts: ModelFacts) -> str | None:
    ranks = _ranks(config)
    for name, step in _steps(config):
        rows = ranks * (step.micro_batch_size or 1)
        if step.batch_size % rows:
            micro = f" with {name}.micro_batch_size={step.micro_batch_size}"
            return (
                f"{name}.batch_size={step.batch_size} on {ranks} ranks"
                f"{micro if step.micro_batch_size else ''}"
            )
    return None


def _mend_batches(config: RunConfig) -> dict[str, Any]:
    ranks = _ranks(config)
    changes = {}
    for name, step in _steps(config):
        rows = ranks * (step.micro_batch_size or 1)
        if step.batch_size % rows:
            changes[f"{name}.batch_size"] = -(-step.batch_size // rows) * rows
    return changes


def _rollouts_divide(config: RunConfig, facts: ModelFacts) -> str | None:
    ppo, ranks = config.ppo, _ranks(config)
    if config.alignment != "ppo":
        return None
    rows = ranks * (ppo.generation_batch_size or 1)
    if ppo.rollout_batch_size % rows:
        return f"ppo.rollout_batch_size={ppo.rollout_batch_size} in parts of {rows}"
    if ppo.rollout_batch_size % ppo.batch_size:
        return f"ppo.rollout_batch_size={ppo.rollout_batch_size}, ppo.batch_size={ppo.batch_size}"
    return None


def _mend_rollouts(config: RunConfig) -> dict[str, Any]:
    ppo, ranks = config.ppo, _ranks(config)
    batch = -(-ppo.batch_size // ranks) * ranks
    return {
        "ppo.generation_batch_size": "null",
        "ppo.rollout_batch_size": max(1, ppo.rollout_batch_size // batch) * batch,
        "ppo.batch_size": batch,
    }


def _tokenizers_differ(config: RunConfig, facts: ModelFacts) -> str | None:
    if facts.actor_vocabulary is None or facts.reward_vocabulary is None:
        return None
    if config.alignment == "dpo":
        return None
    if facts.actor_vocabulary != facts.reward_vocabulary:
        models = config.models
        actor = f"models.sft={models.sft}" if models.sft else f"models.actor={models.actor}"
        reward = f"models.reward={models.reward}"
        if models.trained_reward:
            reward = f"models.trained_reward={models.trained_reward}"
        return f"{actor} and {reward} have different tokenizers"
    return None


def _lengths(config: RunConfig) -> Iterator[tuple[str, str, int]]:
    """Most tokens that each model reads: actor or reward, by which options, how many."""
    if config.alignment == "dpo":
        yield "actor", "sft.max_length", config.sft.max_length
        yield "actor", "dpo.max_length", config.dpo.max_length
        return
    answered = config.ppo.max_prompt_length + config.ppo.max_answer_length
    for model, step in (("actor", "sft"), ("reward", "reward")):
        yield model, "ppo.max_prompt_length + ppo.max_answer_length", answered
        yield model, f"{step}.max_length", getattr(config, step).max_length


def _too_long(config: RunConfig, facts: ModelFacts) -> str | None:
    known = {"actor": facts.actor_positions, "reward": facts.reward_positions}
    for model, option, tokens in _lengths(config):
        positions = known[model]
        if positions is not None and tokens > positions:
            return f"{option} = {tokens} tokens with {positions} positions in the {model} model"
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        "zero2-offload-hybrid-needs-lora",
        _offload_hybrid_without_lora,
        "training is unstable, as in the original",
        lambda config: {"actor.lora.rank": 128},
    ),
    Rule(
        "mixz-needs-zero3-and-lora",
        _mixz_needs,
        "MixZ quantises the frozen, sharded base weights, which only ZeRO-3 with only-LoRA has",
        lambda config: {
            "actor.zero_stage": 3,
            "actor.lora.rank": config.actor.lora.rank or 128,
            "actor.lora.only": True,
        },
    ),
    Rule(
        "hpz-partition-size",
        _hpz_partition,
        "the secondary partition must span exactly one node of several, and none on one node",
        lambda config: {"mixz.hpz_partition_size": "null"},
    ),
    Rule(
        "mixz-not-on-nvme",
        _mixz_on_nvme,
        "weights that lie in files cannot be kept quantised",
        lambda config: {"actor.nvme_path": "null"},
    ),
    Rule(
        "zero-plus-plus-needs-zero3",
        _zero_plus_plus_needs,
        "ZeRO++ changes how the shards of ZeRO-3 are gathered and reduced",
        lambda config: {f"{key.split('.')[0]}.zero_stage": 3 for key in _zero_plus_plus(config)},
    ),
    Rule(
        "hierarchical-partition-needs-nodes",
        _hierarchical_needs_nodes,
        "a copy for each node needs several nodes",
        lambda config: {
            f"{name}.hierarchical_partition": False
            for name, role in (("actor", config.actor), ("critic", config.critic))
            if role.hierarchical_partition
        },
    ),
    Rule(
        "nvme-needs-zero3-and-offload",
        _nvme_needs,
        "only ZeRO-3 with offload writes states into files",
        lambda config: {
            key: value
            for name, role in (("actor", config.actor), ("critic", config.critic))
            if role.nvme_path is not None
            for key, value in ((f"{name}.zero_stage", 3), (f"{name}.offload", True))
        },
    ),
    Rule(
        "align-overflow-needs-fp16",
        _align_overflow,
        "only fp16 has a loss scale and steps that are skipped",
        lambda config: {"ppo.align_overflow": False},
    ),
    Rule(
        "offload-needs-zero2",
        _offload_needs_sharding,
        "DeepSpeed offloads the states of ZeRO-2 and ZeRO-3 alone",
        lambda config: {
            f"{name}.zero_stage": 2
            for name, role in (("actor", config.actor), ("critic", config.critic))
            if role.offload and role.zero_stage < 2
        },
    ),
    Rule(
        "lora-only-needs-rank",
        _lora_only_without_rank,
        "without adapters nothing would be trained",
        lambda config: {
            f"{name}.lora.rank": 128
            for name, role in (("actor", config.actor), ("critic", config.critic))
            if role.lora.only and role.lora.rank == 0
        },
    ),
    Rule(
        "adapter-export-needs-only-lora",
        _export_without_only,
        "adapters fit the base they were trained on, which must not have changed",
        lambda config: {
            key: value
            for name, role in (("actor", config.actor), ("critic", config.critic))
            if role.lora.export and not role.lora.only
            for key, value in (
                (f"{name}.lora.only", True),
                (f"{name}.lora.rank", role.lora.rank or 128),
            )
        },
    ),
    Rule(
        "hostfile-and-deployment",
        _deployment,
        "a hostfile names the nodes of a multi_node deployment, and only of that",
        lambda config: {
            "launch.deployment": "multi_node" if config.launch.hostfile else "single_node",
            **({} if config.launch.hostfile else {"launch.num_nodes": "null"}),
        },
    ),
    Rule(
        "batch-size-divides",
        _batch_divides,
        "every rank must get the same number of rows in each optimizer step",
        _mend_batches,
    ),
    Rule(
        "rollout-batch-divides",
        _rollouts_divide,
        "a rollout batch is cut into equal parts for ranks, generation and optimizer steps",
        _mend_rollouts,
    ),
    Rule(
        "same-tokenizer",
        _tokenizers_differ,
        "the reward model must read the very tokens that the actor writes",
        lambda config: {"models.reward": "sft"},
    ),
    Rule(
        "fits-position-embeddings",
        _too_long,
        "later tokens would have no position embedding",
        lambda config: {},
    ),
)
