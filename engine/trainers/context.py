"""What every step needs: its configuration, folders, number format, data and report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from deepspeed import DeepSpeedEngine
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from engine.checkpoint import Checkpoints
from engine.config.layout import model_source
from engine.config.schema import RunConfig, StepConfig
from engine.config.steps import BY_NAME, StepName
from engine.config.warmup import warmup_problem
from engine.data.batches import GlobalBatches
from engine.data.phases import PhaseData, build_phase, unsupervised_rows
from engine.data.schemas import Phase
from engine.data.templates import install_template
from engine.distributed import rank, rank_zero_first, seed_everything, world_size
from engine.models.load import load_causal_lm, load_tokenizer, resize_for, resolve_model
from engine.precision import dtype_name, resolve_dtype
from engine.report import Report


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's rows are cut: over ranks, then over micro batches."""

    micro_batch_size: int
    accumulation: int

    @classmethod
    def of(cls, options: StepConfig, ranks: int) -> BatchPlan:
        """The plan for a step's options.

        Raises:
            ValueError: the batch size does not divide.
        """
        rows, rest = divmod(options.batch_size, ranks)
        micro = options.micro_batch_size or rows
        if rest or rows % micro:
            raise ValueError(
                f"batch_size={options.batch_size} cannot be cut into micro batches of {micro} "
                f"rows on {ranks} ranks; make it a multiple of {micro * ranks}"
            )
        return cls(micro, rows // micro)


@dataclass(frozen=True)
class StepContext:
    """One step of a run, on this rank."""

    config: RunConfig
    run: Path
    step: StepName
    dtype: torch.dtype
    report: Report

    @classmethod
    def create(cls, config: RunConfig, run: Path, step: StepName) -> StepContext:
        """Prepare a step: its own view of the configuration, its folder, seeds and report."""
        config = config.for_step(step)
        folder = run / BY_NAME[step].folder
        folder.mkdir(parents=True, exist_ok=True)
        # Progress bars redraw one line, but the log is read line by line.
        disable_progress_bar()
        events = cls._events_folder(config, folder) if config.logging.tensorboard else None
        report = Report(folder, None if events is None else events / "pipeline")
        dtype = resolve_dtype(config.dtype)
        report.note(f"dtype {dtype_name(dtype)}, {world_size()} ranks, seed {config.seed}")
        seed_everything(config.seed)
        return cls(config, run, step, dtype, report)

    @property
    def folder(self) -> Path:
        """The step's own folder."""
        return self.run / BY_NAME[self.step].folder

    @staticmethod
    def _events_folder(config: RunConfig, folder: Path) -> Path:
        chosen = config.logging.tensorboard_dir
        return Path(chosen) / folder.name if chosen else folder / "tensorboard"

    def monitor(self, name: str) -> tuple[str, str] | None:
        """Folder and name of the events of one engine, where TensorBoard is on."""
        if not self.config.logging.tensorboard:
            return None
        return str(self._events_folder(self.config, self.folder)), name

    def resolve_model(self, name: str) -> str:
        """Path or Hub id of a base model; rank 0 builds an embedded one before the others look.

        transformers writes weights only on rank 0.
        """
        with rank_zero_first():
            return resolve_model(name)

    def load_tokenizer(self, source: str) -> PreTrainedTokenizerBase:
        """The tokenizer of a model; it carries the dialogue template that the run trains with."""
        data = self.config.data
        tokenizer = load_tokenizer(
            source,
            trust_remote_code=self.config.models.trust_remote_code,
            end_of_conversation_token=data.end_of_conversation_token,
        )
        install_template(tokenizer, data.template)
        return tokenizer

    def load_actor(
        self, source: str, tokenizer: PreTrainedTokenizerBase, dropout: float | None = None
    ) -> PreTrainedModel:
        """The base model or one made from it, with room for the tokenizer's tokens."""
        trusted = self.config.models.trust_remote_code
        model = load_causal_lm(source, self.dtype, dropout, trust_remote_code=trusted)
        resize_for(model, tokenizer)
        return model

    def build_data(self, tokenizer: PreTrainedTokenizerBase, phase: Phase) -> PhaseData:
        """Tokenised data of a phase: rank 0 builds it, the others find it in the cache."""
        self.report.phase("tokenising")
        with rank_zero_first():
            data = build_phase(self.config, tokenizer, phase, note=self.report.phase)
        counts = ", ".join(f"{name} {n:.3g}" for name, n in data.counts.items() if n)
        self.report.note(
            f"data: {len(data.train)} rows to train on, {len(data.eval)} held out; {counts}"
        )
        return data

    def text_blocks(self, tokenizer: PreTrainedTokenizerBase, length: int) -> Dataset:
        """Plain text for PPO's unsupervised loss, in blocks of `length`; see `build_data`."""
        with rank_zero_first():
            return unsupervised_rows(self.config, tokenizer, length, note=self.report.phase)

    def warn_if_nothing_is_held_out(self, data: PhaseData, measured: str) -> None:
        """Say that `measured`, a mean over the held-out rows, will have no value."""
        if not len(data.eval):
            self.report.warning(
                f"no held-out row is left to evaluate, so {measured} is not measured and no gate "
                "on it is reached; hold out more rows (data.eval_share), or raise the step's "
                "max_length if they are too long"
            )

    def eval_batches(self, rows: int, batch_size: int) -> list[tuple[list[int], bool]]:
        """This rank's batches of row numbers, each with whether its results count.

        Each row is in one batch that counts, on one rank. Under ZeRO-3 all ranks gather the
        parameters together, so a rank with fewer batches computes its first row again.
        """
        own = range(rank(), rows, world_size())
        starts = range(0, len(own), batch_size)
        batches = [(list(own[start : start + batch_size]), True) for start in starts]
        # Rank 0 has the most rows.
        most = math.ceil(math.ceil(rows / world_size()) / batch_size)
        return batches + [([0], False)] * (most - len(batches))

    def warn_of_warmup(self, steps: int) -> None:
        """Warn of a warm-up that outlasts a training of so many steps."""
        problem = warmup_problem(self.step, getattr(self.config, self.step), steps)
        if problem is not None:
            self.report.warning(problem)

    def checkpoints(self, engines: Mapping[str, DeepSpeedEngine]) -> Checkpoints[Any]:
        """The checkpoints of this step's engines."""
        options = self.config.checkpoint
        return Checkpoints(
            self.run, self.folder, engines, self.report, options.interval, options.keep_last
        )

    def sft_model(self) -> str:
        """The model that step 1 made, or the finished one given in its place."""
        return model_source(self.config, self.run, "sft")

    def trained_reward_model(self) -> str:
        """The model that step 2 made, or the finished one given in its place."""
        return model_source(self.config, self.run, "reward")


def length_of_training(options: StepConfig, batches: GlobalBatches, batch_size: int) -> int:
    """Number of steps: all epochs, or fewer if `max_steps` says so.

    Raises:
        ValueError: the data do not fill one batch.
    """
    if batches.batch_size < batch_size:
        raise ValueError(
            f"this step has {len(batches.lengths)} rows to train on, fewer than its batch of "
            f"{batch_size}; give it more data, a larger share of data.split, or a smaller batch"
        )
    steps = options.epochs * len(batches)
    return steps if options.max_steps is None else min(steps, options.max_steps)
