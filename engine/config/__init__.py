"""Typed configuration, rules on combinations, profiles. Brings in no torch."""

from engine.config.loading import (
    ConfigError,
    Option,
    apply_overrides,
    describe_type,
    find_profile,
    get_value,
    load_config,
    load_profile,
    options,
    profile_folders,
    profile_names,
    read_yaml,
    resolve,
    to_yaml,
)
from engine.config.rules import RULES, ModelFacts, Rule, Violation, check
from engine.config.schema import DataSource, RunConfig

__all__ = [
    "RULES",
    "ConfigError",
    "DataSource",
    "ModelFacts",
    "Option",
    "Rule",
    "RunConfig",
    "Violation",
    "apply_overrides",
    "check",
    "describe_type",
    "find_profile",
    "get_value",
    "load_config",
    "load_profile",
    "options",
    "profile_folders",
    "profile_names",
    "read_yaml",
    "resolve",
    "to_yaml",
]
