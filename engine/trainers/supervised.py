"""What training on a fixed set of rows has in common: SFT, the reward model and DPO."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from engine.checkpoint import Checkpoints
from engine.config.schema import PretrainingStyleStep, RoleConfig
from engine.config.steps import RoleName
from engine.data.batches import GlobalBatches, PairCollator, SftCollator, row_lengths
from engine.data.schemas import Phase
from engine.log import write
from engine.models.adapters import save_adapters
from engine.models.reward import RewardModel
from engine.models.save import save_model
from engine.trainers.context import StepContext, length_of_training
from engine.trainers.setup import trained_model
from engine.trainers.watchdog import Watchdog

Batch = dict[str, Tensor]
State = TypeVar("State", bound=Mapping[str, object])


class SupervisedTrainer(ABC, Generic[State]):
    """Trains one model, with evaluations before, between and after epochs.

    The model, the loss and what is measured are the subclass's.

    Attributes:
        phase: whose data it reads.
        columns: of a row, the token ids that it trains on.
        collator: makes batches of rows, from the id of padding.
        measured: what an evaluation measures, for the log.
        kept: what a checkpoint keeps beside the engine.
    """

    phase: ClassVar[Phase]
    columns: ClassVar[tuple[str, ...]]
    collator: ClassVar[type[SftCollator | PairCollator]]
    measured: ClassVar[str]
    kept: State

    def __init__(
        self, context: StepContext, role: RoleName, options: PretrainingStyleStep, source: str
    ) -> None:
        self.context = context
        self.options = options
        self.source = source
        self.layout: RoleConfig = getattr(context.config, role)

        # 1. The tokenizer and the data.
        self.tokenizer = context.load_tokenizer(source)
        self.data = context.build_data(self.tokenizer, self.phase)
        context.warn_if_nothing_is_held_out(self.data, self.measured)
        self.collate = self.collator(self.tokenizer.pad_token_id)
        lengths = row_lengths(self.data.train, *self.columns)
        self.batches = GlobalBatches(lengths, options.batch_size, context.config.seed)
        self.total_steps = length_of_training(options, self.batches, options.batch_size)

        # 2. The model in its engine.
        context.warn_of_warmup(self.total_steps)
        trained = trained_model(context, role, options, options, self.total_steps, self.load_model)
        self.engine, self.shape, self.plan = trained.engine, trained.shape, trained.plan
        self.parameters = trained.parameters
        self.checkpoints: Checkpoints[State] = context.checkpoints({context.step: self.engine})
        self.watchdog = Watchdog(context.report, {role: self.engine})

    @abstractmethod
    def load_model(self) -> PreTrainedModel | RewardModel:
        """The model to train."""

    @abstractmethod
    def train_step(self, step: int, rows: Sequence[int]) -> None:
        """One optimizer step on a global batch of rows."""

    @abstractmethod
    def evaluate(self, epoch: int, step: int) -> None:
        """Measure the model on the held-out rows, over all ranks, and report it.

        What is measured is None, "NA" in the log, where no row is held out.

        Args:
            epoch: from 1; 0 before training.
            step: the last optimizer step done, from 0; -1 before training.
        """

    @abstractmethod
    def score(self) -> float | None:
        """What the last evaluation measured, higher is better; None if it measured nothing."""

    def train(self) -> bool:
        """Run all optimizer steps, from the newest checkpoint on if there is one.

        Returns:
            whether all steps are done; False if a stop was requested.
        """
        options, report = self.options, self.context.report
        per_epoch = len(self.batches)
        report.line(write.running_training())
        resumed = self.checkpoints.resume()
        if resumed is None:
            self.evaluate(epoch=0, step=-1)
        else:
            self.kept = resumed.state
        for step in range(0 if resumed is None else resumed.step, self.total_steps):
            epoch, index = divmod(step, per_epoch)
            if index == 0:
                report.line(write.beginning_of_epoch(epoch + 1, options.epochs, per_epoch))
            self.train_step(step, self.batches.epoch(epoch)[index])
            between = options.eval_interval and (step + 1) % options.eval_interval == 0
            if between or self.ends_epoch(step):
                self.evaluate(epoch + 1, step)
            if self.checkpoints.after_step(step + 1, lambda: self.kept, self.score()):
                return False
        return True

    def ends_epoch(self, step: int) -> bool:
        """Whether a step is the last of an epoch, or of a training that ends within one."""
        return (step + 1) % len(self.batches) == 0 or step + 1 == self.total_steps

    def check(self, step: int, loss: float, gradient_norm: float) -> None:
        """Report the optimizer where it is due, and stop a training that has diverged."""
        if (step + 1) % self.context.config.logging.optimizer_interval == 0:
            self.context.report.optimizer(self.engine)
        self.watchdog.check(step, {"loss": loss, "gradient_norm": gradient_norm})

    def save(self) -> None:
        """Write the model as a complete Hugging Face folder."""
        report, folder = self.context.report, self.context.folder
        report.line(write.saving_model())
        save_model(self.engine.module, self.tokenizer, folder / "model")
        if self.layout.lora.export:
            save_adapters(self.engine.module, self.source, folder / "adapters")
        report.line(write.step_finished(str(folder / "model")))
