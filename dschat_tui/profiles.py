"""Profiles with their plans: examined, and compared."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from dschat_tui.runs import memory_plan
from dschat_tui.runs.memory_plan import PlanError, Report
from dschat_tui.runs.models import actor_of, reward_of
from dschat_tui.text import gib, plain
from engine.config.loading import (
    ConfigError,
    find_profile,
    load_profile,
    profile_files,
    profile_folders,
    profile_names,
    user_profiles,
)
from engine.config.rules import check
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME

GROUPS = ("yours", "to begin with", "of DeepSpeed-Chat", "of today")
_PLAN_SENTENCE = re.compile(r"Plan, GiB of an accelerator: .*?[^.\d]?\.(?=\s|$)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Profile:
    """A profile, its plan, and what makes it unusable.

    Attributes:
        name: as it is given to `--profile`.
        file: its YAML file.
        comment: the text on top of it.
        config: None where it cannot be resolved.
        report: None where it cannot be planned; `note` says why.
        problems: what makes it unusable.
        note: anything else worth knowing.
    """

    name: str
    file: Path
    comment: str
    config: RunConfig | None
    report: Report | None
    problems: tuple[str, ...]
    note: str = ""

    @property
    def group(self) -> str:
        """Which of `GROUPS` it is one of."""
        return dict(zip(profile_folders(), GROUPS, strict=True)).get(self.file.parent, "yours")

    @property
    def shadowed(self) -> Path | None:
        """The profile of the same name that it replaces."""
        others = [path for path in profile_files(self.name) if path != self.file]
        return others[0] if self.file.parent == user_profiles() and others else None

    @property
    def models(self) -> str:
        """The names of the actor and of the reward model, without their owners."""
        if self.config is None:
            return ""
        models = self.config.models
        names = [actor_of(models).name]
        if self.config.alignment == "ppo" and self.config.needs_reward_model:
            reward = reward_of(models)
            names.append("SFT model" if reward is None else reward.name)
        return " + ".join(name.rsplit("/", 1)[-1].removeprefix("embedded:") for name in names)

    @property
    def size(self) -> str:
        """Parameters of the actor and of the reward model; empty where they are not known."""
        if self.config is None or self.report is None:
            return ""
        actor, reward = memory_plan.shapes_of(self.config, offline=True)
        has_reward = self.config.alignment == "ppo" and self.config.needs_reward_model
        shapes = [actor, reward or actor] if has_reward else [actor]
        return " + ".join(_count(shape.parameters) for shape in shapes)

    @property
    def devices(self) -> str:
        """The accelerators that it uses."""
        if self.config is None:
            return ""
        launch = self.config.launch
        text = f"{launch.num_accelerators} device{'s' if launch.num_accelerators > 1 else ''}"
        if launch.memory_gib is not None:
            text = f"{launch.num_accelerators} x {launch.memory_gib:g} GB"
        if launch.deployment == "multi_node":
            text = f"{launch.num_nodes or '?'} nodes x {text}"
        return text

    @property
    def memory(self) -> str:
        """GiB of an accelerator at the highest peak of the steps, by plan."""
        return "" if self.report is None else f"{gib(self.report.plan.device_bytes)}"

    @property
    def first_sentence(self) -> str:
        """The first sentence of the comment."""
        text, stop, _ = self.comment.partition(". ")
        return text + stop.strip()


def examine(name: str) -> Profile:
    """Load, resolve, check and plan a profile; needs neither torch nor a network.

    Raises:
        ConfigError: no such profile.
    """
    file = find_profile(name)
    comment = top_comment(file)
    try:
        config = load_profile(name)
    except ConfigError as error:
        return Profile(name, file, comment, None, None, (str(error),))
    problems = [str(violation) for violation in check(config)]
    try:
        report = memory_plan.on_gpus(config)
    except PlanError as error:
        return Profile(name, file, comment, config, None, tuple(problems), f"not planned: {error}")
    if not report.fits:
        needed, there = gib(report.plan.device_bytes), gib(report.memory_bytes)
        problems.append(
            f"does not fit: {needed} GiB of {there} GiB per device. What would: "
            f"dschat plan --profile {name} --memory-gib {there}"
        )
    profile = Profile(name, file, comment, config, report, tuple(problems))
    note = (
        "" if states_its_plan(profile) else f"its comment is out of date: {plan_sentence(report)}"
    )
    return replace(profile, note=note)


def plan_sentence(report: Report) -> str:
    """A plan in one sentence, as the comment on top of a profile states it."""
    steps = ", ".join(
        f"step {BY_NAME[step.step].number} {gib(step.device_bytes)}" for step in report.plan.steps
    )
    host = report.plan.node_host_bytes
    on_host = f"; {gib(host)} GiB on the host of a node" if host else ""
    return f"Plan, GiB of an accelerator: {steps}{on_host}."


def states_its_plan(profile: Profile) -> bool:
    """Whether the plan that a comment states, if it does, is the plan within 5 %."""
    stated = _PLAN_SENTENCE.search(profile.comment)
    if stated is None or profile.report is None:
        return True
    now = _PLAN_SENTENCE.search(plan_sentence(profile.report))
    numbers = [[float(n) for n in _NUMBER.findall(found[0])] for found in (stated, now) if found]
    same = [math.isclose(a, b, rel_tol=0.05) for a, b in zip(*numbers, strict=False)]
    return len(numbers[0]) == len(numbers[1]) and all(same)


def top_comment(file: Path) -> str:
    """The comment on top of a profile, as one paragraph."""
    return " ".join(comment_lines(file))


def comment_lines(file: Path) -> list[str]:
    lines = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("#"):
            break
        lines.append(plain(line.removeprefix("#").strip()))
    return lines


def every() -> list[Profile]:
    """All profiles, in the order of their groups."""
    found = [examine(name) for name in profile_names()]
    return sorted(found, key=lambda profile: (GROUPS.index(profile.group), _natural(profile.name)))


def _natural(name: str) -> list[tuple[int, float, str]]:
    """A key by which 1.7b comes before 13b."""
    parts = []
    for part in name.split("-"):
        number = part.rstrip("bgm")
        is_number = number.replace(".", "", 1).isdigit()
        million = 0.001 if part.endswith("m") else 1.0
        parts.append((0, float(number) * million, "") if is_number else (1, 0.0, part))
    return parts


def _count(parameters: int) -> str:
    millions = round(parameters / 1e6, 1 if parameters < 1e7 else None)
    return f"{parameters / 1e9:.3g}B" if millions >= 1000 else f"{millions:g}M"
