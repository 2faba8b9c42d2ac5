"""Everything about a run that can be checked before its first process."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypedDict

from dschat_tui.machine import GIB
from dschat_tui.runs import control, hosts, launch, memory_plan
from dschat_tui.runs.folder import RunFolder, RunIsHeld
from dschat_tui.runs.models import Origin, actor_of, reward_of
from dschat_tui.runs.state import DONE, PENDING, RUNNING, RunState, has_state
from engine.config.loading import ConfigError, get_value, load_config, options, to_yaml
from engine.config.rules import ModelFacts, check
from engine.config.schema import ALL_STEPS, DataSource, RunConfig
from engine.config.steps import BY_NAME, STEPS, RoleName, Step, StepName, pipeline
from engine.config.warmup import warmup_problem
from engine.data import checks, files
from engine.families import KNOWN_FAMILIES, family_of
from engine.models import embedded, folders, names
from engine.planning import ModelShape
from engine.rewards.functions import problem_of

LEAST_FREE_BYTES = GIB // 4
WEIGHT_SUFFIXES = (".safetensors", ".bin")


class Refusal(Exception):
    """A run that must not start; `reasons` say what is wrong and what to do, one reason each."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("\n".join(reasons))
        self.reasons = reasons


class Taken(Refusal):
    """Another process has started a run in the folder since the checks."""


@dataclass(frozen=True)
class Plan:
    """A run that passed the checks.

    Attributes:
        state: of a run that is in the folder already; None in a new one.
        notes: what the user should know before it starts.
    """

    config: RunConfig
    run: RunFolder
    steps: list[Step]
    state: RunState | None
    notes: list[str]

    def create(self, profile: str) -> None:
        """Write the run's folder. Of several processes that create the same run, one does.

        Raises:
            Taken: another one did.
            OSError: the folder cannot be written.
        """
        self.run.path.mkdir(parents=True, exist_ok=True)
        try:
            with self.run.lock(wait=False):
                if self.run.read_state() == self.state:
                    self.run.create(to_yaml(self.config), profile, self.steps)
                    return
        except RunIsHeld:
            pass  # by the process that creates the run, or by its supervisor already
        raise Taken(
            [
                f"--output {self.run.path}: another process has just started a run there. "
                "Choose another --output"
            ]
        )


def prepare(config: RunConfig, output: Path, numbers: list[int] | None) -> Plan:
    """Check a run of the steps `numbers` (None: all that no finished model replaces).

    The configuration that comes back has absolute paths and its number of nodes, so that the run
    does not depend on the folder it was started from, nor on later changes of a hostfile.

    Raises:
        Refusal: with all reasons found.
    """
    config = with_absolute_paths(config)
    _count_nodes(config)
    run = RunFolder(output)
    reasons: list[str] = []
    last = pipeline(config.alignment)[-1].number
    if numbers and max(numbers) > last:
        reasons.append(
            f"--steps asks for step {max(numbers)}, which a run with alignment={config.alignment} "
            f"does not have: its step {last} makes the model to talk to. Leave out "
            f"{max(numbers)}, or set alignment=ppo"
        )
    steps = wanted_steps(config, numbers)
    state = _existing_state(run, reasons)
    done = _steps_done(run, state, config)
    reasons += _check_folder(config, run, steps, state)
    reasons += [str(violation) for violation in check(config, model_facts(config))]
    reasons += _check_models(config, steps)
    reasons += _check_inputs(config, steps, done)
    reasons += _check_data(config, steps)
    reasons += _check_rewards(config, steps)
    reasons += _check_launch(config, run.path)
    if reasons:
        raise Refusal(reasons)
    return Plan(config, run, steps, state, _notes(config, steps))


def check_machine_and_rules(config: RunConfig, folder: Path, steps: list[Step]) -> list[str]:
    """Why `steps` of an existing run cannot run: rules, models, disk, launcher."""
    reasons = [str(violation) for violation in check(config, model_facts(config))]
    reasons += _check_models(config, steps)
    if not os.access(folder, os.W_OK | os.X_OK):
        reasons.append(f"no permission to write in {folder}. Make it writable for this user")
    return reasons + _check_disk(config, folder, steps) + _check_launch(config, folder)


def step_numbers(label: str, steps: object) -> list[int]:
    """Step numbers, in order, from `3`, `1,2` or a list; `label` is what a message names.

    Raises:
        ConfigError: something else was given.
    """
    parts = steps if isinstance(steps, list) else str(steps).split(",")
    numbers = {str(part).strip() for part in parts}
    if not numbers or not numbers <= {"1", "2", "3"}:
        raise ConfigError(
            f"{label} {steps}: steps are 1, 2 and 3, with commas between, such as --steps 1,2"
        )
    return sorted(map(int, numbers))


def wanted_steps(config: RunConfig, numbers: list[int] | None) -> list[Step]:
    """The steps asked for, in order; None: all that no finished model replaces."""
    if numbers is not None:
        return [step for step in config.steps if step.number in numbers]
    return [step for step in config.steps if _replacement(config, step) is None]


def _replacement(config: RunConfig, step: Step) -> str | None:
    """The finished model that replaces a step, or None."""
    return None if step.replaced_by is None else get_value(config, step.replaced_by)


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """A copy of the configuration in which every path to something on this disk is absolute."""
    copy = config.model_copy(deep=True)
    for entry in copy.rewards.functions:
        entry.path = entry.path and str(Path(entry.path).resolve())
    models = copy.models
    models.actor = _absolute_model(models.actor)
    if models.reward != "sft":
        models.reward = _absolute_model(models.reward)
    models.sft = models.sft and _absolute_model(models.sft)
    models.trained_reward = models.trained_reward and _absolute_model(models.trained_reward)
    _make_absolute(_all_sources(copy))
    for step in ALL_STEPS:
        data = getattr(copy, step).overrides.get("data", {})
        for key in ("sources", "sft_only_sources", "unsupervised_sources"):
            if key in data:
                sources = getattr(copy.for_step(step).data, key)
                _make_absolute(sources)
                data[key] = [source.model_dump() for source in sources]
    for section, key in (
        (copy.data, "cache_dir"),
        (copy.launch, "hostfile"),
        (copy.logging, "tensorboard_dir"),
    ):
        value = getattr(section, key)
        if value is not None:
            setattr(section, key, str(Path(value).expanduser().absolute()))
    return copy


def _count_nodes(config: RunConfig) -> None:
    """Write the number of hosts into a multi_node configuration that takes all of its hostfile."""
    options = config.launch
    if options.deployment != "multi_node" or options.hostfile is None or options.num_nodes:
        return
    try:
        found = hosts.hosts_of(Path(options.hostfile).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # refused with its own reason where the hosts are asked
    options.num_nodes = len(found) or None


def _make_absolute(sources: list[DataSource]) -> None:
    for source in sources:
        if files.is_local(source.path):
            source.path = str(Path(source.path).expanduser().absolute())


def _check_rewards(config: RunConfig, steps: list[Step]) -> list[str]:
    """What stands against the files of reward functions, before hours of the steps before them."""
    if not any(step.name == "ppo" for step in steps):
        return []
    entries = [entry for entry in config.rewards.functions if entry.kind == "function"]
    return [problem for entry in entries if (problem := problem_of(entry)) is not None]


def _check_data(config: RunConfig, steps: list[Step]) -> list[str]:
    """Why the data of each step cannot be used, with the step's own overrides applied."""
    alone = [step for step in steps if "data" in getattr(config, step.name).overrides]
    common = [step.number for step in steps if step not in alone]
    reasons = checks.refusals(config, common) if common or not alone else []
    for step in alone:
        reasons += checks.refusals(config.for_step(step.name), [step.number])
    return list(dict.fromkeys(reasons))


def model_facts(config: RunConfig) -> ModelFacts:
    """Positions and vocabularies of the models on this disk; nothing is downloaded."""
    actor = actor_of(config.models)
    reward = reward_of(config.models) or actor
    return ModelFacts(
        actor_positions=_positions(actor.name),
        reward_positions=_positions(reward.name),
        actor_vocabulary=vocabulary_hash(_model_folder(actor.name)),
        reward_vocabulary=vocabulary_hash(_model_folder(reward.name)),
    )


def vocabulary_hash(folder: Path) -> str | None:
    """Hash of the map from tokens to ids of a tokenizer on disk, without tokens added later."""
    tokenizer = folders.read_json(folder / "tokenizer.json")
    vocabulary = tokenizer and (tokenizer.get("model") or {}).get("vocab")
    if vocabulary is None:
        vocabulary = folders.read_json(folder / "vocab.json")
    if vocabulary is None:
        return None
    content = json.dumps(vocabulary, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8")).hexdigest()


def _absolute_model(name: str) -> str:
    """An absolute path where `name` is a folder here; else (Hub, embedded, fetched) unchanged."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.is_dir() else name


def _all_sources(config: RunConfig) -> list[DataSource]:
    data = config.data
    return [*data.sources, *data.sft_only_sources, *data.unsupervised_sources]


def _model_folder(name: str) -> Path:
    """The folder of a model on this machine, else a path that does not exist."""
    return names.local_folder(name) or Path(name)


def _positions(name: str) -> int | None:
    model_config = names.local_config(name) or {}
    return family_of(model_config.get("model_type")).position_limit(model_config)


def _existing_state(run: RunFolder, reasons: list[str]) -> RunState | None:
    try:
        return run.read_state()
    except (OSError, ValueError) as error:
        reasons.append(f"--output {run.path}: {error}. Choose another --output")
        return None


def _steps_done(run: RunFolder, state: RunState | None, config: RunConfig) -> set[int]:
    return {
        step.number
        for step in config.steps
        if state is not None
        and has_state(state, step.name, DONE)
        and all(
            folders.is_complete_model(folder)
            for folder in run.model_folders(step, config.ema.enabled, config.algorithm.has_critic)
        )
    }


def _check_folder(
    config: RunConfig, run: RunFolder, steps: list[Step], state: RunState | None
) -> list[str]:
    path = run.path
    if path.exists() and not path.is_dir():
        return [f"--output {path} is a file. Choose another --output"]
    existing = next(folder for folder in [path, *path.parents] if folder.exists())
    if not existing.is_dir():
        return [f"--output {path}: {existing} is a file. Choose another --output"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"--output {path}: no permission to write in {existing}. Choose another --output"]
    reasons = _check_disk(config, existing, steps)
    if state is not None:
        reasons += _check_additional(config, run, steps, state)
    elif path.exists():
        ours = [name for name in ("run.yaml", *(s.folder for s in STEPS)) if (path / name).exists()]
        if ours:
            reasons.append(
                f"--output {path} already holds {', '.join(ours)}, but no run.json. "
                "Choose another --output, or move these away"
            )
    return reasons


def _check_additional(
    config: RunConfig, run: RunFolder, steps: list[Step], state: RunState
) -> list[str]:
    """Why steps cannot be added to a run: they have begun, or its configuration differs."""
    path = run.path
    supervisor = control.supervisor_of(state)
    if state["state"] == RUNNING and supervisor is not None:
        return [
            f"--output {path}: this run is running (process {supervisor['pid']}). "
            "Wait for its end, or choose another --output"
        ]
    begun = [
        f"{step.name} ({state['steps'][step.name]['state']})"
        for step in steps
        if step.name in state["steps"] and not has_state(state, step.name, PENDING)
    ]
    if begun:
        return [
            f"--output {path} already holds a run with the steps {', '.join(begun)}; dschat never "
            "overwrites one. Choose another --output, or with --steps only steps not begun there"
        ]
    try:
        before = load_config(run.config_file)
    except ConfigError as error:
        return [f"--output {path} holds a run whose configuration is unreadable: {error}"]
    changed = [change.key for change in differences(before, config)]
    if changed:
        return [
            f"--output {path} holds a run of another configuration; different: "
            f"{', '.join(changed)}. Choose another --output (models.sft and models.trained_reward "
            "take over finished models), or give the configuration of that run"
        ]
    return []


@dataclass(frozen=True)
class Change:
    """One option whose value differs between two configurations."""

    key: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.key}: {value_json(self.before)} -> {value_json(self.after)}"


def value_json(value: object, indent: int | None = None) -> str:
    """The value of an option as JSON, also of a list of data sources."""
    return json.dumps(value, indent=indent, default=lambda part: part.model_dump(mode="json"))


def differences(before: RunConfig, after: RunConfig) -> list[Change]:
    """The options whose values differ, in the order of the schema."""
    changes = (
        Change(option.key, get_value(before, option.key), get_value(after, option.key))
        for option in options()
    )
    return [change for change in changes if change.before != change.after]


def _check_disk(config: RunConfig, folder: Path, steps: list[Step]) -> list[str]:
    ema, critic = config.ema.enabled, config.algorithm.has_critic
    models = sum(len(step.model_folders(ema, critic)) for step in steps)
    needed = LEAST_FREE_BYTES + models * _weight_bytes(_model_folder(config.models.actor))
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return []
    return [
        f"{folder} has {free / GIB:.1f} GiB free; the models of this run alone take about "
        f"{needed / GIB:.1f} GiB. Free some, or choose an --output on another disk"
    ]


def _weight_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix in WEIGHT_SUFFIXES)


def _check_models(config: RunConfig, steps: list[Step]) -> list[str]:
    models, wanted = config.models, {step.name for step in steps}
    reasons = []
    if "sft" in wanted:
        reasons += _check_base_model("models.actor", models.actor)
    if "reward" in wanted and models.reward != "sft":
        reasons += _check_base_model("models.reward", models.reward)
    reasons += _check_families(config, wanted)
    finished = (("models.sft", models.sft), ("models.trained_reward", models.trained_reward))
    for key, folder in finished:
        if folder is not None and (missing := folders.missing_parts(folder)):
            reasons.append(
                f"{key}={folder} is no finished model; missing: {', '.join(missing)}. "
                "Give the model folder that a finished step wrote"
            )
    return reasons


def _check_families(config: RunConfig, steps: set[StepName]) -> list[str]:
    """Which local models cannot take their role, and LoRA patterns that match no layer.

    Families that the planner knows are tested; of others the model itself is asked.
    """
    models = config.models
    used: dict[RoleName, Origin] = {"actor": actor_of(models)}
    if config.needs_reward_model and config.alignment == "ppo" and steps & {"reward", "ppo"}:
        used["critic"] = reward_of(models) or used["actor"]
    reasons = []
    for role, (key, name) in used.items():
        folder, lora = _model_folder(name), getattr(config, role).lora
        model_config = names.local_config(name)
        patterns = lora.targets if lora.rank else []
        if not model_config:
            continue
        if model_config.get("model_type") not in KNOWN_FAMILIES:
            trusted = models.trust_remote_code
            reasons += _check_unknown_family(role, f"{key}={name}", folder, patterns, trusted)
        elif patterns:
            try:
                ModelShape.from_config(model_config).lora_layers(patterns)
            except ValueError as error:
                reasons.append(f"{role}.{error}")
    return reasons


def _check_unknown_family(
    role: RoleName, model: str, folder: Path, patterns: list[str], trust_remote_code: bool
) -> list[str]:
    """Why a model of a family that the planner does not know cannot take a role."""
    modified = (folder / "config.json").stat().st_mtime_ns
    able = _abilities(str(folder), modified, trust_remote_code)
    problem, layers = (
        able["causal_lm" if role == "actor" else "reward_model"],
        able["linear_layers"],
    )
    if problem is not None:
        return [f"{model} cannot be the {role}: {problem}"]
    if not patterns or any(re.search(each, layer) for each in patterns for layer in layers):
        return []
    return [
        f"{role}.lora.targets {patterns} match no linear layer of {model}; its layers are called "
        f"{', '.join(layers[:8])}"
    ]


class _Abilities(TypedDict):
    """What a model can be: the problem with each role, None where there is none; its layers."""

    causal_lm: str | None
    reward_model: str | None
    linear_layers: list[str]


@cache
def _abilities(folder: str, modified: int, trust_remote_code: bool) -> _Abilities:
    """What `engine.models.probe` finds about a model; `modified` is when its config was.

    It takes some seconds, as it imports torch.
    """
    command = [sys.executable, "-m", "engine.models.probe", folder]
    command += ["--trust-remote-code"] if trust_remote_code else []
    process = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if process.returncode == 0:
        found: _Abilities = json.loads(process.stdout.splitlines()[-1])
        return found
    said = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
    problem = f"its class cannot be built: {said[-1]}"
    return {"causal_lm": problem, "reward_model": problem, "linear_layers": []}


def _notes(config: RunConfig, steps: list[Step]) -> list[str]:
    """What the user should know about a run that may start.

    A step that is left out, a warm-up that outlasts training, and a family without a memory plan.
    """
    options = [(step.name, getattr(config, step.name)) for step in steps]
    problems = [warmup_problem(name, each, each.max_steps) for name, each in options]
    notes = [problem for problem in problems if problem is not None]
    if not config.needs_reward_model and config.alignment == "ppo":
        names = ", ".join(entry.name for entry in config.rewards.functions)
        notes.append(
            f"step 2 is left out: no reward model is needed, as rewards.functions ({names}) reward "
            f"answers, and rlhf.algorithm={config.rlhf.algorithm} has no critic"
        )
    try:
        memory_plan.shapes_of(config, offline=True)
    except memory_plan.PlanError as error:
        # of a model that is not here yet the family is not known either
        if isinstance(error, memory_plan.UnplannedFamilyError):
            notes.append(str(error))
    return notes


def _check_base_model(key: str, name: str) -> list[str]:
    if name.startswith("embedded:"):
        if name.removeprefix("embedded:") in embedded.CONFIGS:
            return []
        known = ", ".join(f"embedded:{known}" for known in embedded.CONFIGS)
        return [f"{key}={name} is unknown; there are {known}"]
    try:
        names.resolve_model(name)
    except folders.ModelError as error:
        return [f"{key}={name}: {error}"]
    return []


def _check_inputs(config: RunConfig, steps: list[Step], done: set[int]) -> list[str]:
    """Why a step lacks what it starts from: made earlier in this run, or given as finished."""
    if not steps:
        return ["no step is left to run. Name some with --steps"]
    reasons = [
        f"--steps asks for step {step.number}, which {step.replaced_by} replaces. Leave out "
        "one of them"
        for step in steps
        if _replacement(config, step)
    ]
    available = done | {step.number for step in STEPS if _replacement(config, step)}
    for step in steps:
        from_sft = step.name != "reward" or config.models.reward == "sft"
        for needed in (BY_NAME[name] for name in step.needs if from_sft):
            if needed.number not in available and needed in config.steps:
                why = " (models.reward=sft)" if step.name == "reward" else ""
                reasons.append(
                    f"step {step.number}{why} starts from the model of step {needed.number}, which "
                    f"is not there. Add {needed.number} to --steps, or set "
                    f"{needed.replaced_by}=FOLDER"
                )
        available.add(step.number)
    return reasons


def _check_launch(config: RunConfig, run: Path) -> list[str]:
    reasons = []
    if launch.find_deepspeed() is None:
        reasons.append(
            "there is no 'deepspeed' command in this environment. Install dschat with its "
            "dependencies: pip install -e ."
        )
    if config.launch.deployment == "multi_node" and config.launch.hostfile is not None:
        return reasons + hosts.refusals(config.launch, run)
    gpus = launch.visible_gpus(os.environ)
    if gpus is not None and config.launch.num_accelerators > len(gpus):
        reasons.append(
            f"launch.num_accelerators={config.launch.num_accelerators}, but CUDA_VISIBLE_DEVICES "
            f"allows {len(gpus)}. Fix: launch.num_accelerators={len(gpus)}"
        )
    return reasons
