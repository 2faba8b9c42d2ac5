"""Runs with MixZ and without it, on a model just large enough for DeepSpeed to quantise."""

from __future__ import annotations

import json
from pathlib import Path

from matrix_run import options, small_model
from torch import nn

from engine.rlhf.trainer import PPOTrainer
from engine.trainers.context import StepContext
from engine.trainers.sft import SFTTrainer

LORA = ("actor.zero_stage=3", "actor.lora.rank=4", "actor.lora.only=true")
STEPS = 4


def large_model(folder: Path) -> str:
    """A Llama of one layer with matrices of more than 500,000 elements."""
    return small_model("llama", folder, hidden=512, inner=1024, layers=1)


def sft(model: str, run: Path, *changes: str) -> SFTTrainer:
    """The trainer of a few steps of SFT with LoRA alone."""
    config = options(model, *LORA, f"sft.max_steps={STEPS}", "data.eval_rows=4", *changes)
    return SFTTrainer(StepContext.create(config, run, "sft"))


def ppo(model: str, run: Path, *changes: str) -> PPOTrainer:
    """The trainer of a short step 3 whose critic is as large as the actor."""
    config = options(model, *LORA, "ppo.max_steps=2", *changes)
    return PPOTrainer(StepContext.create(config, run, "ppo"))


def losses(run: Path) -> list[float]:
    """The losses of all optimizer steps of step 1."""
    lines = (run / "step1-sft/metrics.jsonl").read_text().splitlines()
    return [row["loss"] for row in map(json.loads, lines) if row["kind"] == "metrics"]


def share_of_bf16(model: nn.Module) -> float:
    """Bytes that this rank holds of its large frozen tensors, over those they had in bf16."""
    held, in_bf16 = 0, 0
    for parameter in model.parameters():
        if parameter.requires_grad or parameter.ds_numel < 500_000:
            continue
        shard = parameter.ds_tensor
        held += shard.numel() * shard.element_size()
        scales = getattr(shard, "ds_quant_scale", None)
        held += 0 if scales is None else scales.numel() * scales.element_size()
        in_bf16 += 2 * shard.numel()
    return held / in_bf16
