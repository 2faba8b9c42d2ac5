"""The mixture loss: unsupervised text beside PPO (PPO-ptx, InstructGPT, equation 2)."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from engine.algorithms.language_modeling import causal_lm_loss
from engine.data.batches import GlobalBatches, SftCollator
from engine.distributed import device, rank, world_size
from engine.rlhf.models import RLHFEngine
from engine.trainers.context import StepContext, length_of_training


class Mixture:
    """Blocks of plain text, a micro batch beside each of the answers'.

    Attributes:
        texts_read: micro batches taken so far.
    """

    def __init__(
        self, context: StepContext, engine: RLHFEngine, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        options = context.config.ppo
        self._engine = engine
        self._coef = options.unsupervised_coef
        self._collate = SftCollator(tokenizer.pad_token_id)
        length = options.max_prompt_length + options.max_answer_length
        self._rows = context.text_blocks(tokenizer, length)
        size = engine.plan.micro_batch_size * world_size()
        self._batches = GlobalBatches([length] * len(self._rows), size, context.config.seed)
        length_of_training(options, self._batches, size)
        self.texts_read = 0

    def next_batch(self) -> dict[str, Tensor]:
        """This rank's next micro batch of text on the device; begins again at the end."""
        epoch, index = divmod(self.texts_read, len(self._batches))
        self.texts_read += 1
        batch = self._batches.epoch(epoch)[index]
        (cut,) = self._batches.local_micro_batches(batch, rank(), world_size())
        collated = self._collate([self._rows[row] for row in cut])
        return {name: tensor.to(device()) for name, tensor in collated.items()}

    def loss(self, batch: dict[str, Tensor], tokens: float) -> tuple[Tensor, Tensor, Tensor]:
        """The weighted loss of a micro batch, scaled to stand beside a sum over `tokens`.

        Returns:
            it, and the plain loss summed over the labelled tokens with their number: scalars.
        """
        logits = self._engine.actor(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).logits
        loss_sum, count = causal_lm_loss(logits, batch["labels"])
        micro_batches = self._engine.plan.accumulation * world_size()
        mean = loss_sum / count.clamp(min=1) / micro_batches
        return self._coef * mean * tokens, loss_sum.detach(), count
