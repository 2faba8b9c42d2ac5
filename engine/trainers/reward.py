"""Step 2: the reward model, trained to score chosen answers above rejected ones."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.algorithms.preference import gather_last, pairwise_loss, pairwise_loss_all_tokens
from engine.data.batches import PairCollator
from engine.distributed import device
from engine.log.entries import RewardEvaluation
from engine.models.load import resize_for
from engine.models.reward import RewardModel
from engine.planning.flops import training_flops
from engine.trainers.context import StepContext
from engine.trainers.pairs import PairTrainer


class RewardTrainer(PairTrainer):
    """Trains a scalar score on pairs (InstructGPT, equation 1); its head always trains."""

    collator = PairCollator
    evaluation = RewardEvaluation

    def __init__(self, context: StepContext) -> None:
        base = context.config.models.reward
        source = context.sft_model() if base == "sft" else context.resolve_model(base)
        super().__init__(context, "critic", context.config.reward, source)

    def load_model(self) -> RewardModel:
        """The base model with a head for the score."""
        config = self.context.config
        model = RewardModel.from_pretrained(
            self.source,
            self.context.dtype,
            dropout=config.critic.dropout,
            trust_remote_code=config.models.trust_remote_code,
            seed=config.seed,
        )
        resize_for(model.model, self.tokenizer)
        return model

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Summed loss, chosen scores `(pairs,)` and rejected scores `(pairs,)` of a batch."""
        options = self.context.config.reward
        ids, mask = batch["input_ids"].to(device()), batch["attention_mask"].to(device())
        values = self.engine(input_ids=ids, attention_mask=mask)
        chosen, rejected = gather_last(values, mask).chunk(2)
        if options.loss == "last_token":
            loss = pairwise_loss(chosen, rejected)
        else:
            loss = pairwise_loss_all_tokens(
                *values.chunk(2),
                *(part for pair in zip(ids.chunk(2), mask.chunk(2), strict=True) for part in pair),
            )
        if options.score_penalty:
            penalty = torch.cat((chosen, rejected)).square().sum() / 2
            loss = loss + options.score_penalty * penalty
        return loss, chosen, rejected

    def flops(self, rows: int, seq: int) -> float:
        """Operations of a forward and a backward pass."""
        return training_flops(
            self.shape,
            rows,
            seq,
            checkpointing=self.layout.gradient_checkpointing,
            frozen_base=self.layout.lora.only,
            head="score",
        )
