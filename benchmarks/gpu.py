"""One table of what a GPU does: `make bench-gpu`.

    python benchmarks/gpu.py [--device cuda|cpu] [--size 1b|tiny] [--model FOLDER] [--stages 2 3]

Generation in tokens/s: transformers' own `generate`, this project's with the hybrid engine off and
on. Each step: seconds, TFLOPs, MFU (its TFLOPs over what the device can do in 16 bits without
sparsity, by its data sheet; n/a where the device is not in the table or computes in fp32), and the
peak of `torch.cuda.max_memory_allocated` beside the plan without the CUDA context, which that does
not count. On a CPU, which only shows that it works, the peak is the growth of resident memory.
Weights are random: speed and memory do not depend on them. Each part is a process of its own, so
that peaks do not mix. The table is printed and written to output/bench-gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

# hidden, inner, layers, heads, key heads, vocabulary; rows, prompt and answer tokens.
SIZES = {
    "tiny": ((64, 128, 2, 4, 2, 2048), (4, 48, 16)),
    "1b": ((2048, 8192, 16, 32, 8, 32000), (32, 256, 256)),
}
STEPS = ("sft", "reward", "dpo", "ppo")
OPTIMIZER_STEPS = 4
# Dense TFLOPs in bf16 or fp16 by NVIDIA's data sheets; the first name that fits counts.
PEAK_TFLOPS = {
    "B200": 2250.0,
    "H200": 989.0,
    "GH200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
    "T4": 65.0,
}


def peak_tflops(device_name: str, dtype: str) -> float | None:
    """What a device can do in a second; None where that is not known."""
    if dtype == "fp32":
        return None
    found = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name))
    return next(found, None)


def build(folder: Path, size: str) -> str:
    """A Llama with random weights and the embedded tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from engine.models.embedded import build as build_embedded

    tokenizer = AutoTokenizer.from_pretrained(build_embedded("tiny-llama"))
    hidden, inner, layers, heads, key_heads, vocabulary = SIZES[size][0]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=max(vocabulary, len(tokenizer)),
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_data(file: Path, rows: int, prompt_tokens: int) -> Path:
    """Pairs whose answers fill any length, after prompts that all have about one length."""
    pairs = []
    for number in range(rows):
        question = " ".join(str(100 + (number + each) % 900) for each in range(prompt_tokens // 6))
        counted = " ".join(str(number + each) for each in range(2000))
        pairs.append(
            {
                "prompt": f"Go on: {question}",
                "chosen": f"Yes {counted}",
                "rejected": f"No {counted}",
            }
        )
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return file


def configuration(options: argparse.Namespace, step: str, stage: int, folder: Path) -> Any:
    """The configuration of one step; each row of its batch fills its length."""
    from engine.config.loading import load_profile

    rows, prompt, answer = SIZES[options.size][1]
    folder.mkdir(parents=True, exist_ok=True)
    data = write_data(folder / "data.jsonl", 8 * rows + 40, prompt)
    changes = [
        f"models.actor={options.model}",
        f"data.sources={data}",
        "data.eval_rows=8",
        f"dtype={options.dtype}",
        f"alignment={'dpo' if step == 'dpo' else 'ppo'}",
        # So hot, no model ends its answers before their limit.
        "ppo.temperature=5",
        "ppo.normalize_reward=false",
        f"ppo.max_steps={OPTIMIZER_STEPS}",
        "ppo.inner_epochs=1",
        f"ppo.rollout_batch_size={rows}",
        f"ppo.batch_size={rows}",
        f"ppo.micro_batch_size={max(1, rows // 4)}",
        f"ppo.max_prompt_length={prompt}",
        f"ppo.max_answer_length={answer}",
        "hybrid_engine.enabled=true",
    ]
    for name in ("sft", "reward", "dpo"):
        batch = rows if name == "sft" else max(2, rows // 2)
        changes += [f"{name}.max_steps={OPTIMIZER_STEPS}", f"{name}.batch_size={batch}"]
        changes += [f"{name}.micro_batch_size={max(1, batch // 4)}", f"{name}.eval_batch_size=4"]
        changes += [f"{name}.max_length={prompt + answer}"]
    changes += [f"{role}.zero_stage={stage}" for role in ("actor", "critic")]
    return load_profile("tiny", changes)


def run_step(options: argparse.Namespace, step: str, stage: int, folder: Path) -> None:
    """Train a few steps in this process; the last line that it prints is what was measured."""
    import torch

    from engine.distributed import process_group
    from engine.rlhf.trainer import PPOTrainer
    from engine.trainers.context import StepContext
    from engine.trainers.dpo import DPOTrainer
    from engine.trainers.reward import RewardTrainer
    from engine.trainers.sft import SFTTrainer

    trainers: dict[str, Callable[[StepContext], Any]] = {
        "sft": SFTTrainer,
        "reward": RewardTrainer,
        "dpo": DPOTrainer,
        "ppo": PPOTrainer,
    }
    config = configuration(options, step, stage, folder)
    config.models.sft, config.models.trained_reward = options.model, None
    if step == "ppo":
        config.models.trained_reward = options.model
    with process_group():
        context = StepContext.create(config, folder, step)  # type: ignore[arg-type]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        trainer = trainers[step](context)
        trainer.train()
        prompt = max(map(len, trainer.data.train["prompt_ids"])) if step == "ppo" else 0
        peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        if options.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
    print(json.dumps({"peak": peak, "prompt": prompt}), flush=True)


def planned_bytes(options: argparse.Namespace, step: str, config: Any) -> int:
    """What the plan says of the peak, without the CUDA context."""
    from engine.planning import ModelShape, plan_memory

    shape = ModelShape.from_config(json.loads(Path(options.model, "config.json").read_text()))
    plan = plan_memory(config, shape, dtype=options.dtype, device=options.device)
    planned = next(each for each in plan.steps if each.step == step)
    if options.device == "cpu":
        return planned.host_bytes
    context = sum(item.device_bytes for item in planned.items if item.what == "CUDA context")
    return planned.device_bytes - context


def step_rows(options: argparse.Namespace, step: str, stage: int, folder: Path) -> list[str]:
    """The rows of one step in the table: one, and for PPO one of each of its halves too."""
    output = in_process(options, "step", step, str(stage), str(folder))
    if output is None:
        return [f"| {step}, ZeRO-{stage} | failed |||||||"]
    measured = json.loads(output.splitlines()[-1])
    config = configuration(options, step, stage, folder)
    config.ppo.max_prompt_length = measured["prompt"] or config.ppo.max_prompt_length
    planned = planned_bytes(options, step, config)
    memory = (
        f"{measured['peak'] / 2**30:.2f} | {planned / 2**30:.2f} "
        f"| {planned / measured['peak'] - 1:+.0%} |"
    )
    parts = {"": r"^(?:End-to-End => |Model Parameters: .*)Latency: ([\d.]+)s, TFLOPs: ([\d.]+|NA)"}
    if step == "ppo":
        parts["generation"] = r"^Generation => Latency: ([\d.]+)s,.* TFLOPs: ([\d.]+|NA)"
        parts["training"] = r"^Training   => Latency: ([\d.]+)s, TFLOPs: ([\d.]+|NA)"
    rows = []
    for part, pattern in parts.items():
        found = re.findall(pattern, output, re.MULTILINE)
        # The first steps build kernels and fill caches.
        seconds = median(float(latency) for latency, _ in found[OPTIMIZER_STEPS // 2 :])
        speeds = [float(tflops) for _, tflops in found[OPTIMIZER_STEPS // 2 :] if tflops != "NA"]
        speed = median(speeds) if speeds else None
        peak = peak_tflops(options.device_name, options.dtype)
        shown = "n/a" if speed is None else f"{speed:.2f}"
        mfu = "n/a" if speed is None or peak is None else f"{speed / peak:.1%}"
        name = f"{step} {part}".strip() + f", ZeRO-{stage}"
        rows.append(f"| {name} | {seconds:.2f} | {shown} | {mfu} | {'| | |' if part else memory}")
    return rows


def run_generation(options: argparse.Namespace, stage: int, lora: bool) -> None:
    """Time three ways to answer in this process; the last line holds their tokens/s."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from engine.config.schema import HybridEngineConfig, LoraConfig
    from engine.distributed import device, process_group
    from engine.generation import plain
    from engine.generation.hybrid import HybridEngine
    from engine.generation.sampling import Sampling
    from engine.models.load import load_causal_lm
    from engine.models.lora import add_lora
    from engine.precision import resolve_dtype

    rows, prompt, answer = SIZES[options.size][1]
    with process_group():
        dtype = resolve_dtype(options.dtype)
        model = load_causal_lm(options.model, dtype)
        if lora:
            add_lora(model, LoraConfig(rank=128))
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": options.dtype == "bf16"},
            "fp16": {"enabled": options.dtype == "fp16"},
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        module = engine.module
        ids = torch.randint(5, module.config.vocab_size, (rows, prompt)).to(device())
        mask = torch.ones_like(ids)
        sampling = Sampling(max_new_tokens=answer, eos_ids=(), pad_id=1, ignore_eos=True)
        hybrid = HybridEngine(engine, HybridEngineConfig(enabled=True))
        generator = torch.Generator(device()).manual_seed(1)

        def theirs() -> None:
            with torch.no_grad(), plain.evaluation_mode(module):
                module.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    max_new_tokens=answer,
                    min_new_tokens=answer,
                    do_sample=True,
                    top_k=0,
                    pad_token_id=1,
                    synced_gpus=False,
                )

        def on() -> None:
            with hybrid.rollout():
                hybrid.generate(ids, mask, sampling, generator)

        ways = {
            "transformers": theirs,
            "off": lambda: plain.generate(module, ids, mask, sampling, generator),
            "on": on,
        }
        speeds = {}
        for name, way in ways.items():
            times = []
            for _ in range(1 + options.repeats):
                get_accelerator().synchronize()
                started = time.perf_counter()
                way()
                get_accelerator().synchronize()
                times.append(time.perf_counter() - started)
            speeds[name] = rows * answer / median(times[1:])
        speeds["off_reason"] = hybrid.off_reason
    print(json.dumps(speeds), flush=True)


def generation_row(options: argparse.Namespace, stage: int, lora: bool) -> str:
    """One layout in the table of generation."""
    name = f"ZeRO-{stage}{' LoRA' if lora else ''}"
    output = in_process(options, "generation", str(stage), str(int(lora)))
    if output is None:
        return f"| {name} | failed ||||"
    found = json.loads(output.splitlines()[-1])
    if found["off_reason"]:
        return f"| {name} | hybrid engine off: {found['off_reason']} ||||"
    theirs, off, on = (found[way] for way in ("transformers", "off", "on"))
    return f"| {name} | {theirs:.0f} | {off:.0f} | {on:.0f} | {on / theirs:.2f}x |"


def in_process(options: argparse.Namespace, *part: str) -> str | None:
    """Run one part in a process of its own, as one rank; its output, or None if it failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "DS_ACCELERATOR": options.device,
    }
    command = [sys.executable, __file__, "--device", options.device, "--size", options.size]
    command += ["--model", options.model, "--dtype", options.dtype, "--part", *part]
    command += ["--repeats", str(options.repeats)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        print(f"{' '.join(part)} failed:\n{ended.stderr[-3000:]}", file=sys.stderr, flush=True)
        return None
    return ended.stdout


def table(options: argparse.Namespace, folder: Path) -> list[str]:
    """All lines of the table, printed as they come."""
    import deepspeed
    import torch

    rows, prompt, answer = SIZES[options.size][1]
    lines: list[str] = []

    def add(*new: str) -> None:
        lines.extend(new)
        print(*new, sep="\n", flush=True)

    add(
        f"# {options.device_name}",
        "",
        f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, {options.dtype}, model "
        f"{'with random weights, size ' + options.size if options.built else options.model}; "
        f"{rows} rows, prompts of {prompt} tokens, answers of {answer}.",
        "",
        "| generation, tokens/s | transformers | hybrid engine off | on | on to transformers |",
        "| --- | ---: | ---: | ---: | ---: |",
    )
    for stage in options.stages:
        for lora in (False, True):
            add(generation_row(options, stage, lora))
    add(
        "",
        "| step | s | TFLOPs | MFU | peak GiB | planned GiB | plan to peak |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    )
    for stage in options.stages:
        for step in STEPS:
            add(*step_rows(options, step, stage, folder / f"{step}-{stage}"))
    return lines


def main() -> None:
    """Measure everything and write the table, or one part of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=list(SIZES), help="default: 1b on a GPU, tiny on a CPU")
    parser.add_argument("--model", help="folder of a model; default: a Llama with random weights")
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], default="bf16")
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[2, 3])
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many answers")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.size = options.size or ("1b" if options.device == "cuda" else "tiny")
    if options.part:
        kind, *part = options.part
        if kind == "step":
            run_step(options, part[0], int(part[1]), Path(part[2]))
        else:
            run_generation(options, int(part[0]), bool(int(part[1])))
        return
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device on this machine; --device cpu shows that the benchmark works")
        return
    options.device_name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    options.built = options.model is None
    with tempfile.TemporaryDirectory() as folder:
        if options.built:
            options.model = build(Path(folder, "model"), options.size)
        lines = table(options, Path(folder))
    target = Path("output/bench-gpu.md")
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nwritten to {target}")


if __name__ == "__main__":
    main()
