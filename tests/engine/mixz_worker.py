"""One rank of `test_mixz.py`: SFT with and without MixZ in two number formats, then step 3."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator
from mixz_run import losses, ppo, sft, share_of_bf16

from engine.distributed import max_over_ranks, process_group, rank

OFF, ON = (), ("mixz.enabled=true",)
GATHER = ("actor.zero_quantized_weights=true",)
VARIANTS = {"bf16": {"off": OFF, "on": ON, "gather": GATHER}, "fp16": {"off": OFF, "on": ON}}


def main(folder: Path, model: str) -> None:
    # torch computes in fp16 on any CPU; DeepSpeed refuses where there are no instructions for it.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    results = {}
    with process_group():
        for dtype, variants in VARIANTS.items():
            of_dtype = results[dtype] = {"share": {}, "losses": {}}
            for name, changes in variants.items():
                run = folder / dtype / name
                trainer = sft(model, run, "launch.num_accelerators=2", f"dtype={dtype}", *changes)
                trainer.train()
                of_dtype["share"][name] = max_over_ranks(share_of_bf16(trainer.engine.module))
                of_dtype["losses"][name] = losses(run) if rank() == 0 else []
                trainer.save()
        step3 = ppo(
            model,
            folder / "bf16/on",
            "launch.num_accelerators=2",
            "dtype=bf16",
            "hybrid_engine.enabled=true",
            *ON,
        )
        step3.train()
        step3.save()
        results["share ppo"] = max_over_ranks(share_of_bf16(step3.engine.actor.module))
        results["off_reason"] = step3.hybrid.off_reason
        if rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
