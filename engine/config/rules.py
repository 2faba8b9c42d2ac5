"""The table of rules on combinations of options: what is wrong, why, and the change that fixes it.

The dashboard greys options out, the command line refuses runs and the sweep prunes cells by this
table. A rule is one function below; they are checked in this order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.config.schema import PpoConfig, RoleConfig, RunConfig, StepConfig


@dataclass(frozen=True)
class ModelFacts:
    """What rules need to know of the two models, read from their folders without weights."""

    actor_positions: int | None = None
    reward_positions: int | None = None
    actor_vocabulary: str | None = None
    reward_vocabulary: str | None = None


@dataclass(frozen=True)
class Problem:
    """What is wrong in words that name the values, and the assignments that fix it, if any do."""

    wrong: str
    fix: dict[str, Any] = field(default_factory=dict)


Check = Callable[[RunConfig, ModelFacts], "Problem | None"]
RoleCheck = Callable[[str, RoleConfig, RunConfig], "Problem | None"]


@dataclass(frozen=True)
class Rule:
    """One forbidden combination; `why` is the same whatever the values are."""

    id: str
    why: str
    check: Check


@dataclass(frozen=True)
class Violation:
    """A rule that a configuration breaks."""

    id: str
    wrong: str
    why: str
    fix: dict[str, Any]

    def __str__(self) -> str:
        changes = " and ".join(f"{key}={_text(value)}" for key, value in self.fix.items())
        fix = f" Fix: {changes}." if changes else ""
        return f"{self.wrong}: {self.why}.{fix} [{self.id}]"


RULES: list[Rule] = []


def check(config: RunConfig, facts: ModelFacts | None = None) -> list[Violation]:
    """All rules that `config` breaks, in the order of the table."""
    facts = facts or ModelFacts()
    views = [config.for_step(step.name) for step in config.steps]
    found = []
    for each in RULES:
        problem = next(filter(None, (each.check(view, facts) for view in views)), None)
        if problem is not None:
            found.append(Violation(each.id, problem.wrong, each.why, problem.fix))
    return found


def rule(id: str, why: str) -> Callable[[Check], Check]:
    """Put a function into the table."""

    def add(function: Check) -> Check:
        RULES.append(Rule(id, why, function))
        return function

    return add


def role_rule(id: str, why: str) -> Callable[[RoleCheck], RoleCheck]:
    """Put a function into the table that looks at the actor's layout, then at the critic's.

    The function gets the role's name and options and the whole configuration. If both roles break
    the rule, the first is named and both are fixed.
    """

    def add(function: RoleCheck) -> RoleCheck:
        def check_roles(config: RunConfig, facts: ModelFacts) -> Problem | None:
            roles = (("actor", config.actor), ("critic", config.critic))
            found = [p for name, role in roles if (p := function(name, role, config)) is not None]
            if not found:
                return None
            fix = {key: value for problem in found for key, value in problem.fix.items()}
            return Problem(found[0].wrong, fix)

        RULES.append(Rule(id, why, check_roles))
        return function

    return add


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _ranks(config: RunConfig) -> int:
    return config.launch.num_accelerators * (config.launch.num_nodes or 1)


def _steps(config: RunConfig) -> Iterator[tuple[str, StepConfig]]:
    """The options of the steps that the configuration leads through, by name."""
    for step in config.steps:
        yield step.name, getattr(config, step.name)


@rule("zero2-offload-hybrid-needs-lora", "training is unstable, as in the original")
def _offload_hybrid_without_lora(config: RunConfig, facts: ModelFacts) -> Problem | None:
    actor = config.actor
    unstable = actor.zero_stage == 2 and actor.offload and config.hybrid_engine.enabled
    if not unstable or actor.lora.rank:
        return None
    return Problem(
        "actor.zero_stage=2 with actor.offload and hybrid_engine.enabled but without LoRA",
        {"actor.lora.rank": 128},
    )


@rule(
    "mixz-needs-zero3-and-lora",
    "MixZ quantises the frozen, sharded base weights, which only ZeRO-3 with only-LoRA has",
)
def _mixz_needs(config: RunConfig, facts: ModelFacts) -> Problem | None:
    stage, lora = config.actor.zero_stage, config.actor.lora
    if not config.mixz.enabled or (stage == 3 and lora.rank and lora.only):
        return None
    return Problem(
        f"mixz.enabled with actor.zero_stage={stage}, actor.lora.rank={lora.rank} and "
        f"actor.lora.only={_text(lora.only)}",
        {
            "actor.zero_stage": 3,
            "actor.lora.rank": lora.rank or 128,
            "actor.lora.only": True,
        },
    )


@rule(
    "hpz-partition-size",
    "the secondary partition must span exactly one node of several, and none on one node",
)
def _hpz_partition(config: RunConfig, facts: ModelFacts) -> Problem | None:
    size, launch = config.mixz.hpz_partition_size, config.launch
    fix = {"mixz.hpz_partition_size": "null"}
    if size is None:
        return None
    if launch.deployment != "multi_node":
        return Problem(f"mixz.hpz_partition_size={size} on one node", fix)
    if size != launch.num_accelerators:
        return Problem(
            f"mixz.hpz_partition_size={size} with {launch.num_accelerators} accelerators per node",
            fix,
        )
    return None


@rule("mixz-not-on-nvme", "weights that are kept in files cannot be quantised")
def _mixz_on_nvme(config: RunConfig, facts: ModelFacts) -> Problem | None:
    if not config.mixz.enabled or config.actor.nvme_path is None:
        return None
    return Problem(
        f"mixz.enabled with actor.nvme_path={config.actor.nvme_path}", {"actor.nvme_path": "null"}
    )


@rule(
    "ema-not-on-nvme",
    "after each step the average reads all trained weights, and those in files are not available",
)
def _average_on_nvme(config: RunConfig, facts: ModelFacts) -> Problem | None:
    if not config.ema.enabled or config.actor.nvme_path is None:
        return None
    return Problem(
        f"ema.enabled with actor.nvme_path={config.actor.nvme_path}", {"ema.enabled": False}
    )


@role_rule(
    "zero-plus-plus-needs-zero3", "ZeRO++ changes how the shards of ZeRO-3 are gathered and reduced"
)
def _zero_plus_plus_needs(name: str, role: RoleConfig, config: RunConfig) -> Problem | None:
    fields = ("zero_quantized_weights", "zero_quantized_gradients", "hierarchical_partition")
    wrong = next((field for field in fields if getattr(role, field)), None)
    if wrong is None or role.zero_stage == 3:
        return None
    return Problem(
        f"{name}.{wrong} with {name}.zero_stage={role.zero_stage}", {f"{name}.zero_stage": 3}
    )


@role_rule("hierarchical-partition-needs-nodes", "a copy for each node needs several nodes")
def _hierarchical_needs_nodes(name: str, role: RoleConfig, config: RunConfig) -> Problem | None:
    key, deployment = f"{name}.hierarchical_partition", config.launch.deployment
    if not role.hierarchical_partition or deployment == "multi_node":
        return None
    return Problem(f"{key} with launch.deployment={deployment}", {key: False})


@role_rule("nvme-needs-zero3-and-offload", "only ZeRO-3 with offload writes states into files")
def _nvme_needs(name: str, role: RoleConfig, config: RunConfig) -> Problem | None:
    if role.nvme_path is None or (role.offload and role.zero_stage == 3):
        return None
    return Problem(
        f"{name}.nvme_path={role.nvme_path} with {name}.zero_stage={role.zero_stage} and "
        f"{name}.offload={_text(role.offload)}",
        {f"{name}.zero_stage": 3, f"{name}.offload": True},
    )


@rule("align-overflow-needs-fp16", "only fp16 has a loss scale and steps that are skipped")
def _align_overflow(config: RunConfig, facts: ModelFacts) -> Problem | None:
    if not config.ppo.align_overflow or config.dtype == "fp16":
        return None
    return Problem(f"ppo.align_overflow with dtype={config.dtype}", {"ppo.align_overflow": False})


@role_rule("offload-needs-zero2", "DeepSpeed offloads only the states of ZeRO-2 and ZeRO-3")
def _offload_needs_sharding(name: str, role: RoleConfig, config: RunConfig) -> Problem | None:
    if not role.offload or role.zero_stage >= 2:
        return None
    return Problem(
        f"{name}.offload with {name}.zero_stage={role.zero_stage}", {f"{name}.zero_stage": 2}
    )


@role_rule("lora-only-needs-rank", "without adapters nothing would be trained")
def _lora_only_without_rank(name: str, role: RoleConfig, config: RunConfig) -> Problem | None:
    if not role.lora.only or role.lora.rank:
        return None
    return Problem(f"{name}.lora.only with {name}.lora.rank=0", {f"{name}.lora.rank": 128})


@role_rule(
    "adapter-export-needs-only-lora",
    "adapters fit the base they were trained on, which must not have changed",
)
def _export_without_only(name: str, role: RoleConfig, config: RunConfig) -> Problem | None:
    if not role.lora.export or role.lora.only:
        return None
    return Problem(
        f"{name}.lora.export with {name}.lora.only=false",
        {f"{name}.lora.only": True, f"{name}.lora.rank": role.lora.rank or 128},
    )


@rule(
    "hostfile-and-deployment",
    "a hostfile names the nodes of a multi_node deployment, and of no other",
)
def _deployment(config: RunConfig, facts: ModelFacts) -> Problem | None:
    launch, several = config.launch, config.launch.deployment == "multi_node"
    fix = {"launch.deployment": "multi_node" if launch.hostfile else "single_node"}
    if launch.hostfile is None:
        fix["launch.num_nodes"] = "null"
    if several and launch.hostfile is None:
        return Problem("launch.deployment=multi_node without launch.hostfile", fix)
    with_deployment = f"with launch.deployment={launch.deployment}"
    if not several and launch.hostfile is not None:
        return Problem(f"launch.hostfile={launch.hostfile} {with_deployment}", fix)
    if not several and (launch.num_nodes or 1) > 1:
        return Problem(f"launch.num_nodes={launch.num_nodes} {with_deployment}", fix)
    return None


@rule("batch-size-divides", "every rank must get the same number of rows in each optimizer step")
def _batch_divides(config: RunConfig, facts: ModelFacts) -> Problem | None:
    ranks, wrong, fix = _ranks(config), [], {}
    for name, step in _steps(config):
        rows = ranks * (step.micro_batch_size or 1)
        if step.batch_size % rows:
            size = f"{name}.micro_batch_size={step.micro_batch_size}"
            micro = f" with {size}" if step.micro_batch_size else ""
            wrong.append(f"{name}.batch_size={step.batch_size} on {ranks} ranks{micro}")
            fix[f"{name}.batch_size"] = -(-step.batch_size // rows) * rows
    return Problem(wrong[0], fix) if wrong else None


@rule(
    "rollout-batch-divides",
    "a rollout batch is cut into equal parts for ranks, generation and optimizer steps",
)
def _rollouts_divide(config: RunConfig, facts: ModelFacts) -> Problem | None:
    ppo, ranks, answers = config.ppo, _ranks(config), config.algorithm.answers_per_prompt
    if config.alignment != "ppo":
        return None
    rows, batch = ranks * (ppo.generation_batch_size or 1), -(-ppo.batch_size // ranks) * ranks
    whole = math.lcm(batch, ranks * answers)
    fix = {
        "ppo.generation_batch_size": "null",
        "ppo.rollout_batch_size": max(1, ppo.rollout_batch_size // whole) * whole,
        "ppo.batch_size": batch,
    }
    rollout = f"ppo.rollout_batch_size={ppo.rollout_batch_size}"
    if ppo.rollout_batch_size % (ranks * answers):
        prompts = f"{answers} answers to each prompt"
        return Problem(f"{rollout} answers on {ranks} ranks, {prompts}", fix)
    if ppo.rollout_batch_size % rows:
        return Problem(f"{rollout} in parts of {rows}", fix)
    if ppo.rollout_batch_size % ppo.batch_size:
        return Problem(f"{rollout}, ppo.batch_size={ppo.batch_size}", fix)
    return None


@rule(
    "groups-need-answers",
    "an answer is compared with the others to its prompt, so there must be others",
)
def _groups_of_one(config: RunConfig, facts: ModelFacts) -> Problem | None:
    algorithm = config.algorithm
    if config.alignment != "ppo" or not algorithm.has_groups or algorithm.answers_per_prompt > 1:
        return None
    return Problem(
        f"rlhf.answers_per_prompt=1 with rlhf.algorithm={config.rlhf.algorithm} "
        f"(baseline {algorithm.baseline})",
        {"rlhf.answers_per_prompt": 8},
    )


@rule("needs-groups", "only a baseline of group or leave_one_out compares the answers to a prompt")
def _needs_groups(config: RunConfig, facts: ModelFacts) -> Problem | None:
    algorithm, rlhf = config.algorithm, config.rlhf
    if config.alignment != "ppo" or algorithm.has_groups:
        return None
    baseline = f"with rlhf.algorithm={rlhf.algorithm} (baseline {algorithm.baseline})"
    if algorithm.scale != "none":
        return Problem(f"rlhf.scale={algorithm.scale} {baseline}", {"rlhf.scale": "none"})
    if algorithm.resampling_tries:
        tries = f"rlhf.resampling_tries={algorithm.resampling_tries}"
        return Problem(f"{tries} {baseline}", {"rlhf.resampling_tries": 0})
    if algorithm.ratio != "token":
        return Problem(f"rlhf.ratio={algorithm.ratio} {baseline}", {"rlhf.ratio": "token"})
    return None


@rule("critic-options-need-a-critic", "this algorithm trains no critic, so they would do nothing")
def _options_of_no_critic(config: RunConfig, facts: ModelFacts) -> Problem | None:
    if config.alignment != "ppo" or config.algorithm.has_critic:
        return None
    fields = PpoConfig.model_fields
    for name in ("value_clip", "gae_lambda", "align_overflow"):
        value = getattr(config.ppo, name)
        if value != fields[name].default:
            return Problem(
                f"ppo.{name}={_text(value)} with rlhf.algorithm={config.rlhf.algorithm}",
                {f"ppo.{name}": fields[name].default},
            )
    return None


@rule("second-clip-beyond-the-first", "it bounds the ratio where the clipped loss does not")
def _second_clip(config: RunConfig, facts: ModelFacts) -> Problem | None:
    algorithm, delta = config.algorithm, config.rlhf.clip_delta
    if config.alignment != "ppo" or delta is None:
        return None
    if algorithm.surrogate == "clipped" and delta > 1 + algorithm.clip_high:
        return None
    return Problem(
        f"rlhf.clip_delta={delta} with surrogate {algorithm.surrogate} and ratios up to "
        f"{1 + algorithm.clip_high:g}",
        {"rlhf.clip_delta": "null"},
    )


@rule("kl-target-needs-a-coefficient", "a target adapts the coefficient by factors, and 0 stays 0")
def _target_without_coefficient(config: RunConfig, facts: ModelFacts) -> Problem | None:
    if config.alignment != "ppo" or config.ppo.kl_target is None or config.algorithm.kl_coef:
        return None
    return Problem(
        f"ppo.kl_target={config.ppo.kl_target} with rlhf.algorithm={config.rlhf.algorithm} and a "
        "KL coefficient of 0",
        {"ppo.kl_coef": 0.05},
    )


@rule("same-tokenizer", "the reward model must read the same tokens that the actor writes")
def _tokenizers_differ(config: RunConfig, facts: ModelFacts) -> Problem | None:
    actor, reward, models = facts.actor_vocabulary, facts.reward_vocabulary, config.models
    if not config.has_step("reward"):
        return None
    if actor is None or reward is None or actor == reward:
        return None
    actor_key = "sft" if models.sft else "actor"
    reward_key = "trained_reward" if models.trained_reward else "reward"
    return Problem(
        f"models.{actor_key}={getattr(models, actor_key)} and "
        f"models.{reward_key}={getattr(models, reward_key)} have different tokenizers",
        {"models.reward": "sft"},
    )


@rule("fits-position-embeddings", "later tokens would have no position embedding")
def _too_long(config: RunConfig, facts: ModelFacts) -> Problem | None:
    known = {"actor": facts.actor_positions, "reward": facts.reward_positions}
    for model, option, tokens in _lengths(config):
        positions = known[model]
        if positions is not None and tokens > positions:
            return Problem(
                f"{option} = {tokens} tokens with {positions} positions in the {model} model"
            )
    return None


def _lengths(config: RunConfig) -> Iterator[tuple[str, str, int]]:
    """The most tokens that each model reads: actor or reward, set by which options, how many."""
    for step in config.steps:
        models = ["reward" if role == "critic" else "actor" for role in step.roles]
        if step.name != "ppo":
            yield models[0], f"{step.name}.max_length", getattr(config, step.name).max_length
            continue
        answered = config.ppo.max_prompt_length + config.ppo.max_answer_length
        for model in models if config.needs_reward_model else models[:1]:
            yield model, "ppo.max_prompt_length + ppo.max_answer_length", answered
