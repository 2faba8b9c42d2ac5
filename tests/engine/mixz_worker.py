"""One rank of `test_mixz.py`: SFT with three kinds of weights, then step 3 with MixZ."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from mixz_run import losses, ppo, sft, share_of_bf16

from engine.distributed import max_over_ranks, process_group, rank

VARIANTS = {
    "off": (),
    "on": ("mixz.enabled=true",),
    "gather": ("actor.zero_quantized_weights=true",),
}


def main(folder: Path, model: str, dtype: str) -> None:
    # torch computes in fp16 on any CPU; DeepSpeed refuses where there are no instructions for it.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    ranks = ("launch.num_accelerators=2", f"dtype={dtype}")
    results = {}
    with process_group():
        for name, changes in VARIANTS.items():
            trainer = sft(model, folder / name, *ranks, *changes)
            trainer.train()
            results[f"share {name}"] = max_over_ranks(share_of_bf16(trainer.engine.module))
            trainer.save()
        step3 = ppo(model, folder / "on", *ranks, "mixz.enabled=true", "hybrid_engine.enabled=true")
        step3.train()
        step3.save()
        results["share ppo"] = max_over_ranks(share_of_bf16(step3.engine.actor.module))
        if rank() == 0:
            results["off_reason"] = step3.hybrid.off_reason
            results["losses"] = [losses(folder / name) for name in VARIANTS]
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[-3]), *sys.argv[-2:])
