"""From a profile and `key=value` changes to one checked configuration, and back to YAML."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import platformdirs
import yaml
from pydantic import BaseModel, ValidationError

from engine.config.schema import ALL_STEPS, Group, RunConfig, merged
from engine.config.steps import StepName


class ConfigError(ValueError):
    """A configuration that cannot be used; the message names the key, the value and the fix."""


@dataclass(frozen=True)
class Option:
    """One leaf of the configuration, as help texts and forms show it.

    `group` and `fixed_by` are its own or those of its section: see `engine.config.schema.option`.
    """

    key: str
    title: str
    help: str
    unit: str
    default: Any
    annotation: Any
    group: Group | None
    fixed_by: tuple[StepName, ...] | None


def _is_literal(annotation: Any) -> bool:
    return typing.get_origin(annotation) is typing.Literal


def _section_type(annotation: Any) -> type[BaseModel] | None:
    is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_model else None


@cache
def options() -> tuple[Option, ...]:
    """All leaves of the configuration in the order of the schema, with dotted keys."""
    return tuple(_options_in(RunConfig, "", None, None))


def _options_in(
    model: type[BaseModel],
    prefix: str,
    group: Group | None,
    fixed_by: tuple[StepName, ...] | None,
) -> Iterator[Option]:
    """The leaves of a section; `group` and `fixed_by` hold for those without their own."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        extra: Any = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
        own_group = extra.get("group") or group
        own_fixed_by = extra.get("fixed_by")
        if own_fixed_by is None:
            own_fixed_by = fixed_by
        nested = _section_type(field.annotation)
        if nested is not None:
            yield from _options_in(nested, f"{key}.", own_group, own_fixed_by)
            continue
        yield Option(
            key=key,
            title=field.title or name,
            help=field.description or "",
            unit=str(extra.get("unit", "")),
            default=field.get_default(call_default_factory=True),
            annotation=field.annotation,
            group=own_group,
            fixed_by=own_fixed_by,
        )


def user_profiles() -> Path:
    """The folder of the user's own profiles."""
    return platformdirs.user_config_path("dschat") / "profiles"


def profile_folders() -> list[Path]:
    """The folders searched for profiles: the user's own first, then those of dschat."""
    bundled = Path(str(resources.files("profiles")))
    return [user_profiles(), bundled, bundled / "original", bundled / "today"]


def profile_names() -> list[str]:
    """Names of all profiles that can be given to `--profile`.

    A name that begins with `_` is a part for others to extend, and not among them.
    """
    found = {path.stem for folder in profile_folders() for path in folder.glob("*.yaml")}
    return sorted(name for name in found if not name.startswith("_"))


def profile_files(name: str) -> list[Path]:
    """All files of a profile's name, the one that is used first; a user's own shadows ours."""
    paths = [folder / f"{name}.yaml" for folder in profile_folders()]
    return [path for path in paths if path.is_file()]


def find_profile(name: str) -> Path:
    """Path of a profile by name, or of a YAML file given as a path.

    Raises:
        ConfigError: no such profile; the message proposes the nearest names.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if path.is_file():
            return path
        raise ConfigError(f"profile file {name!r} does not exist")
    found = profile_files(name)
    if not found:
        raise ConfigError(f"no profile {name!r}; {_nearest(name, profile_names())}")
    return found[0]


def read_profile(name: str) -> dict[str, Any]:
    """The options of a profile with those of the profiles that it extends under them.

    `extends: NAME` names the parent: another profile, or a YAML file beside the one that names it.
    A profile of the user's that extends its own name extends the one it shadows.

    Raises:
        ConfigError: no such profile or parent, a circle, or a file that cannot be read.
    """
    return _read_chain(find_profile(name), [])


def _read_chain(path: Path, children: list[Path]) -> dict[str, Any]:
    """`path` over its ancestors; `children` are the files that led here."""
    if path in children:
        chain = " -> ".join(file.stem for file in [*children[children.index(path) :], path])
        raise ConfigError(f"{path}: extends goes in a circle: {chain}. Take one `extends` out")
    values = _with_files_beside(path, read_yaml(path))
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise ConfigError(f"{path}: extends = {parent!r}: give the name of one profile")
    return merged(_read_chain(_parent_file(path, parent), [*children, path]), values)


def _with_files_beside(profile: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The options, with full paths of reward function files that are next to the profile."""
    rewards = values.get("rewards")
    functions = rewards.get("functions") if isinstance(rewards, dict) else None
    for entry in functions if isinstance(functions, list) else []:
        name = entry.get("path") if isinstance(entry, dict) else None
        if isinstance(name, str) and (profile.parent / name).is_file():
            entry["path"] = str((profile.parent / name).resolve())
    return values


def _parent_file(path: Path, parent: str) -> Path:
    if parent.endswith((".yaml", ".yml")):
        beside = path.parent / parent
        if beside.is_file():
            return beside
        raise ConfigError(f"{path} extends {parent!r}, and there is no such file")
    shadowed = parent == path.stem
    found = [file for file in profile_files(parent) if not (shadowed and file == path)]
    if not found and shadowed:
        raise ConfigError(f"{path}: extends goes in a circle: {parent} -> {parent}")
    if not found:
        nearest = _nearest(parent, profile_names())
        raise ConfigError(f"{path} extends {parent!r}, and no profile has that name; {nearest}")
    return found[0]


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: unreadable, not YAML, or not a mapping.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not a mapping of options")
    return content


def apply_overrides(values: dict[str, Any], assignments: list[str]) -> dict[str, Any]:
    """A copy of nested `values` with `key.path=value` assignments put in; values are YAML.

    Raises:
        ConfigError: an assignment without `=`, or with an unknown key.
    """
    changed = _copy(values)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        key = key.strip()
        if not equals:
            raise ConfigError(f"--set {assignment!r} has no '='; write key=value")
        _check_known(key)
        try:
            value = yaml.safe_load(text) if text.strip() else None
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key}: {text!r} is not a YAML value: {error}") from error
        if isinstance(value, str):
            value = _scientific(value)
        set_value(changed, key, value)
    return changed


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Put a value into nested `values` by its dotted key, for all steps: no override is kept."""
    *parents, leaf = key.split(".")
    target = values
    for parent in parents:
        nested = target.get(parent)
        if not isinstance(nested, dict):
            nested = target[parent] = {}
        target = nested
    target[leaf] = value
    for step in ALL_STEPS:
        options_of_step = values.get(step)
        if isinstance(options_of_step, dict):
            drop_override(options_of_step.get("overrides"), key)


def drop_override(overrides: Any, key: str) -> None:
    """Take a dotted key out of a step's overrides, where it is in them."""
    *parents, leaf = key.split(".")
    target = overrides
    for parent in parents:
        target = target.get(parent) if isinstance(target, dict) else None
    if isinstance(target, dict):
        target.pop(leaf, None)


def resolve(values: dict[str, Any], source: str) -> RunConfig:
    """Validate nested values into a configuration; `source` names their origin in errors.

    Raises:
        ConfigError: unknown or ill-typed keys, all of them in one message.
    """
    values = _tidy_numbers(values)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise ConfigError(f"{source}: " + "\n".join(lines)) from error


def load_profile(name: str, assignments: list[str] | None = None) -> RunConfig:
    """The configuration of a profile with `--set` assignments applied.

    Raises:
        ConfigError: no such profile, or a key or value that is refused.
    """
    values = apply_overrides(read_profile(name), assignments or [])
    return resolve(values, f"profile {name}")


def load_config(path: Path) -> RunConfig:
    """The configuration in a run's `run.yaml`.

    Raises:
        ConfigError: unreadable, or a key or value that is refused.
    """
    return resolve(read_yaml(path), str(path))


def to_yaml(config: RunConfig) -> str:
    """The whole resolved configuration as YAML, in the order of the schema."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def get_value(config: RunConfig, key: str) -> Any:
    """The value at a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(nested) for key, nested in value.items()}
    return value


def _scientific(text: str) -> Any:
    """YAML 1.1 reads 1e-5 as text; numbers written so are meant as numbers."""
    try:
        return float(text) if text[:1].isdigit() and "e" in text.lower() else text
    except ValueError:
        return text


def _tidy_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tidy_numbers(nested) for key, nested in value.items()}
    return _scientific(value) if isinstance(value, str) else value


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "known: " + ", ".join(known[:20])


def _group_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        nested = _section_type(field.annotation)
        if nested is not None:
            found += [f"{prefix}{name}", *_group_keys(nested, f"{prefix}{name}.")]
    return found


def _check_known(key: str) -> None:
    known = [option.key for option in options()]
    if key in known:
        return
    if key in _group_keys():
        inside = [option for option in known if option.startswith(f"{key}.")]
        raise ConfigError(f"--set {key}: a group of options; set one of " + ", ".join(inside))
    raise ConfigError(f"unknown option {key!r}; {_nearest_key(key, known)}")


def _nearest_key(key: str, known: list[str]) -> str:
    """The nearest dotted keys: by the whole key, else by the last part anywhere."""
    close = difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    leaf = key.rsplit(".", 1)[-1]
    close += [name for name in known if name.rsplit(".", 1)[-1] == leaf and name not in close]
    if close:
        return "did you mean " + " or ".join(close[:4]) + "?"
    return "`dschat options` lists all"


def _explain(problem: Any) -> str:
    if not problem["loc"]:
        return str(problem["msg"]).removeprefix("Value error, ")
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown option {key!r}; {_nearest_key(key, [option.key for option in options()])}"
    message = problem["msg"].replace("Input should be", "must be")
    return f"{key} = {problem['input']!r}: {message}"


def describe_type(annotation: Any) -> str:
    """A field's type in words for help and documentation: `number`, `a|b`, `yes/no` ..."""
    if _is_literal(annotation):
        return "|".join(str(choice) for choice in typing.get_args(annotation))
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return describe_type(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        return " or ".join(describe_type(a) for a in inner) + ", or empty"
    if origin in (list, tuple):
        return "list"
    if origin is dict:
        return "mapping"
    names = {bool: "true/false", int: "whole number", float: "number", str: "text"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))
