"""The matrix of a sweep: its axes, and a cell for each combination of their values."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from dschat_tui.runs import memory_plan
from dschat_tui.runs.models import actor_of, reward_of
from dschat_tui.runs.preflight import step_numbers
from engine.config.loading import (
    ConfigError,
    apply_overrides,
    get_value,
    profile_folders,
    read_profile,
    read_yaml,
    resolve,
    set_value,
)
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME, STEPS, StepName

Values = dict[str, object]

# Axes over a feature of both models, and the prefix of each in the names of cells.
FEATURES: Mapping[str, str] = {
    "zero_stage": "z",
    "hybrid_engine": "he_",
    "offload": "offload_",
    "lora": "lora_",
}
# of LoRA where the profile has none: as in the original's sweeps, and for small models a share of
# their width, since adapters as wide as the weights cost more than the weights themselves
LORA_RANK = 128
LORA_SHARE = 8
# An axis over these changes what steps 1 and 2 make, so that each value has its own preparation.
PREPARED_SECTIONS = ("models", "data", "sft", "reward", "seed")
# The steps that others start from, and the options that give a finished model in their place.
FINISHED: Mapping[int, tuple[StepName, str]] = {
    1: ("sft", "models.sft"),
    2: ("reward", "models.trained_reward"),
}
LONGEST_NAME = 120
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._+=-]+")
_MATRIX_KEYS = ("profile", "steps", "max_steps", "time_limit", "set", "axes")


@dataclass(frozen=True)
class Axis:
    """A feature or an option by its key, and the values it takes."""

    name: str
    values: tuple[object, ...]


@dataclass(frozen=True)
class Cell:
    """One combination of values; `assignments` are the options that it sets."""

    name: str
    values: Values
    assignments: Values
    config: RunConfig


@dataclass(frozen=True)
class Preparation:
    """A run of the steps that cells start from; they use its models."""

    name: str
    config: RunConfig
    steps: tuple[int, ...]

    def models(self, output: Path) -> Values:
        """The options that pass its models to cells, for the folder of the sweep."""
        made = [FINISHED[step] for step in self.steps]
        return {key: str(output / self.name / BY_NAME[step].folder / "model") for step, key in made}


@dataclass(frozen=True)
class Sweep:
    """What a sweep runs: the configuration all cells share, the axes, and the cells.

    `preparation_of` has the name of the preparation that a cell starts from, by the cell's name.
    """

    profile: str
    steps: tuple[int, ...]
    config: RunConfig
    axes: tuple[Axis, ...]
    cells: tuple[Cell, ...]
    preparations: tuple[Preparation, ...]
    preparation_of: Mapping[str, str]


@dataclass(frozen=True)
class MatrixFile:
    """A sweep as its YAML file describes it; what the file leaves out is None or empty."""

    profile: str | None = None
    steps: tuple[int, ...] | None = None
    max_steps: int | None = None
    time_limit: float | None = None
    assignments: tuple[str, ...] = ()
    axes: tuple[Axis, ...] = ()


def make(
    profile: str,
    steps: tuple[int, ...],
    axes: Sequence[Axis],
    assignments: Sequence[str] = (),
    max_steps: int | None = None,
    data: Sequence[str] = (),
) -> Sweep:
    """The matrix of a profile; without axes that of the original's sweep of the step.

    Raises:
        ConfigError: an unknown profile or option, or a value that is refused.
    """
    values = apply_overrides(read_profile(profile), list(assignments))
    if data:
        set_value(values, "data.sources", [{"path": path} for path in data])
    # a sweep runs unattended, so nobody could accept a missed gate
    changes: Values = {"gates.action": "warn"}
    if 3 not in steps:
        # it has no part in steps 1 and 2, and its rules none in their matrix
        changes["hybrid_engine.enabled"] = False
    if max_steps is not None:
        changes |= {f"{step.name}.max_steps": max_steps for step in STEPS}
    values = apply_overrides(values, as_assignments(changes))
    config = resolve(values, f"profile {profile}")
    axes = tuple(axes) or default_axes(steps)
    _check_axes(axes, steps, config)
    cells = []
    taken: set[str] = set()
    for combination in itertools.product(*(axis.values for axis in axes)):
        chosen = dict(zip((axis.name for axis in axes), combination, strict=True))
        cell_assignments: Values = {}
        for name, value in chosen.items():
            cell_assignments |= options_of(name, value, steps, config)
        own = resolve(apply_overrides(values, as_assignments(cell_assignments)), "--axis")
        cells.append(Cell(_free_name(cell_name(chosen), taken), chosen, cell_assignments, own))
    preparations, preparation_of = _preparations(values, cells, steps)
    return Sweep(
        profile, steps, config, axes, tuple(cells), tuple(preparations.values()), preparation_of
    )


def default_axes(steps: Sequence[int]) -> tuple[Axis, ...]:
    """The axes of the original's sweep of a step."""
    on_off = (True, False)
    stage, offload = Axis("zero_stage", (2, 3)), Axis("offload", on_off)
    if 3 in steps:
        return stage, Axis("hybrid_engine", on_off), offload, Axis("lora", on_off)
    return (stage, offload, Axis("lora", on_off)) if 1 in steps else (stage, offload)


def options_of(name: str, value: object, steps: Sequence[int], config: RunConfig) -> Values:
    """The options that a value of an axis sets, by their keys.

    Raises:
        ConfigError: a value of `lora` that is neither a rank nor on or off.
    """
    trained = {role for step in config.steps if step.number in steps for role in step.roles}
    roles = [role for role in ("actor", "critic") if role in trained]
    if name == "hybrid_engine":
        return {"hybrid_engine.enabled": value}
    if name in ("zero_stage", "offload"):
        return {f"{role}.{name}": value for role in roles}
    if name != "lora":
        return {name: value}
    # the actor's alone in step 3, as in the original
    role = roles[0]
    lora = getattr(config, role).lora
    if not isinstance(value, int):
        raise ConfigError(f"--axis lora: {value!r} is neither a rank nor true or false")
    rank = (lora.rank or default_rank(config, role)) if value is True else int(value)
    off = {f"{role}.lora.only": False, f"{role}.lora.export": False}
    return {f"{role}.lora.rank": rank, **(off if rank == 0 and lora.only else {})}


def default_rank(config: RunConfig, role: str) -> int:
    """The LoRA rank of a sweep for a profile without one."""
    origin = actor_of(config.models)
    if role == "critic":
        origin = reward_of(config.models) or origin
    try:
        width = memory_plan.shape_of(origin, offline=True).hidden
    except memory_plan.PlanError:
        return LORA_RANK
    return max(1, min(LORA_RANK, width // LORA_SHARE))


def as_assignments(assignments: Mapping[str, object]) -> list[str]:
    """Assignments as `--set` takes them."""
    return [f"{key}={json.dumps(value)}" for key, value in assignments.items()]


def parse_axis(text: str) -> Axis:
    """An axis from `key=v1,v2`; values are YAML.

    Raises:
        ConfigError: no `=`, an unknown key, or no values.
    """
    key, equals, listed = text.partition("=")
    key = key.strip()
    if not equals:
        raise ConfigError(f"--axis {text!r} has no '='; write key=v1,v2")
    try:
        values = yaml.safe_load(f"[{listed}]")
    except yaml.YAMLError as error:
        raise ConfigError(f"--axis {key}: {listed!r} is no list of YAML values: {error}") from error
    return axis_of(key, values)


def axis_of(key: str, values: Iterable[object]) -> Axis:
    """An axis of some values.

    Raises:
        ConfigError: an unknown key, no values, or one twice.
    """
    if key not in FEATURES:
        try:
            apply_overrides({}, [f"{key}=null"])
        except ConfigError as error:
            raise ConfigError(
                f"--axis {key}: {error}; or one of the features {', '.join(FEATURES)}"
            ) from error
    found = tuple(values)
    if not found:
        raise ConfigError(f"--axis {key}= has no values; write {key}=v1,v2")
    texts = [json.dumps(value, default=str) for value in found]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if twice is not None:
        raise ConfigError(f"--axis {key}: the value {twice} is given twice; leave out one")
    return Axis(key, found)


def cell_name(values: Mapping[str, object]) -> str:
    """The name of a cell, which is that of its folder."""
    parts = []
    for name, value in values.items():
        text = _NOT_IN_NAMES.sub("-", value_text(value)).strip("-")
        parts.append(f"{FEATURES[name]}{text}" if name in FEATURES else f"{name}={text}")
    name = "_".join(parts)
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode("utf-8")).hexdigest()[:8]
    return f"{name[: LONGEST_NAME - 9]}-{digest}"


def value_text(value: object) -> str:
    """A value as YAML would have it in one line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "+".join(map(value_text, value)) if isinstance(value, list) else str(value)


def read_matrix(name: str) -> MatrixFile:
    """A sweep by its name in `profiles/sweeps/`, or from a YAML file given as a path.

    Raises:
        ConfigError: there is none, or it holds what a sweep does not have.
    """
    content = read_yaml(_find_matrix(name))
    unknown = [str(key) for key in content if key not in _MATRIX_KEYS]
    if unknown:
        raise ConfigError(
            f"{name}: unknown key {unknown[0]!r}; a sweep has {', '.join(_MATRIX_KEYS)}"
        )
    axes, changes = content.get("axes") or {}, content.get("set") or {}
    for key, part in (("axes", axes), ("set", changes)):
        if not isinstance(part, dict):
            raise ConfigError(f"{name}: {key} is {part!r}, and must be a mapping")
    for key, values in axes.items():
        if not isinstance(values, list):
            raise ConfigError(f"{name}: axes.{key} is {values!r}, and must be a list of values")
    for key, kind in (("max_steps", int), ("time_limit", (int, float))):
        value = content.get(key)
        if value is not None and (not isinstance(value, kind) or value <= 0):
            raise ConfigError(f"{name}: {key} is {value!r}, and must be a number above 0")
    profile, steps = content.get("profile"), content.get("steps")
    return MatrixFile(
        profile=None if profile is None else str(profile),
        steps=None if steps is None else parse_steps(f"{name}: steps", steps),
        max_steps=content.get("max_steps"),
        time_limit=content.get("time_limit"),
        assignments=tuple(as_assignments(changes)),
        axes=tuple(axis_of(str(key), values) for key, values in axes.items()),
    )


def matrix_names() -> list[str]:
    """Names of all sweeps in `profiles/sweeps/`."""
    return sorted({file.stem for folder in _matrix_folders() for file in folder.glob("*.yaml")})


def parse_steps(label: str, steps: object) -> tuple[int, ...]:
    """The steps of a sweep, which have none left out between them.

    Raises:
        ConfigError: something else.
    """
    numbers = step_numbers(label, steps)
    if numbers == [1, 3]:
        raise ConfigError(f"{label} {steps}: step 2 lies between them; give 1,2,3 or 3")
    return tuple(numbers)


def _matrix_folders() -> list[Path]:
    return [folder / "sweeps" for folder in profile_folders()]


def _find_matrix(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if Path(name).is_file():
            return Path(name)
        raise ConfigError(f"--matrix {name}: this file does not exist")
    for folder in _matrix_folders():
        if (folder / f"{name}.yaml").is_file():
            return folder / f"{name}.yaml"
    raise ConfigError(f"--matrix {name}: known are {', '.join(matrix_names())}, or give a file")


def _check_axes(axes: Sequence[Axis], steps: Sequence[int], config: RunConfig) -> None:
    """No two axes may set the same option.

    Raises:
        ConfigError: two do.
    """
    set_by: dict[str, str] = {}
    for axis in axes:
        for key in options_of(axis.name, axis.values[0], steps, config):
            if key in set_by:
                raise ConfigError(
                    f"--axis {axis.name} and --axis {set_by[key]} both set {key}; leave out one"
                )
            set_by[key] = axis.name


def _free_name(name: str, taken: set[str]) -> str:
    free, number = name, 1
    while free in taken:
        number += 1
        free = f"{name}-{number}"
    taken.add(free)
    return free


def needed_steps(config: RunConfig, steps: Sequence[int]) -> tuple[int, ...]:
    """The steps before `steps` whose models these start from, and which are not given."""
    needed: set[int] = set()
    if 3 in steps:
        needed = {step.number for step in config.steps} - {3}
    elif 2 in steps and (not config.has_step("reward") or config.models.reward == "sft"):
        needed = {1}
    return tuple(
        step for step in sorted(needed - set(steps)) if get_value(config, FINISHED[step][1]) is None
    )


def _preparations(
    values: Values, cells: Sequence[Cell], steps: Sequence[int]
) -> tuple[dict[str, Preparation], dict[str, str]]:
    """The preparations by name, and from a cell to its own."""
    preparations: dict[str, Preparation] = {}
    preparation_of: dict[str, str] = {}
    names: dict[str, str] = {}
    taken: set[str] = set()
    for cell in cells:
        needed = needed_steps(cell.config, steps)
        if not needed:
            continue
        own = {
            key: value
            for key, value in cell.assignments.items()
            if key.split(".")[0] in PREPARED_SECTIONS
        }
        key = json.dumps(own, default=str)
        if key not in names:
            name = _free_name("preparation" + (f"_{cell_name(own)}" if own else ""), taken)
            names[key] = name
            config = resolve(apply_overrides(values, as_assignments(own)), "--axis")
            preparations[name] = Preparation(name, config, needed)
        preparation_of[cell.name] = names[key]
    return preparations, preparation_of
