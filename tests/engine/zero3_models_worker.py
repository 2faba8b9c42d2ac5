"""One rank of `test_models_zero3.py`: load under ZeRO-3, train a step, save."""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from transformers.integrations import HfDeepSpeedConfig

from engine.config.schema import LoraConfig
from engine.distributed import process_group, rank
from engine.models.load import load_causal_lm, load_tokenizer, resize_for
from engine.models.lora import adapters_off, add_lora, describe_lora, parameter_groups
from engine.models.reward import RewardModel
from engine.models.save import save_model

SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "zero_allow_untrusted_optimizer": True,
    "gradient_clipping": 1.0,
}


def train(kind: str, path: str, lora: LoraConfig, output: Path) -> None:
    tokenizer = load_tokenizer(path, end_of_conversation_token="<|end|>")
    reward = kind == "reward"
    if reward:
        model = RewardModel.from_pretrained(path, torch.float32, seed=5)
    else:
        model = load_causal_lm(path, torch.float32)
    assert all(hasattr(parameter, "ds_id") for parameter in model.parameters())
    resize_for(model.model if reward else model, tokenizer)
    save_model(model, tokenizer, output / "before")
    if lora.rank:
        add_lora(model, lora)
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-2, 0.0, 1e-2))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=SETTINGS)
    ids = torch.randint(2, 264, (2, 9), generator=torch.Generator().manual_seed(rank()))
    mask = torch.ones_like(ids)

    def forward() -> torch.Tensor:
        return engine(ids, mask) if reward else engine(input_ids=ids, attention_mask=mask).logits

    results = {"ids": ids, "lora": describe_lora(model)}
    if lora.only:
        with adapters_off(engine.module), torch.no_grad():
            results["off"] = forward()
    for _ in range(2):
        engine.backward((forward() - 1).square().mean())
        engine.step()
    save_model(engine.module, tokenizer, output / "after")
    with torch.no_grad():
        results["after"] = forward()
    if rank() == 0:
        torch.save(results, output / "results.pt")


def main(output: Path, paths: list[str]) -> None:
    with process_group():
        keep_alive = HfDeepSpeedConfig(SETTINGS)
        for index, path in enumerate(paths):
            lora = LoraConfig(rank=2 * index, alpha=8, only=index == 1)
            for kind in ("actor", "reward"):
                train(kind, path, lora, output / f"{kind}-{index}")
        del keep_alive


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
