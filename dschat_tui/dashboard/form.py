"""What the Start screen edits: a profile, the changes to it, and the rules these break."""

from __future__ import annotations

import json
import re
import sys
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from annotated_types import Ge, Le

from engine.config.loading import (
    ConfigError,
    Option,
    apply_overrides,
    find_profile,
    get_value,
    options,
    profile_names,
    read_profile,
    resolve,
    set_value,
    user_profiles,
)
from engine.config.rules import ModelFacts, Violation, check
from engine.config.schema import RunConfig, merged

ALL = "all"
INSPECTED_ROWS = 200
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def options_of(group: str) -> list[Option]:
    """The options of a tab of the form in the order of the schema; `all` has every one."""
    return [option for option in options() if group in (ALL, option.group)]


def find_options(text: str) -> list[Option]:
    """The options whose key or title holds a text, then those whose help does."""
    text = text.lower()
    named = [o for o in options() if text in f"{o.key} {o.title}".lower()]
    return named + [o for o in options() if text in o.help.lower() and o not in named]


def choices(key: str) -> tuple[Any, ...]:
    """All values of an option that has only a few, else nothing."""
    section: Any = RunConfig
    *groups, leaf = key.split(".")
    for group in groups:
        section = section.model_fields[group].annotation
    field = section.model_fields[leaf]
    kinds = typing.get_args(field.annotation)
    if len(kinds) == 2 and kinds[1] is type(None):
        return (None, *few) if (few := _few_values(kinds[0])) else ()
    if few := _few_values(field.annotation):
        return few
    low = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), None)
    high = next((bound.le for bound in field.metadata if isinstance(bound, Le)), None)
    if field.annotation is int and low is not None and high is not None:
        return tuple(range(int(low), int(high) + 1))  # type: ignore[call-overload]
    return ()


def _few_values(kind: Any) -> tuple[Any, ...]:
    """The values of a boolean or of a choice of words, else nothing."""
    if kind is bool:
        return (False, True)
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def value_text(value: Any) -> str:
    """A value as `--set KEY=` takes it; nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return _list_text(list(value))
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, str) and yaml.safe_load(value or "null") != value:
        return json.dumps(value)
    return str(value)


def _list_text(values: list[Any]) -> str:
    """Words separated by commas, where all are plain words; else JSON, which is YAML."""
    dumped = [value.model_dump() if hasattr(value, "model_dump") else value for value in values]
    plain = [d["path"] if isinstance(d, dict) and not _has_more(d) else d for d in dumped]
    texts = [str(value) for value in plain]
    if values and not any(isinstance(value, dict) for value in plain):
        joined = ",".join(texts)
        if all(re.fullmatch(r"[\w./:+-]+", text) for text in texts) and (
            yaml.safe_load(joined) == joined
        ):
            return joined
    return json.dumps(plain)


def _has_more(source: Mapping[str, Any]) -> bool:
    return bool(source.get("subset") or source.get("columns"))


def with_value(config: RunConfig, key: str, value: Any) -> RunConfig:
    """A copy of a configuration with another value of one option."""
    values = config.model_dump()
    set_value(values, key, value)
    return RunConfig.model_validate(values)


def differences(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The nested values that differ from others."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        other = others.get(key)
        if isinstance(value, dict) and isinstance(other, dict):
            if nested := differences(value, other):
                found[key] = nested
        elif value != other:
            found[key] = value
    return found


class Form:
    """A profile and `--set` assignments on top of it."""

    def __init__(
        self, profile: str, base: RunConfig, assignments: Mapping[str, str] | None = None
    ) -> None:
        self.profile = profile
        self.base = base
        self.config = base
        self.facts = ModelFacts()
        self.assignments: dict[str, str] = {}
        self.violations: list[Violation] = []
        self._forbidden: dict[tuple[str, Any], Violation | None] = {}
        self.assign(assignments or {})

    def assign(self, changes: Mapping[str, str]) -> None:
        """Set options by their texts; a value that equals that of the profile is no change.

        Raises:
            ConfigError: a value that its option refuses; the form stays as it was.
        """
        # the newest last, as `dschat run` takes them
        before = {key: text for key, text in self.assignments.items() if key not in changes}
        wanted = {**before, **changes}
        config = self._with(wanted)
        kept = {
            key: text
            for key, text in wanted.items()
            if get_value(config, key) != get_value(self.base, key)
        }
        self.config, self.assignments = self._with(kept), kept
        self._check()

    def _with(self, assignments: Mapping[str, str]) -> RunConfig:
        texts = [f"{key}={text}" for key, text in assignments.items()]
        return resolve(apply_overrides(self.base.model_dump(mode="json"), texts), "the form")

    def reset(self, key: str) -> None:
        """Give an option the value of the profile again."""
        self.assign({key: value_text(get_value(self.base, key))})

    def set_facts(self, facts: ModelFacts) -> None:
        """Check the rules again, with facts about the models."""
        self.facts = facts
        self._check()

    def _check(self) -> None:
        self.violations = check(self.config, self.facts)
        self._forbidden.clear()

    def forbidden(self, key: str, value: Any) -> Violation | None:
        """The rule that another value of an option would break besides those broken already."""
        if (key, value) not in self._forbidden:
            broken = {violation.id for violation in self.violations}
            after = check(with_value(self.config, key, value), self.facts)
            new = (violation for violation in after if violation.id not in broken)
            self._forbidden[key, value] = next(new, None)
        return self._forbidden[key, value]

    def obstacles(self, key: str) -> list[tuple[Any, Violation]]:
        """The other values of an option that rules forbid now, each with its rule."""
        now = get_value(self.config, key)
        others = [value for value in choices(key) if value != now]
        found = [(value, self.forbidden(key, value)) for value in others]
        return [(value, violation) for value, violation in found if violation is not None]

    def is_greyed(self, key: str) -> bool:
        """Whether rules forbid every other value of an option."""
        return 0 < len(choices(key)) == len(self.obstacles(key)) + 1

    def next_value(self, key: str, by: int) -> Any:
        """The next value of an option that no rule forbids, else its current value."""
        all_values, now = choices(key), get_value(self.config, key)
        at = all_values.index(now)
        for distance in range(1, len(all_values)):
            value = all_values[(at + by * distance) % len(all_values)]
            if self.forbidden(key, value) is None:
                return value
        return now

    def suggested_fix(self, key: str) -> dict[str, str]:
        """Assignments that make the first forbidden value of an option possible, if any do."""
        for value, violation in self.obstacles(key):
            # a fix that takes the value back does not make it possible
            if violation.fix and key not in violation.fix:
                return {key: value_text(value), **fix_texts(violation.fix)}
        return {}

    def command(self, output: Path) -> list[str]:
        """The command that runs this form with a folder as output."""
        head = ["dschat", "run", "--profile", self.profile, "--output", str(output)]
        return [*head, *self._settings()]

    def data_commands(self) -> list[list[str]]:
        """The commands that show what the data sources hold and what the steps see of them."""
        inspect = [sys.executable, "-m", "dschat_tui.cli.main", "data", "inspect"]
        shown = ["--profile", self.profile, "--rows", str(INSPECTED_ROWS), *self._settings()]
        return [[*inspect, source.path, *shown] for source in self.config.data.sources]

    def _settings(self) -> list[str]:
        return [
            part for key, text in self.assignments.items() for part in ("--set", f"{key}={text}")
        ]

    def save(self, name: str) -> Path:
        """Write a profile of the user's own that extends this one; its path.

        Raises:
            ConfigError: the name is not one word, or is taken.
            OSError: it cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot be a name: use letters, digits, dots and dashes, no spaces"
            )
        if name in profile_names():
            raise ConfigError(f"there is a profile {name} already: {find_profile(name)}")
        path = user_profiles() / f"{name}.yaml"
        head = (
            f"# Made in the dashboard from the profile {self.profile}.\n"
            f"# Run: dschat run --profile {name}\n\n"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        content = yaml.safe_dump(self._to_save(), sort_keys=False, allow_unicode=True)
        path.write_text(head + content, encoding="utf-8")
        return path

    def _to_save(self) -> dict[str, Any]:
        """The profile that is extended, and the differences from it."""
        values = self.config.model_dump(mode="json")
        changes = differences(values, self.base.model_dump(mode="json"))
        below = merged(read_profile(self.profile), changes)
        if resolve(below, self.profile) == self.config:
            return {"extends": self.profile, **changes}
        # what a profile has only in one step cannot be taken away by one that extends it
        return differences(values, RunConfig().model_dump(mode="json"))


def fix_texts(fix: Mapping[str, Any]) -> dict[str, str]:
    """The assignments of a rule's fix, or of a plan's change, as texts."""
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in fix.items()
    }
