"""The nightly matrix of the original: what its cells are, and one cell of step 3 run and judged."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from small_run import configuration

from engine.config.rules import check
from engine.distributed import rank
from engine.models.embedded import build
from engine.models.folders import is_complete_model
from engine.models.load import load_causal_lm
from engine.models.reward import RewardModel
from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext

FAMILIES = ("opt", "llama")
GENERATION_STEPS = 5


@dataclass(frozen=True)
class Cell:
    """One combination of features, the same for actor and critic."""

    family: str
    zero_stage: int
    hybrid: bool
    offload: bool
    lora: bool

    @property
    def name(self) -> str:
        """Short, for the name of a test and of a folder."""
        toggles = {"hybrid": self.hybrid, "offload": self.offload, "lora": self.lora}
        on = [name for name, value in toggles.items() if value]
        return "-".join([self.family, f"zero{self.zero_stage}", *on])

    def assignments(self) -> list[str]:
        """The options of the cell, as `--set` takes them."""
        changes = [f"hybrid_engine.enabled={self.hybrid}".lower()]
        for role in ("actor", "critic"):
            changes.append(f"{role}.zero_stage={self.zero_stage}")
            changes.append(f"{role}.offload={self.offload}".lower())
            changes.append(f"{role}.lora.rank={4 if self.lora else 0}")
        return changes


def cells() -> Iterator[Cell]:
    """All thirty-two: sixteen combinations on two families."""
    on_off = (False, True)
    for values in itertools.product(FAMILIES, (2, 3), on_off, on_off, on_off):
        yield Cell(*values)


def small_model(
    family: str, folder: Path, hidden: int = 32, inner: int = 64, layers: int = 2
) -> str:
    """A model of an embedded family with its tokenizer, smaller than the embedded one."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    embedded = build(f"tiny-{family}")
    config = AutoConfig.from_pretrained(embedded)
    config.hidden_size, config.num_hidden_layers = hidden, layers
    sizes = {"ffn_dim": inner, "intermediate_size": inner, "word_embed_proj_dim": hidden}
    for name, size in sizes.items():
        if hasattr(config, name):
            setattr(config, name, size)
    if hasattr(config, "head_dim"):
        config.head_dim = config.hidden_size // config.num_attention_heads
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(embedded).save_pretrained(folder)
    return str(folder)


def options(model: str, *changes: str):
    """The configuration of a step 3 of a few generation steps from `model` alone."""
    return configuration(
        f"models.actor={model}",
        f"models.sft={model}",
        f"models.trained_reward={model}",
        f"ppo.max_steps={GENERATION_STEPS}",
        "ppo.rollout_batch_size=4",
        "ppo.batch_size=4",
        "ppo.inner_epochs=1",
        "ppo.max_answer_length=6",
        "logging.optimizer_interval=1000",
        *changes,
    )


def step_3(model: str, run: Path, *changes: str) -> PPOTrainer:
    """The trainer of a step 3 of a few generation steps from `model` alone."""
    return PPOTrainer(StepContext.create(options(model, *changes), run, "ppo"))


def run_cell(cell: Cell, model: str, run: Path, *changes: str) -> dict[str, object]:
    """Run step 3 with the features of a cell; what came out, to be judged by all ranks alike.

    Raises:
        AssertionError: the cell breaks a rule, and should not have been run.
    """
    assert check(options(model, *cell.assignments(), *changes)) == []
    trainer = step_3(model, run, *cell.assignments(), *changes)
    finished = trainer.train()
    trainer.save()
    engines = trainer.engine.actor, trainer.engine.critic
    return {
        "cell": cell.name,
        "finished": finished,
        "applied": [engine.global_steps - engine.skipped_steps for engine in engines],
        "off_reason": trainer.rollouts.hybrid.off_reason,
        "hybrid_ran": trainer.rollouts.hybrid.enabled,
    } | (_on_disk(run / "step3-rlhf", model) if rank() == 0 else {})


def _on_disk(folder: Path, model: str) -> dict[str, object]:
    """What a step 3 left: complete folders, finite losses, and how far the weights moved."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row[name] for row in rows for name in ("actor_loss", "critic_loss")]
    saved = load_causal_lm(str(folder / "actor"), torch.float32).state_dict()
    RewardModel.from_pretrained(str(folder / "critic"), torch.float32)
    first = load_causal_lm(model, torch.float32).state_dict()
    return {
        "steps": len(rows),
        "finite": all(isinstance(loss, float) and math.isfinite(loss) for loss in losses),
        "complete": [is_complete_model(folder / name) for name in ("actor", "critic")],
        "moved": max(float((saved[name] - first[name]).abs().max()) for name in first),
        "actor_loss": rows[-1]["actor_loss"],
        "critic_loss": rows[-1]["critic_loss"],
        "seconds": sum(row["e2e_s"] for row in rows),
    }


def judge(result: dict[str, object]) -> None:
    """Assert what every cell must show."""
    assert result["finished"]
    assert result["steps"] == GENERATION_STEPS
    assert all(applied >= 5 for applied in result["applied"])
    assert result["finite"]
    assert result["complete"] == [True, True]
    assert 0 < result["moved"] < 1
    assert result["off_reason"] is None


def table(results: dict[str, dict[str, object] | str]) -> list[str]:
    """Lines of text, one a cell: what it showed, or why it was refused."""
    lines = [f"{'cell':<32} {'steps':>5} {'actor loss':>11} {'critic loss':>11} {'moved':>8}  s"]
    for name, result in results.items():
        if isinstance(result, str):
            lines.append(f"{name:<32} refused: {result}")
            continue
        lines.append(
            f"{name:<32} {min(result['applied']):>5} {result['actor_loss']:>11.5f} "
            f"{result['critic_loss']:>11.5f} {result['moved']:>8.5f} {result['seconds']:.1f}"
        )
    return lines
