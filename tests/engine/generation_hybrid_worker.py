"""One rank of the hybrid engine's test under DeepSpeed; started by the launcher."""

from __future__ import annotations

import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from test_generation_hybrid import GREEDY, SAMPLING, build, prompts, seeded

from engine.config.schema import HybridEngineConfig
from engine.generation import hybrid as hybrid_module
from engine.generation import packed
from engine.generation.hybrid import HybridEngine
from engine.generation.plain import generate

# Stage, family, LoRA, dtype, unpinned.
CASES = [
    (0, "llama", True, torch.float32, False),
    (2, "opt", True, torch.float32, True),
    (2, "llama", False, torch.bfloat16, False),
    (3, "opt", False, torch.float32, False),
    (3, "opt", True, torch.bfloat16, False),
    (3, "llama", True, torch.float32, True),
    (3, "gpt2", True, torch.float32, False),
]
# Family, and which call of what fails on the last rank, while ZeRO-3 has sharded the weights.
FAILURES = [
    ("llama", packed._Layer, "__init__", 1),
    ("llama", packed.Packer, "tensor", 6),
    ("llama", packed.PackedDecoder, "step", 3),
    ("llama", HybridEngine, "_difference", 1),
    # the model has two layers: the check has passed, and the rollout reads them again
    ("llama", packed._Layer, "__init__", 3),
    ("gpt2", hybrid_module, "effective_weight", 2),
    ("gpt2", hybrid_module.ModuleDecoder, "step", 2),
]


def train_engine(stage: int, family: str, lora: bool, dtype: torch.dtype) -> Any:
    model = build(family, lora)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    model.to(dtype)
    # Dropout draws from the global generator, which rollouts may move.
    for module in model.modules():
        if hasattr(module, "dropout") and isinstance(module.dropout, float):
            module.dropout = 0.0
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable()
    config = {
        "train_micro_batch_size_per_gpu": 5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "bf16": {"enabled": dtype == torch.bfloat16},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def step(engine: Any, seed: int) -> float:
    ids = torch.randint(5, 50, (5, 12), generator=torch.Generator().manual_seed(seed))
    loss = engine(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids).loss
    engine.backward(loss)
    engine.step()
    return loss.item()


def hooks(engine: Any) -> list[list[int]]:
    return [
        [*module._forward_pre_hooks, *module._forward_hooks] for module in engine.module.modules()
    ]


def whole_weights(engine: Any) -> list[torch.Tensor]:
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return [parameter.detach().clone() for parameter in parameters]


def run(stage: int, family: str, lora: bool, dtype: torch.dtype, unpin: bool) -> None:
    undisturbed = train_engine(stage, family, lora, dtype)
    expected_losses = [step(undisturbed, seed) for seed in range(3)]

    engine = train_engine(stage, family, lora, dtype)
    hybrid = HybridEngine(engine, HybridEngineConfig(enabled=True, unpin_actor_parameters=unpin))
    ids, mask = prompts()
    ids = ids.roll(dist.get_rank(), dims=0)
    losses = []
    for seed in range(3):
        plain = generate(engine.module, ids, mask, GREEDY)
        weights, hooked = whole_weights(engine), hooks(engine)
        with hybrid.rollout():
            answers = hybrid.generate(ids, mask, GREEDY)
            sampled = hybrid.generate(ids, mask, SAMPLING, seeded())
        assert hybrid.off_reason is None, hybrid.off_reason
        assert hooks(engine) == hooked
        assert all(map(torch.equal, weights, whole_weights(engine)))
        if dtype == torch.float32:
            assert torch.equal(answers.answers, plain.answers)
            torch.testing.assert_close(answers.log_probs, plain.log_probs, atol=1e-4, rtol=1e-3)
            again = generate(engine.module, ids, mask, SAMPLING, seeded())
            assert torch.equal(sampled.answers, again.answers)
        try:
            with hybrid.rollout():
                raise ZeroDivisionError
        except ZeroDivisionError:
            assert hooks(engine) == hooked
        losses.append(step(engine, seed))
    assert losses == expected_losses, (losses, expected_losses)


def run_failure(family: str, owner: Any, name: str, call: int) -> None:
    """All ranks go on plain, with the reason, and can train on."""
    engine = train_engine(3, family, True, torch.float32)
    hybrid = HybridEngine(engine, HybridEngineConfig(enabled=True))
    ids, mask = prompts()
    plain = generate(engine.module, ids, mask, GREEDY)
    original, calls = getattr(owner, name), iter(range(1, 1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) == call:
            raise MemoryError("made to fail")
        return original(*arguments)

    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(owner, name, failing) if last else nullcontext():
        with hybrid.rollout():
            answers = hybrid.generate(ids, mask, GREEDY)
        assert not last or next(calls) > call, "nothing was made to fail"
    assert hybrid.off_reason == "MemoryError: made to fail", hybrid.off_reason
    assert torch.equal(answers.answers, plain.answers)
    step(engine, 0)


def main() -> None:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Ranks that wait for one that failed end with an error.
    deepspeed.init_distributed(timeout=timedelta(minutes=1))
    for case in CASES:
        run(*case)
        # One write a line: two ranks share the stream.
        os.write(1, f"rank {dist.get_rank()} case {case} passed\n".encode())
    for failure in FAILURES if dist.get_world_size() > 1 else ():
        run_failure(*failure)
        os.write(1, f"rank {dist.get_rank()} failure {failure} passed\n".encode())
    os.write(1, b"all cases passed\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
