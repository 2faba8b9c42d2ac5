"""What saving a model allocates on the host, as the plan counts it and as the allocator sees it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_planning_activations import most_allocated
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config.deepspeed import deepspeed_config
from engine.config.schema import LoraConfig, RunConfig
from engine.models import save
from engine.models.lora import add_lora
from engine.planning import ModelShape, memory, plan_memory
from engine.rlhf.actor_average import ActorAverage
from engine.trainers.engines import zero3_loading

CONFIG = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
SHAPE = ModelShape.from_config(CONFIG)


def planned(model: str, dtype: str, stage: int, lora: bool) -> int:
    """Host bytes of the phase in which a model of step 3 is saved, as planned for a CPU."""
    config = RunConfig.model_validate(
        {
            "models": {"sft": "a", "trained_reward": "b"},
            "actor": {"zero_stage": stage, "lora": {"rank": 4 if lora else 0, "only": lora}},
            "ema": {"enabled": True},
        }
    )
    (step,) = plan_memory(config, SHAPE, dtype=dtype, device="cpu").steps
    return sum(item.host_bytes for item in step.items if item.phase == f"save {model}")


@pytest.mark.parametrize("model", ["actor", "actor_ema"])
@pytest.mark.parametrize(
    ("dtype", "stage", "lora"),
    [
        ("fp32", 0, False),
        ("bf16", 0, False),
        ("fp32", 2, True),
        ("fp32", 3, False),
        ("bf16", 3, True),
    ],
)
@pytest.mark.usefixtures("group")
def test_a_file_of_the_model_is_on_the_host_at_once(
    model, dtype, stage, lora, tiny_tokenizer, tmp_path, monkeypatch
):
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    file = 2 * torch_dtype.itemsize * SHAPE.parameters // 3
    monkeypatch.setattr(save, "_SHARD_BYTES", file)
    monkeypatch.setattr(memory, "_FILE_BYTES", file)
    options = dict(CONFIG)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    engine_config = deepspeed_config(
        zero_stage=stage,
        offload=False,
        dtype=dtype,
        micro_batch_size=1,
        accumulation=1,
        ranks=1,
    )
    with zero3_loading(engine_config):
        actor = AutoModelForCausalLM.from_config(config, dtype=torch_dtype)
    if lora:
        add_lora(actor, LoraConfig(rank=4, only=True))
    values = save.current_values
    if model == "actor_ema":
        values = ActorAverage(SimpleNamespace(module=actor), 0.9).values
    measured = most_allocated(
        lambda: save.save_model(actor, tiny_tokenizer, tmp_path / "model", values)
    )
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    expected = planned(model, dtype, stage, lora)
    assert measured == pytest.approx(expected, rel=0.25, abs=2**17)


def test_files_are_as_large_as_the_plan_says():
    assert memory._FILE_BYTES == save._SHARD_BYTES
