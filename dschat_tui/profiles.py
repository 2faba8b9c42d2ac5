"""Profiles as people meet them: listed with their plans, compared, checked, documented."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dschat_tui import memory_plan
from dschat_tui.cli.tables import aligned, plain
from dschat_tui.memory_plan import PlanError, Report, gib
from dschat_tui.reference import default_text
from engine.config.loading import (
    ConfigError,
    find_profile,
    get_value,
    load_profile,
    options,
    profile_files,
    profile_folders,
    profile_names,
    user_profiles,
)
from engine.config.rules import check
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME

GROUPS = ("yours", "to begin with", "of DeepSpeed-Chat", "of today")
_INTRODUCTIONS = {
    "yours": "Profiles in the user's own configuration folder.",
    "to begin with": "They run without a GPU.",
    "of DeepSpeed-Chat": "The scripts of the original's OPT, Llama-2 and other-language sets, with "
    "their settings; its batch sizes a device are rows of an optimizer step over all devices here.",
    "of today": "Today's models on one GPU of 24 GB, on one of 80 GB and on a node of eight of 80 "
    "GB, with settings that the planner says to fit.",
}
_PLAN_SENTENCE = re.compile(r"Plan, GiB of an accelerator: .*?[^.\d]?\.(?=\s|$)")
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Profile:
    """A profile, its plan, and what stands against it.

    Attributes:
        name: as it is given to `--profile`.
        file: where it stands.
        comment: the text on top of it.
        config: None where it cannot be resolved.
        report: None where it cannot be planned; `note` says why.
        problems: what makes it unusable.
        note: what is not wrong, yet worth knowing.
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
        """The profile of the same name that it is used in place of."""
        others = [path for path in profile_files(self.name) if path != self.file]
        return others[0] if self.file.parent == user_profiles() and others else None

    @property
    def models(self) -> str:
        """The names of the actor and of the reward model, without their owners."""
        if self.config is None:
            return ""
        models = self.config.models
        reward = models.trained_reward or models.reward
        names = [models.sft or models.actor]
        if self.config.alignment == "ppo":
            names.append("SFT model" if reward == "sft" else reward)
        return " + ".join(name.rsplit("/", 1)[-1].removeprefix("embedded:") for name in names)

    @property
    def size(self) -> str:
        """Parameters of the actor and of the reward model; empty where they are not known."""
        if self.config is None or self.report is None:
            return ""
        actor, reward = memory_plan.shapes_of(self.config, offline=True)
        shapes = [actor, reward or actor] if self.config.alignment == "ppo" else [actor]
        return " + ".join(_count(shape.parameters) for shape in shapes)

    @property
    def devices(self) -> str:
        """The accelerators that it takes."""
        if self.config is None:
            return ""
        launch = self.config.launch
        told = f"{launch.num_accelerators} device{'s' if launch.num_accelerators > 1 else ''}"
        if launch.memory_gib is not None:
            told = f"{launch.num_accelerators} x {launch.memory_gib:g} GB"
        if launch.deployment == "multi_node":
            told = f"{launch.num_nodes or '?'} nodes x {told}"
        return told

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
            f"does not fit: {needed} GiB of {there} GiB a device. What would: "
            f"dschat plan --profile {name} --memory-gib {there}"
        )
    profile = Profile(name, file, comment, config, report, tuple(problems))
    note = (
        "" if states_its_plan(profile) else f"its comment is out of date: {plan_sentence(report)}"
    )
    return replace(profile, note=note)


def plan_sentence(report: Report) -> str:
    """What a plan comes to, as the comment on top of a profile states it."""
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
    return " ".join(_comment_lines(file))


def _comment_lines(file: Path) -> list[str]:
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


def _natural(name: str) -> list[Any]:
    """A key by which 1.7b comes before 13b."""
    parts: list[Any] = []
    for part in name.split("-"):
        number = part.rstrip("bgm")
        is_number = number.replace(".", "", 1).isdigit()
        million = 0.001 if part.endswith("m") else 1.0
        parts.append((0, float(number) * million, "") if is_number else (1, 0.0, part))
    return parts


def as_table(profiles: list[Profile]) -> str:
    """A table for each group, and below it what is unusual about single profiles."""
    blocks = []
    for group in GROUPS:
        members = [profile for profile in profiles if profile.group == group]
        if not members:
            continue
        header = [group, "actor + reward model", "parameters", "devices", "GiB"]
        rows = [[p.name, plain(p.models), p.size, p.devices, p.memory] for p in members]
        lines = [aligned(header, rows)]
        for profile in members:
            lines += [f"{profile.name}: {plain(problem)}" for problem in profile.problems]
            if profile.note:
                lines.append(f"{profile.name}: {plain(profile.note)}")
            if profile.shadowed is not None:
                lines.append(f"{profile.name}: yours, in place of {profile.shadowed}")
        blocks.append("\n".join(lines))
    blocks.append("GiB: memory of an accelerator at the highest peak, as `dschat plan` says.")
    return "\n\n".join(blocks)


def as_json(profiles: list[Profile]) -> str:
    """One document: a list of the profiles."""
    return json.dumps([_document(profile) for profile in profiles], indent=2)


def _document(profile: Profile) -> dict[str, Any]:
    report, config = profile.report, profile.config
    return {
        "name": profile.name,
        "description": profile.first_sentence,
        "group": profile.group,
        "file": str(profile.file),
        "shadows": profile.shadowed and str(profile.shadowed),
        "actor": config and config.models.actor,
        "reward": config and config.models.reward,
        "parameters": profile.size or None,
        "deployment": config and config.launch.deployment,
        "accelerators": config and config.launch.num_accelerators * (config.launch.num_nodes or 1),
        "memory_gib": config and config.launch.memory_gib,
        "device_bytes": report and report.plan.device_bytes,
        "node_host_bytes": report and report.plan.node_host_bytes,
        "step_device_bytes": report and {s.step: s.device_bytes for s in report.plan.steps},
        "problems": list(profile.problems),
        "note": profile.note,
    }


def as_verdicts(profiles: list[Profile]) -> str:
    """A line a profile: whether it can be used; then what stands against it."""
    width = max((len(profile.name) for profile in profiles), default=0)
    lines = []
    for profile in profiles:
        told = f"{profile.memory} GiB on {profile.devices}" if profile.report else profile.note
        word = "problem" if profile.problems else "ok"
        lines.append(f"{word:<7}  {profile.name:<{width}}  {plain(told)}".rstrip())
        lines += [f"         {plain(problem)}" for problem in profile.problems]
    bad = sum(bool(profile.problems) for profile in profiles)
    lines.append(f"{len(profiles)} profiles, {bad or 'none'} with problems")
    return "\n".join(lines)


def differences(first: RunConfig, second: RunConfig) -> list[tuple[str, Any, Any]]:
    """The options in which two configurations differ: key, value of the first, of the second."""
    values = [
        (option.key, get_value(first, option.key), get_value(second, option.key))
        for option in options()
    ]
    return [(key, one, other) for key, one, other in values if one != other]


def differences_as_table(first: str, second: str) -> str:
    """Where two profiles differ, an option a line.

    Raises:
        ConfigError: one of them is not there or cannot be resolved.
    """
    rows = [
        [key, plain(default_text(one)), plain(default_text(other))]
        for key, one, other in differences(load_profile(first), load_profile(second))
    ]
    return aligned(["option", first, second], rows) if rows else f"{first} and {second} are alike"


def differences_as_json(first: str, second: str) -> str:
    """The same as one document: from each key to its two values."""
    one, other = (load_profile(name).model_dump(mode="json") for name in (first, second))
    keys = [key for key, _, _ in differences(load_profile(first), load_profile(second))]
    return json.dumps({key: [_at(one, key), _at(other, key)] for key in keys}, indent=2)


def _at(document: dict[str, Any], key: str) -> Any:
    value: Any = document
    for part in key.split("."):
        value = value[part]
    return value


def as_markdown() -> str:
    """The whole of docs/profiles.md, from the profiles that come with dschat."""
    lines = [
        "# Profiles",
        "",
        "Made by `dschat profiles list --markdown` from the YAML files of `profiles/`; not edited "
        "by hand. [writing-profiles.md](writing-profiles.md) tells how to write one.",
        "",
        "Memory is what `dschat plan` says of an accelerator at the peak of each step, in GiB.",
    ]
    found = every()
    for group in GROUPS[1:]:
        members = [profile for profile in found if profile.group == group]
        lines += ["", f"## Profiles {group}", "", _INTRODUCTIONS[group], ""]
        lines += ["| profile | actor + reward model | parameters | devices | step 1 | 2 | 3 |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
        for profile in members:
            link = f"[{profile.name}](#{profile.name.replace('.', '')})"
            cells = [link, profile.models, profile.size, profile.devices, *_step_memory(profile)]
            lines.append("| " + " | ".join(cells) + " |")
        for profile in members:
            lines += ["", f"### {profile.name}", "", *_comment_as_markdown(profile), ""]
            lines.append(f"Differs from the defaults in: {_settings(profile)}.")
    return "\n".join(lines) + "\n"


def _comment_as_markdown(profile: Profile) -> list[str]:
    """The comment on top as a paragraph, and the command of its last lines as code."""
    lines = _comment_lines(profile.file)
    commands = [line.partition(": ")[2] for line in lines if line.startswith("Run: ")]
    prose = " ".join(line for line in lines if not line.startswith("Run: "))
    return [prose, "", "```", *commands, "```"]


def _step_memory(profile: Profile) -> list[str]:
    held = {s.step: s.device_bytes for s in profile.report.plan.steps} if profile.report else {}
    by_number = {BY_NAME[step].number: size for step, size in held.items()}
    return [gib(by_number.get(number, 0)) for number in (1, 2, 3)]


def _settings(profile: Profile) -> str:
    assert profile.config is not None
    changed = differences(RunConfig(), profile.config)
    return ", ".join(f"`{key}` {default_text(value)}" for key, _, value in changed)


def _count(parameters: int) -> str:
    millions = round(parameters / 1e6, 1 if parameters < 1e7 else None)
    return f"{parameters / 1e9:.3g}B" if millions >= 1000 else f"{millions:g}M"
