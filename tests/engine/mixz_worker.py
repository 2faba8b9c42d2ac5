"""One rank of `test_mixz.py`: SFT with three kinds of weights, then step 3 with MixZ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from mixz_run import losses, ppo, sft, share_of_bf16

from engine.distributed import max_over_ranks, process_group, rank

ON = ("mixz.enabled=true",)
VARIANTS = {"off": (), "on": ON, "gather": ("actor.zero_quantized_weights=true",)}


def measure(folder: Path, model: str, dtype: str) -> dict[str, object]:
    """What one number format came to; `losses` on rank 0 alone."""
    ranks = ("launch.num_accelerators=2", f"dtype={dtype}")
    results = {}
    for name, changes in VARIANTS.items():
        trainer = sft(model, folder / name, *ranks, *changes)
        trainer.train()
        results[f"share {name}"] = max_over_ranks(share_of_bf16(trainer.engine.module))
        trainer.save()
    step3 = ppo(model, folder / "on", *ranks, *ON, "hybrid_engine.enabled=true")
    step3.train()
    step3.save()
    results["share ppo"] = max_over_ranks(share_of_bf16(step3.engine.actor.module))
    results["off_reason"] = step3.rollouts.hybrid.off_reason
    if rank() == 0:
        results["losses"] = [losses(folder / name) for name in VARIANTS]
    return results


def main(folder: Path, model: str) -> None:
    # torch computes in fp16 on any CPU; DeepSpeed refuses where there are no instructions for it.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    with process_group():
        results = {dtype: measure(folder / dtype, model, dtype) for dtype in ("bf16", "fp16")}
        if rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
