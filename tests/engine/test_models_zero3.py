"""Loading, LoRA and saving under ZeRO-3 on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.models.folders import missing_parts
from engine.models.load import load_causal_lm
from engine.models.reward import RewardModel

FAMILIES = ("llama", "opt", "gpt2")


@pytest.fixture(scope="module")
def output(tiny_model, tmp_path_factory) -> Path:
    """Three families, actor and reward model each: without LoRA, with LoRA only, with both."""
    folder = tmp_path_factory.mktemp("zero3")
    for index in range(len(FAMILIES)):
        for kind in ("actor", "reward"):
            (folder / f"{kind}-{index}").mkdir()
    worker = Path(__file__).with_name("zero3_models_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(worker), str(folder), *map(tiny_model, FAMILIES)]
    root = str(Path(__file__).parents[2])
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": root, "PYTHONWARNINGS": "ignore"},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return folder


def load(kind: str, folder: Path) -> torch.nn.Module:
    loader = RewardModel.from_pretrained if kind == "reward" else load_causal_lm
    return loader(str(folder), torch.float32)


def compute(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    return result if isinstance(model, RewardModel) else result.logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["actor", "reward"])
@pytest.mark.parametrize("index", range(len(FAMILIES)), ids=FAMILIES)
def test_a_model_saved_under_zero3_is_the_one_that_trained(kind, index, output, tiny_model):
    folder = output / f"{kind}-{index}"
    results = torch.load(folder / "results.pt")
    ids = results["ids"]
    assert missing_parts(folder / "after") == []
    before = load(kind, folder / "before")
    original = tiny_model(FAMILIES[index])
    plain = (
        RewardModel.from_pretrained(original, torch.float32, seed=5)
        if kind == "reward"
        else load_causal_lm(original, torch.float32)
    )
    # The vocabulary grew from 264 to 272 for a new token; old tokens compute as they did.
    torch.testing.assert_close(
        compute(before, ids)[..., :264], compute(plain, ids)[..., :264], atol=1e-5, rtol=1e-5
    )
    if "off" in results:
        torch.testing.assert_close(compute(before, ids), results["off"], atol=1e-5, rtol=1e-5)
    after = load(kind, folder / "after")
    assert after.config.vocab_size == 272
    assert after.config.eos_token_id == 264
    torch.testing.assert_close(compute(after, ids), results["after"], atol=2e-5, rtol=1e-4)
    assert (compute(after, ids) - compute(before, ids)).abs().max() > 1e-2
    assert results["lora"].startswith(("LoRA: 0 ", "LoRA: 12 ", "LoRA: 8 ")[index])
