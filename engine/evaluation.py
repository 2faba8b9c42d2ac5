"""The models of a run side by side on held-out prompts, and the reward model on held-out pairs."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engine.algorithms.kl import k1
from engine.algorithms.language_modeling import causal_lm_loss, sequence_log_probs
from engine.algorithms.log_probs import token_log_probs
from engine.algorithms.masks import length_mask
from engine.algorithms.preference import implicit_rewards
from engine.config import DataSource, RunConfig, load_config
from engine.config.layout import STEP_FOLDERS
from engine.data.batches import LabelledPairCollator, PairCollator, PromptCollator, SftCollator
from engine.data.files import DataError
from engine.data.phases import build_phase, eval_prompts
from engine.data.sources import load_source
from engine.data.templates import encode_answer, fit_prompt
from engine.generation.decode import build_decoder, decode
from engine.generation.sampling import Generation, Sampling
from engine.models.families import position_arguments
from engine.models.folders import is_complete_model
from engine.models.load import load_causal_lm, load_tokenizer, resize_for, resolve_model
from engine.models.reward import RewardModel
from engine.precision import resolve_dtype

_SAMPLES_SHOWN = 8


@dataclass(frozen=True)
class Bench:
    """What every model of a run is measured on."""

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: list[dict[str, Any]]
    sft_rows: Any
    device: torch.device
    dtype: torch.dtype


def evaluate(run: Path) -> dict[str, Any]:
    """Measure base, SFT model, DPO model or actor and its average, and what rates answers.

    Exact match is of greedy answers, style, reward and KL of answers sampled at temperature 1.

    Args:
        run: folder of a run whose step 1 is done.

    Returns:
        `{"prompts", "models": {name: {"perplexity", "reward_mean", "reward_std", "exact_match",
        "preferred_style", "kl"}}, "reward_model": {"accuracy", "margin", "pairs", "kinds"},
        "implicit_rewards": the same of a DPO model, "answers": [...]}`; null where the data or the
        run has no such thing. `kl` is from the SFT model, in nats an answer.
    """
    config = load_config(run / "run.yaml")
    folders = model_folders(config, run)
    tokenizer = load_tokenizer(folders["sft"])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(
        config=config,
        tokenizer=tokenizer,
        prompts=eval_prompts(config, tokenizer)[: config.data.eval_rows],
        sft_rows=build_phase(config, tokenizer, "sft").eval,
        device=device,
        dtype=resolve_dtype(config.dtype),
    )
    reward_folder = config.models.trained_reward or str(run / STEP_FOLDERS["reward"] / "model")
    reward = None
    if is_complete_model(reward_folder):
        reward = RewardModel.from_pretrained(reward_folder, bench.dtype).to(device).eval()
    sft = load(bench, folders["sft"])
    models, answers, implicit = {}, {}, None
    for name, folder in folders.items():
        model = sft if name == "sft" else load(bench, folder)
        models[name], answers[name] = measure(bench, model, sft, reward)
        if name == "dpo":
            implicit = measure_implicit_rewards(bench, model, sft)
    return {
        "prompts": len(bench.prompts),
        "models": models,
        "reward_model": None if reward is None else measure_reward(bench, reward),
        "implicit_rewards": implicit,
        "answers": [
            {
                "prompt": prompt["prompt"][-1]["content"],
                **{name: answers[name][row] for name in folders},
            }
            for row, prompt in enumerate(bench.prompts[:_SAMPLES_SHOWN])
        ],
    }


def model_folders(config: RunConfig, run: Path) -> dict[str, str]:
    """Base, SFT model, DPO model, actor and average of a run, those that exist."""
    step3 = run / STEP_FOLDERS["ppo"]
    finished = config.models.sft or str(run / STEP_FOLDERS["sft"] / "model")
    candidates = {
        "sft": finished,
        "dpo": str(run / STEP_FOLDERS["dpo"] / "model"),
        "actor": str(step3 / "actor"),
        "actor_ema": str(step3 / "actor_ema"),
    }
    if not is_complete_model(finished):
        raise FileNotFoundError(f"{finished} holds no complete model; run step 1 first")
    found = {name: path for name, path in candidates.items() if is_complete_model(path)}
    return {"base": resolve_model(config.models.actor), **found}


def load(bench: Bench, folder: str) -> nn.Module:
    """A causal language model of the run, ready to compute."""
    model = load_causal_lm(
        folder, bench.dtype, trust_remote_code=bench.config.models.trust_remote_code
    )
    resize_for(model, bench.tokenizer)
    return model.to(bench.device).eval()


@torch.no_grad()
def measure(
    bench: Bench, model: nn.Module, sft: nn.Module, reward: RewardModel | None
) -> tuple[dict[str, float | None], list[str]]:
    """One model's figures, and its greedy answers to the prompts."""
    greedy = [text for _, _, texts in answer(bench, model, greedy=True) for text in texts]
    sampled: list[str] = []
    scores: list[Tensor] = []
    divergences: list[Tensor] = []
    for batch, generation, texts in answer(bench, model, greedy=False):
        sampled += texts
        mask = length_mask(generation.lengths, generation.answers.shape[1])
        ids = torch.cat((batch["input_ids"], generation.answers), dim=1)
        full_mask = torch.cat((batch["attention_mask"], mask.long()), dim=1)
        width = mask.shape[1]
        logits = sft(
            input_ids=ids, attention_mask=full_mask, **position_arguments(sft, full_mask)
        ).logits
        reference = token_log_probs(logits[:, -width - 1 : -1], generation.answers)
        divergences.append((k1(generation.log_probs, reference) * mask).sum(dim=1))
        if reward is not None:
            scores.append(reward.scores(ids, full_mask))
    references = [prompt["references"] for prompt in bench.prompts]
    styles = [prompt["preferred_style"] for prompt in bench.prompts]
    all_scores = torch.cat(scores) if scores else None
    figures = {
        "perplexity": perplexity(bench, model),
        "reward_mean": None if all_scores is None else float(all_scores.mean()),
        "reward_std": None if all_scores is None else float(all_scores.std(correction=0)),
        "exact_match": share(
            text in known for text, known in zip(greedy, references, strict=True) if known
        ),
        "preferred_style": share(
            re.fullmatch(style, text) is not None
            for text, style in zip(sampled, styles, strict=True)
            if style
        ),
        "kl": float(torch.cat(divergences).mean()),
    }
    return figures, greedy


def answer(
    bench: Bench, model: nn.Module, greedy: bool
) -> Iterator[tuple[dict[str, Tensor], Generation, list[str]]]:
    """Batches of prompts, the model's answers, and their texts; sampling is seeded."""
    tokenizer, options = bench.tokenizer, bench.config.ppo
    collate = PromptCollator(tokenizer.pad_token_id)
    sampling = Sampling(
        max_new_tokens=options.max_answer_length,
        eos_ids=(tokenizer.eos_token_id,),
        pad_id=tokenizer.pad_token_id,
        greedy=greedy,
    )
    generator = torch.Generator(bench.device).manual_seed(bench.config.seed)
    size = bench.config.sft.eval_batch_size
    decoder = build_decoder(model, size)
    for start in range(0, len(bench.prompts), size):
        rows = collate(bench.prompts[start : start + size])
        batch = {name: tensor.to(bench.device) for name, tensor in rows.items()}
        generation = decode(
            decoder, batch["input_ids"], batch["attention_mask"], sampling, generator
        )
        texts = [
            tokenizer.decode(ids[:length], skip_special_tokens=True).strip()
            for ids, length in zip(generation.answers, generation.lengths.tolist(), strict=True)
        ]
        yield batch, generation, texts


@torch.no_grad()
def perplexity(bench: Bench, model: nn.Module) -> float:
    """Perplexity over the answer tokens of the held-out dialogues."""
    collate = SftCollator(bench.tokenizer.pad_token_id)
    size = bench.config.sft.eval_batch_size
    loss, tokens = 0.0, 0
    for start in range(0, len(bench.sft_rows), size):
        rows = [bench.sft_rows[row] for row in range(start, len(bench.sft_rows))[:size]]
        batch = {name: tensor.to(bench.device) for name, tensor in collate(rows).items()}
        labels = batch.pop("labels")
        batch_loss, batch_tokens = causal_lm_loss(model(**batch).logits, labels)
        loss += float(batch_loss)
        tokens += int(batch_tokens)
    return math.exp(loss / max(1, tokens))


def measure_reward(bench: Bench, reward: RewardModel) -> dict[str, Any] | None:
    """Accuracy and margin of the reward model on held-out pairs, also by kind of pair."""
    return measure_pairs(
        bench, lambda batch: reward.scores(batch["input_ids"], batch["attention_mask"])
    )


def measure_implicit_rewards(bench: Bench, dpo: nn.Module, sft: nn.Module) -> dict[str, Any] | None:
    """The same of what a model trained by DPO stands for, against the SFT model it began as."""

    def log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return sequence_log_probs(logits, batch["labels"])

    beta = bench.config.dpo.beta
    return measure_pairs(
        bench, lambda batch: implicit_rewards(log_probs(dpo, batch), log_probs(sft, batch), beta)
    )


@torch.no_grad()
def measure_pairs(
    bench: Bench, rate: Callable[[dict[str, Tensor]], Tensor]
) -> dict[str, Any] | None:
    """Accuracy and margin of a rating on held-out pairs, also by kind of pair.

    Args:
        bench: with the data.
        rate: from a batch of pairs to ratings `(2 * pairs,)`, all chosen, then all rejected.
    """
    config = bench.config
    if not config.data.split[1]:
        return None
    pairs = build_phase(config, bench.tokenizer, "reward").eval
    collate = LabelledPairCollator(bench.tokenizer.pad_token_id)
    size = (config.dpo if config.alignment == "dpo" else config.reward).eval_batch_size
    margins: list[float] = []
    for start in range(0, len(pairs), size):
        rows = collate([pairs[row] for row in range(start, len(pairs))[:size]])
        batch = {name: tensor.to(bench.device) for name, tensor in rows.items()}
        chosen, rejected = rate(batch).chunk(2)
        margins += (chosen - rejected).tolist()
    of_kind = defaultdict(list)
    for kind, margin in zip(pairs["kind"], margins, strict=True):
        if kind is not None:
            of_kind[kind].append(margin > 0)
    return {
        "accuracy": share(margin > 0 for margin in margins),
        "margin": sum(margins) / max(1, len(margins)),
        "pairs": len(margins),
        "kinds": {kind: share(right) for kind, right in sorted(of_kind.items())},
    }


@torch.no_grad()
def score_pairs(run: Path, data: Path) -> dict[str, Any]:
    """Score the pairs of a file with the reward model of a run, as the original's rw_eval did.

    Args:
        run: folder of a run whose step 2 is done.
        data: a file or folder of pairs, in any schema that step 2 reads.

    Returns:
        `{"reward_model", "data", "pairs", "accuracy", "margin", "left_out", "scores":
        [{"prompt", "chosen", "rejected", "chosen_score", "rejected_score"}]}`.

    Raises:
        FileNotFoundError: the run has no complete reward model.
        DataError: the file cannot be read, or holds no pairs.
    """
    config = load_config(run / "run.yaml")
    folder = config.models.trained_reward or str(run / STEP_FOLDERS["reward"] / "model")
    if not is_complete_model(folder):
        raise FileNotFoundError(f"{folder} holds no complete reward model; run step 2 first")
    source = load_source(DataSource(path=str(data.absolute())), config.data.cache_dir)
    if "reward" not in source.phases:
        raise DataError(f"{data} holds no pairs; give prompt, chosen and rejected answer")
    tokenizer = load_tokenizer(folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reward = RewardModel.from_pretrained(folder, resolve_dtype(config.dtype)).to(device).eval()
    pairs = [pair for row in source.train if (pair := _tokenised_pair(row, config, tokenizer))]
    collate = PairCollator(tokenizer.pad_token_id)
    size = config.reward.eval_batch_size
    scores = []
    for start in range(0, len(pairs), size):
        rows = pairs[start : start + size]
        batch = collate(rows)
        both = reward.scores(batch["input_ids"].to(device), batch["attention_mask"].to(device))
        for row, chosen, rejected in zip(
            rows, *(half.tolist() for half in both.chunk(2)), strict=True
        ):
            texts = {name: row[name] for name in ("prompt", "chosen", "rejected")}
            scores.append({**texts, "chosen_score": chosen, "rejected_score": rejected})
    margins = [each["chosen_score"] - each["rejected_score"] for each in scores]
    return {
        "reward_model": folder,
        "data": str(data),
        "pairs": len(scores),
        "accuracy": share(margin > 0 for margin in margins),
        "margin": sum(margins) / len(margins) if margins else None,
        "left_out": len(source.train) - len(pairs),
        "scores": scores,
    }


def _tokenised_pair(
    row: dict[str, Any], config: RunConfig, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any] | None:
    """Both answers behind their prompt; None where they do not fit, or one is missing."""
    if row["chosen"] is None or row["rejected"] is None:
        return None
    template = config.data.template
    chosen, rejected = (
        encode_answer(row[name], tokenizer, template) for name in ("chosen", "rejected")
    )
    room = config.reward.max_length - max(len(chosen), len(rejected))
    fitted = fit_prompt(row["prompt"], tokenizer, template, room)
    if fitted is None:
        return None
    ids = {"chosen_ids": fitted.ids + chosen, "rejected_ids": fitted.ids + rejected}
    return {**row, "prompt": row["prompt"][-1]["content"], **ids}


def share(outcomes: Any) -> float | None:
    """Fraction of true outcomes; None without any."""
    counted = list(outcomes)
    return sum(counted) / len(counted) if counted else None
