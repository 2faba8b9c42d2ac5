"""The models of a run side by side on held-out prompts, and the reward model on held-out pairs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engine.algorithms.averages import mean
from engine.algorithms.kl import k1
from engine.algorithms.language_modeling import causal_lm_loss, perplexity, sequence_log_probs
from engine.algorithms.log_probs import token_log_probs
from engine.algorithms.masks import length_mask
from engine.algorithms.preference import implicit_rewards
from engine.config.layout import model_source
from engine.config.loading import load_config
from engine.config.schema import DataSource, RunConfig
from engine.config.steps import BY_NAME
from engine.data.batches import LabelledPairCollator, PairCollator, PromptCollator, SftCollator
from engine.data.files import DataError, Row
from engine.data.phases import build_phase, eval_prompts
from engine.data.sources import load_source
from engine.data.templates import encode_answer, fit_prompt
from engine.generation.decode import build_decoder, decode
from engine.generation.sampling import Generation, Sampling
from engine.models.folders import is_complete_model
from engine.models.load import load_causal_lm, load_tokenizer, resize_for, resolve_model
from engine.models.positions import position_arguments
from engine.models.reward import RewardModel
from engine.precision import resolve_dtype

_SAMPLES_SHOWN = 8


class PairFigures(TypedDict):
    """How a rating does on held-out pairs: the share that it gets right, also by kind of pair.

    `margin` is the mean of chosen less rejected. None where there is no pair.
    """

    accuracy: float | None
    margin: float | None
    pairs: int
    kinds: dict[str, float | None]


class Evaluation(TypedDict):
    """The models of a run on held-out rows; None where the data or the run has no such thing.

    `models` has the figures of each by name: `perplexity`, `reward_mean`, `reward_std`,
    `exact_match`, `preferred_style`, and `kl` from the SFT model in nats per answer.
    `implicit_rewards` are those of a DPO model. An answer has its `prompt`, and each model's text
    by the model's name.
    """

    prompts: int
    models: dict[str, dict[str, float | None]]
    reward_model: PairFigures | None
    implicit_rewards: PairFigures | None
    answers: list[dict[str, str]]


class ScoredPair(TypedDict):
    """A pair of a file with the reward model's scores; the prompt is its last turn."""

    prompt: str
    chosen: str
    rejected: str
    chosen_score: float
    rejected_score: float


class ScoredPairs(TypedDict):
    """The pairs of a file; those that do not fit into the model are `left_out`."""

    reward_model: str
    data: str
    pairs: int
    accuracy: float | None
    margin: float | None
    left_out: int
    scores: list[ScoredPair]


@dataclass(frozen=True)
class Bench:
    """What every model of a run is measured on.

    Attributes:
        pairs: tokenised held-out pairs; empty where the run does not need them.
    """

    config: RunConfig
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Row]
    sft_rows: Dataset
    pairs: Dataset | list[Row]
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class Sample:
    """Prompts with sampled answers, on the CPU.

    Attributes:
        ids: prompts and answers, `(batch, seq)`.
        attention_mask: `(batch, seq)`.
        answers: the last columns of `ids`, `(batch, answer)`.
        mask: True on the answers' tokens, `(batch, answer)`.
    """

    ids: Tensor
    attention_mask: Tensor
    answers: Tensor
    mask: Tensor


@dataclass
class Findings:
    """What a model gave, kept after it is freed; lists of CPU tensors have one element per batch.

    Attributes:
        perplexity: on the held-out dialogues.
        greedy: the greedy answer to each prompt.
        sampled: the answer to each prompt sampled at temperature 1.
        samples: the same as tokens.
        log_probs: of the samples' tokens, `(batch, answer)`.
        reference: of the same under the SFT model.
        pairs: log-probability of each answer of the held-out pairs, `(2 * pairs,)`.
    """

    perplexity: float | None
    greedy: list[str]
    sampled: list[str]
    samples: list[Sample]
    log_probs: list[Tensor]
    reference: list[Tensor] = field(default_factory=list)
    pairs: list[Tensor] = field(default_factory=list)


def evaluate(run: Path) -> Evaluation:
    """Measure base, SFT model, DPO model or actor and its average, and what rates answers.

    Exact match is of greedy answers, style, reward and KL of answers sampled at temperature 1. One
    model is in memory at a time.

    Args:
        run: folder of a run whose step 1 is done.
    """
    config = load_config(run / "run.yaml")
    folders = model_folders(config, run)
    reward_folder = model_source(config, run, "reward")
    has_reward = is_complete_model(reward_folder)
    has_pairs = (has_reward or "dpo" in folders) and config.data.split[1] > 0
    tokenizer = load_tokenizer(folders["sft"])
    bench = Bench(
        config=config,
        tokenizer=tokenizer,
        prompts=eval_prompts(config, tokenizer)[: config.data.eval_rows],
        sft_rows=build_phase(config, tokenizer, "sft").eval,
        pairs=build_phase(config, tokenizer, "reward").eval if has_pairs else [],
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=resolve_dtype(config.dtype),
    )
    found = {
        name: examine(bench, folder, rates_pairs=name == "dpo")
        for name, folder in folders.items()
        if name != "sft"
    }
    found["sft"] = examine(bench, folders["sft"], "dpo" in folders, list(found.values()))
    scores, ratings = rate(bench, reward_folder, found) if has_reward else ({}, [])
    implicit = []
    if "dpo" in folders:
        both = zip(found["dpo"].pairs, found["sft"].pairs, strict=True)
        implicit = [implicit_rewards(dpo, sft, config.dpo.beta) for dpo, sft in both]
    return {
        "prompts": len(bench.prompts),
        "models": {name: figures(bench, found[name], scores.get(name)) for name in folders},
        "reward_model": figures_of_pairs(bench.pairs, ratings)
        if has_pairs and has_reward
        else None,
        "implicit_rewards": figures_of_pairs(bench.pairs, implicit)
        if has_pairs and "dpo" in folders
        else None,
        "answers": [
            {
                "prompt": prompt["prompt"][-1]["content"],
                **{name: found[name].greedy[row] for name in folders},
            }
            for row, prompt in enumerate(bench.prompts[:_SAMPLES_SHOWN])
        ],
    }


def model_folders(config: RunConfig, run: Path) -> dict[str, str]:
    """Base, SFT model, DPO model, actor and average of a run, those that exist."""
    step3 = run / BY_NAME["ppo"].folder
    finished = model_source(config, run, "sft")
    candidates = {
        "sft": finished,
        "dpo": model_source(config, run, "dpo"),
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
def examine(
    bench: Bench, folder: str, rates_pairs: bool, others: Sequence[Findings] | None = None
) -> Findings:
    """What the model in `folder` gives; it is loaded here, and freed afterwards.

    Args:
        bench: what to measure it on.
        folder: of the model.
        rates_pairs: whether the likelihood of the held-out pairs is wanted.
        others: what others found, if this model is the reference of them and of itself; they get
            its log-probabilities of their samples.
    """
    model = load(bench, folder)
    greedy = [text for _, _, texts in answer(bench, model, greedy=True) for text in texts]
    sampled: list[str] = []
    samples: list[Sample] = []
    for batch, generation, texts in answer(bench, model, greedy=False):
        sampled += texts
        mask = length_mask(generation.lengths, generation.answers.shape[1])
        ids = torch.cat((batch["input_ids"], generation.answers), dim=1)
        attention_mask = torch.cat((batch["attention_mask"], mask.long()), dim=1)
        samples.append(Sample(*(x.cpu() for x in (ids, attention_mask, generation.answers, mask))))
    found = Findings(
        perplexity=mean_perplexity(bench, model),
        greedy=greedy,
        sampled=sampled,
        samples=samples,
        log_probs=[sample_log_probs(bench, model, sample) for sample in samples],
        pairs=[pair_log_probs(model, batch) for batch in pair_batches(bench)]
        if rates_pairs
        else [],
    )
    if others is not None:
        found.reference = found.log_probs
        for other in others:
            other.reference = [sample_log_probs(bench, model, each) for each in other.samples]
    return found


def sample_log_probs(bench: Bench, model: nn.Module, sample: Sample) -> Tensor:
    """Log-probabilities of the answers' tokens, fp32 `(batch, answer)`.

    By the model's own forward pass, for policy and reference alike: the decoder rounds differently,
    and in 16 bits that difference would show up as KL.
    """
    ids, mask = sample.ids.to(bench.device), sample.attention_mask.to(bench.device)
    logits = model(input_ids=ids, attention_mask=mask, **position_arguments(model, mask)).logits
    width = sample.answers.shape[1]
    # The logits at a position are those of the next token.
    return token_log_probs(logits[:, -width - 1 : -1], ids[:, -width:]).cpu()


def pair_log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Log-probability of each answer of a batch of pairs, `(2 * pairs,)`."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return sequence_log_probs(logits, batch["labels"]).cpu()


@torch.no_grad()
def rate(
    bench: Bench, folder: str, found: Mapping[str, Findings]
) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
    """Scores of each model's samples, and of the held-out pairs, `(2 * pairs,)` per batch.

    The reward model in `folder` is loaded here, and freed afterwards.
    """
    reward = RewardModel.from_pretrained(folder, bench.dtype).to(bench.device).eval()

    def scores(ids: Tensor, mask: Tensor) -> Tensor:
        return reward.scores(ids.to(bench.device), mask.to(bench.device)).cpu()

    of_samples = {
        name: [scores(sample.ids, sample.attention_mask) for sample in each.samples]
        for name, each in found.items()
    }
    pairs = [scores(batch["input_ids"], batch["attention_mask"]) for batch in pair_batches(bench)]
    return of_samples, pairs


def figures(bench: Bench, found: Findings, scores: list[Tensor] | None) -> dict[str, float | None]:
    """One model's figures; None for what there is no row to measure on."""
    references = [prompt["references"] for prompt in bench.prompts]
    styles = [prompt["preferred_style"] for prompt in bench.prompts]
    all_scores = torch.cat(scores) if scores else None
    divergences = [
        (k1(own, reference) * sample.mask).sum(dim=1)
        for own, reference, sample in zip(
            found.log_probs, found.reference, found.samples, strict=True
        )
    ]
    return {
        "perplexity": found.perplexity,
        "reward_mean": None if all_scores is None else float(all_scores.mean()),
        "reward_std": None if all_scores is None else float(all_scores.std(correction=0)),
        "exact_match": share(
            text in known for text, known in zip(found.greedy, references, strict=True) if known
        ),
        "preferred_style": share(
            re.fullmatch(style, text) is not None
            for text, style in zip(found.sampled, styles, strict=True)
            if style
        ),
        "kl": float(torch.cat(divergences).mean()) if divergences else None,
    }


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


def mean_perplexity(bench: Bench, model: nn.Module) -> float | None:
    """Perplexity over the answer tokens of the held-out dialogues; None without any."""
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
    return perplexity(mean(loss, tokens))


def pair_batches(bench: Bench) -> Iterator[dict[str, Tensor]]:
    """The held-out pairs in batches `(2 * pairs, seq)`, all chosen, then all rejected."""
    config, pairs = bench.config, bench.pairs
    collate = LabelledPairCollator(bench.tokenizer.pad_token_id)
    size = config.pair_options.eval_batch_size
    for start in range(0, len(pairs), size):
        rows = collate([pairs[row] for row in range(start, len(pairs))[:size]])
        yield {name: tensor.to(bench.device) for name, tensor in rows.items()}


def figures_of_pairs(pairs: Iterable[Row], ratings: Sequence[Tensor]) -> PairFigures:
    """Accuracy and margin of a rating on held-out pairs, also by kind of pair.

    Args:
        pairs: the rows.
        ratings: of each batch, `(2 * pairs,)`, all chosen, then all rejected.
    """
    margins: list[float] = []
    for batch in ratings:
        chosen, rejected = batch.chunk(2)
        margins += (chosen - rejected).tolist()
    of_kind = defaultdict(list)
    for pair, margin in zip(pairs, margins, strict=True):
        if pair["kind"] is not None:
            of_kind[pair["kind"]].append(margin > 0)
    return {
        "accuracy": share(margin > 0 for margin in margins),
        "margin": mean(sum(margins), len(margins)),
        "pairs": len(margins),
        "kinds": {kind: share(right) for kind, right in sorted(of_kind.items())},
    }


@torch.no_grad()
def score_pairs(run: Path, data: Path) -> ScoredPairs:
    """Score the pairs of a file with the reward model of a run, as the original's rw_eval did.

    Args:
        run: folder of a run whose step 2 is done.
        data: a file or folder of pairs, in any schema that step 2 reads.

    Raises:
        FileNotFoundError: the run has no complete reward model.
        DataError: the file cannot be read, or holds no pairs.
    """
    config = load_config(run / "run.yaml")
    folder = model_source(config, run, "reward")
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
    scores: list[ScoredPair] = []
    for start in range(0, len(pairs), size):
        rows = pairs[start : start + size]
        batch = collate(rows)
        both = reward.scores(batch["input_ids"].to(device), batch["attention_mask"].to(device))
        for row, chosen, rejected in zip(
            rows, *(half.tolist() for half in both.chunk(2)), strict=True
        ):
            scores.append(
                {
                    "prompt": row["prompt"],
                    "chosen": row["chosen"],
                    "rejected": row["rejected"],
                    "chosen_score": chosen,
                    "rejected_score": rejected,
                }
            )
    margins = [each["chosen_score"] - each["rejected_score"] for each in scores]
    return {
        "reward_model": folder,
        "data": str(data),
        "pairs": len(scores),
        "accuracy": share(margin > 0 for margin in margins),
        "margin": mean(sum(margins), len(margins)),
        "left_out": len(source.train) - len(pairs),
        "scores": scores,
    }


def _tokenised_pair(row: Row, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Row | None:
    """Both answers after their prompt; None where they do not fit, or one is missing."""
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


def share(outcomes: Iterable[bool]) -> float | None:
    """Fraction of true outcomes; None without any."""
    counted = list(outcomes)
    return sum(counted) / len(counted) if counted else None
