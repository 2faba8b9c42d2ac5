"""The plan's bytes against what real steps hold, and against the growth of the process.

Run as a program with a list of cases, the file measures them as benchmarks/plan.py does, which has
the whole table, on larger models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from engine.config.loading import load_profile
from engine.config.schema import RunConfig

REPOSITORY = Path(__file__).parents[2]
MODEL = {"hidden": 384, "inner": 1280, "layers": 6}
ROWS = 4
# Hidden states of a micro batch take 32 MiB: glibc maps such blocks, and its heap has no holes of
# theirs. Most tensors of a step are no smaller.
MAPPED_MODEL = {"hidden": 256, "inner": 640, "layers": 3}
MAPPED_ROWS, MAPPED_LENGTH = 256, 128
# CPUs without instructions for bf16 take very long.
LENGTHS = {"fp32": 96, "bf16": 32}


@dataclass(frozen=True)
class Case:
    stage: int
    dtype: str = "fp32"
    offload: bool = False
    lora: bool = False
    checkpointing: bool = False
    ranks: int = 1
    accumulation: int = 1
    step: str = "sft"
    mapped: bool = False

    def config(self, model: str) -> RunConfig:
        """The configuration of a few optimizer steps."""
        features = [f"zero_stage={self.stage}", f"offload={self.offload}".lower()]
        features += [f"lora.rank={8 if self.lora else 0}", f"lora.only={self.lora}".lower()]
        features.append(f"gradient_checkpointing={self.checkpointing}".lower())
        settings = [f"{role}.{feature}" for role in ("actor", "critic") for feature in features]
        at_once, length = ROWS, LENGTHS[self.dtype]
        if self.mapped:
            at_once, length = MAPPED_ROWS, MAPPED_LENGTH
        rows = at_once * self.ranks * self.accumulation
        settings += [
            f"models.actor={model}",
            f"dtype={self.dtype}",
            f"launch.num_accelerators={self.ranks}",
            f"sft.batch_size={rows}",
            f"sft.micro_batch_size={at_once}",
            f"sft.max_length={length}",
            "sft.eval_batch_size=1",
            "sft.max_steps=2",
            f"ppo.rollout_batch_size={rows}",
            f"ppo.batch_size={rows}",
            "ppo.max_steps=1",
            "ppo.normalize_reward=false",
            "data.eval_rows=2",
        ]
        return load_profile("tiny", settings)


CASES = [
    Case(0, "bf16", checkpointing=True),
    Case(1, accumulation=2),
    Case(2, offload=True, accumulation=2),
    Case(3, lora=True),
    Case(3, offload=True, ranks=2),
    Case(2, lora=True, step="ppo"),
    Case(0, lora=True, mapped=True),
]


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> dict[Case, dict[str, tuple[int, int]]]:
    """Planned and measured bytes of each case, all by one program: imports take long."""
    from matrix_run import small_model

    folder = tmp_path_factory.mktemp("planned")
    models = [
        small_model("llama", folder / "model", **MODEL),
        small_model("llama", folder / "mapped-model", **MAPPED_MODEL),
    ]
    cases = json.dumps([asdict(case) for case in CASES])
    program = subprocess.run(
        [sys.executable, __file__, cases, *models, folder],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    lines = [line for line in program.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(CASES), program.stderr[-3000:]
    return {case: json.loads(line) for case, line in zip(CASES, lines, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_states_are_what_the_engines_hold(case, compared):
    planned, held = compared[case]["states"]
    assert planned == pytest.approx(held, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_total_is_near_the_growth_of_the_process(case, compared):
    planned, grown = compared[case]["peak"]
    assert planned == pytest.approx(grown, rel=0.25)


def _main() -> None:
    from benchmarks.plan import compare

    cases, model, mapped_model, folder = json.loads(sys.argv[1]), *sys.argv[2:]
    for number, given in enumerate(cases):
        case = Case(**given)
        config = case.config(mapped_model if case.mapped else model)
        pairs = compare(config, case.step, Path(folder) / str(number))
        print(json.dumps(pairs), flush=True)


if __name__ == "__main__":
    _main()
