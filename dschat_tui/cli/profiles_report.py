"""What `dschat profiles` prints: tables, verdicts, differences, and the page docs/profiles.md."""

from __future__ import annotations

import json

from dschat_tui.profiles import GROUPS, Profile, comment_lines, every
from dschat_tui.runs.preflight import differences, value_json
from dschat_tui.text import aligned, gib, option_text, plain
from engine.config.loading import load_profile
from engine.config.schema import RunConfig
from engine.config.steps import BY_NAME

_INTRODUCTIONS = {
    "yours": "Profiles in the user's own configuration folder.",
    "to begin with": "They run without a GPU.",
    "of DeepSpeed-Chat": "The scripts of the original's OPT, Llama-2 and other-language sets, with "
    "their settings; its batch sizes a device are rows of an optimizer step over all devices here.",
    "of today": "Today's models on one GPU of 24 GB, on one of 80 GB and on a node of eight of 80 "
    "GB, with settings that the planner says to fit.",
}


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


def _document(profile: Profile) -> dict[str, object]:
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
    """A line per profile, whether it can be used; then its problems."""
    width = max((len(profile.name) for profile in profiles), default=0)
    lines = []
    for profile in profiles:
        text = f"{profile.memory} GiB on {profile.devices}" if profile.report else profile.note
        word = "problem" if profile.problems else "ok"
        lines.append(f"{word:<7}  {profile.name:<{width}}  {plain(text)}".rstrip())
        lines += [f"         {plain(problem)}" for problem in profile.problems]
    bad = sum(bool(profile.problems) for profile in profiles)
    lines.append(f"{len(profiles)} profiles, {bad or 'none'} with problems")
    return "\n".join(lines)


def differences_as_table(first: str, second: str) -> str:
    """Where two profiles differ, one option per line.

    Raises:
        ConfigError: one of them is not there or cannot be resolved.
    """
    rows = [
        [change.key, plain(option_text(change.before)), plain(option_text(change.after))]
        for change in differences(load_profile(first), load_profile(second))
    ]
    return aligned(["option", first, second], rows) if rows else f"{first} and {second} are alike"


def differences_as_json(first: str, second: str) -> str:
    """The same as one document: from each key to its two values."""
    changes = differences(load_profile(first), load_profile(second))
    return value_json({change.key: [change.before, change.after] for change in changes}, indent=2)


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
    lines = comment_lines(profile.file)
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
    # files beside the profile by their names, so that the page is the same on every machine
    texts = (option_text(change.after).replace(f"{profile.file.parent}/", "") for change in changed)
    return ", ".join(f"`{c.key}` {text}" for c, text in zip(changed, texts, strict=True))
