"""Step 2 by DPO: the actor learns from pairs directly (Rafailov et al. 2023, arXiv 2305.18290)."""

from __future__ import annotations

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from transformers import PreTrainedModel

from engine.algorithms.language_modeling import sequence_log_probs
from engine.algorithms.preference import dpo_loss, implicit_rewards
from engine.data.batches import LabelledPairCollator
from engine.distributed import device
from engine.log.entries import DPOEvaluation
from engine.planning.flops import forward_flops, training_flops
from engine.trainers.context import StepContext
from engine.trainers.pairs import PairTrainer
from engine.trainers.setup import reference_engine, reference_of


class DPOTrainer(PairTrainer):
    """Trains the SFT model by its implicit rewards: how much likelier than before an answer is."""

    collator = LabelledPairCollator
    evaluation = DPOEvaluation

    def __init__(self, context: StepContext) -> None:
        super().__init__(context, "actor", context.config.dpo, context.sft_model())
        self.ref = reference_engine(context, self.tokenizer, self.plan)

    def load_model(self) -> PreTrainedModel:
        """The SFT model; without dropout unless asked, so that it starts as the reference."""
        dropout = self.context.config.actor.dropout or 0.0
        return self.context.load_actor(self.source, self.tokenizer, dropout)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, implicit rewards of chosen `(pairs,)` and of rejected answers `(pairs,)`."""
        options = self.context.config.dpo
        batch = {name: tensor.to(device()) for name, tensor in batch.items()}
        # First, so that nothing runs through the actor between its forward and backward pass.
        with torch.no_grad(), reference_of(self.engine, self.ref) as ref:
            reference = self._log_probs(ref, batch)
        rewards = implicit_rewards(self._log_probs(self.engine, batch), reference, options.beta)
        chosen, rejected = rewards.chunk(2)
        return dpo_loss(chosen, rejected, options.label_smoothing), chosen, rejected

    @staticmethod
    def _log_probs(model: DeepSpeedEngine, batch: dict[str, Tensor]) -> Tensor:
        """Log-probability of each answer, `(2 * pairs,)`."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return sequence_log_probs(logits, batch["labels"])

    def flops(self, rows: int, seq: int) -> float:
        """Operations of the actor's two passes and of the reference's one."""
        training = training_flops(
            self.shape,
            rows,
            seq,
            checkpointing=self.layout.gradient_checkpointing,
            frozen_base=self.layout.lora.only,
        )
        return training + forward_flops(self.shape, rows, seq)
