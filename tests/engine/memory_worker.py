"""A step 3 of one generation step; prints its peak resident memory and its first KL as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matrix_run import step_3

from engine.distributed import process_group


def main(folder: Path, actor: str, reward: str, share: str) -> None:
    with process_group():
        trainer = step_3(
            actor,
            folder,
            f"models.trained_reward={reward}",
            "actor.lora.rank=2",
            "actor.lora.only=true",
            f"ref.share_actor={share}",
            "ppo.max_steps=1",
        )
        trainer.train()
        # Not getrusage: its maximum is inherited from the process that started this one.
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        row = json.loads((folder / "step3-rlhf/metrics.jsonl").read_text().splitlines()[0])
        size = sum(p.numel() * p.element_size() for p in trainer.engine.actor.module.parameters())
        print(json.dumps({"peak": peak, "kl": row["kl"], "actor": size}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
