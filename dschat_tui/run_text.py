"""The results of a run as text, the same for commands and the dashboard."""

from __future__ import annotations

from dschat_tui.logs.quantities import NOT_MEASURED
from dschat_tui.runs import gates
from dschat_tui.runs.control import Described
from dschat_tui.runs.results import was_evaluated
from dschat_tui.runs.state import FinalMetrics, RunState, steps_of
from dschat_tui.text import aligned, duration, figure, plain
from engine.config.steps import BY_NAME, STEPS


def result_line(step: str, metrics: FinalMetrics) -> str:
    """The final numbers of a step as one line of text."""
    if step == "sft":
        text = _arrow("perplexity", metrics, "ppl_before", "ppl_after")
        return text or (f"perplexity {NOT_MEASURED}" if was_evaluated(metrics) else "")
    if BY_NAME[step].phase == "reward":
        accuracy, margin = metrics.get("accuracy"), metrics.get("margin")
        if accuracy is None:
            return f"accuracy {NOT_MEASURED}" if was_evaluated(metrics) else ""
        pairs = f" on {metrics['pairs']} pairs" if "pairs" in metrics else ""
        return f"accuracy {figure(accuracy)}{pairs}, margin {figure(margin)}"
    parts = [
        _arrow("reward", metrics, "reward_first", "reward_last"),
        _arrow("KL", metrics, "kl_first", "kl_last"),
    ]
    return ", ".join(part for part in parts if part)


def summary(state: RunState) -> str:
    """The result of each step of a run, and the gates that it missed, from its run.json."""
    rows = []
    for step, record in steps_of(state):
        seconds = (record["ended"] or 0) - (record["started"] or 0)
        rows.append(
            [
                f"{step.number} {step.title}",
                record["state"],
                duration(seconds) if record["ended"] else "",
                result_line(step.name, record["metrics"]),
            ]
        )
    missed = [f"gate: {plain(gates.told_whole(record))}" for record in gates.known(state)]
    return "\n".join([aligned(["step", "state", "time", "result"], rows), *missed])


def describe_run(described: Described) -> str:
    """One run: its steps, checkpoints, cause of failure, changes, and what to do next."""
    state, path = described["state"], plain(described["path"])
    lines = [f"{path}: {described['standing']}"]
    if described["problem"]:
        return "\n".join([*lines, plain(described["problem"])])
    lines += [summary(state)]
    for step in STEPS:
        found = described["checkpoints"].get(step.name)
        if found:
            steps = ", ".join(map(str, found))
            lines.append(f"checkpoints of step {step.number} after: {steps}")
        cause = state["steps"][step.name]["cause"] if step.name in state["steps"] else None
        if cause:
            lines += [f"cause: {cause['id']}", f"  {plain(cause['line'])}", f"  {cause['advice']}"]
    lines += [
        f"changed on resuming: {plain(str(c['key']))}: {c['before']} -> {c['after']}"
        for c in state["changes"]
    ]
    if described["standing"] == "paused":
        lines.append(f'continue anyway: dschat runs resume {path} --accept "REASON"')
    elif described["standing"] in ("failed", "stopped", "lost"):
        lines.append(f"resume it: dschat run --resume {path}")
    elif described["standing"] == "running":
        lines.append(f"watch it: dschat runs attach {path}")
    return "\n".join(lines)


def _arrow(title: str, metrics: FinalMetrics, first: str, last: str) -> str:
    if first not in metrics:
        return ""
    return f"{title} {figure(metrics[first])} -> {figure(metrics[last])}"
