"""One class for reward model and critic: a language model with a scalar head."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from engine.algorithms.preference import gather_last
from engine.models.folders import ModelError
from engine.models.load import load_config, load_weights
from engine.models.positions import position_arguments

_HEAD_STD = 0.02
_OTHER_FAMILY = (
    "set models.reward to a causal language model that can, such as an OPT, Llama or GPT-2 with "
    "the same tokenizer"
)


class ScoreHead(nn.Linear):
    """The head without bias of a reward model; its product is in fp32 in every dtype.

    A score in bf16 has 8 bits, so many answers would tie. The weight keeps the dtype of its base,
    since ZeRO-3 refuses mixed ones; its rounding is the same for all answers and makes no ties.
    """

    @classmethod
    def of(cls, head: nn.Linear) -> ScoreHead:
        """A head that holds the weight of `head`, also one that ZeRO-3 has partitioned."""
        own = cls(head.in_features, head.out_features, bias=False, device="meta")
        own.weight = head.weight
        return own

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states of any dtype `(..., hidden)` to fp32 `(..., labels)`."""
        # Autocast would take both operands back to 16 bits.
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), self.weight.float())


class RewardModel(nn.Module):
    """A value at every token, and a score at the last one.

    `model` is an `AutoModelForSequenceClassification` with one label and a head without bias, which
    is what gets saved.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        dtype: torch.dtype,
        dropout: float | None = None,
        trust_remote_code: bool = False,
        seed: int = 0,
    ) -> RewardModel:
        """Load a saved reward model, or a causal language model that gets a fresh head.

        The head's format is that of the base, since ZeRO-3 refuses mixed ones.

        Args:
            path: local folder or Hub id.
            dtype: format of the weights.
            dropout: probability for every dropout field of its config; None leaves them.
            trust_remote_code: run Python code that comes with the model.
            seed: of a fresh head, the same on every rank.

        Raises:
            ModelError: not found, of a family without such a head, more than one label, or weights
                other than the head missing.
        """
        config = load_config(path, dropout, trust_remote_code)
        is_classifier = any(
            "ForSequenceClassification" in name for name in config.architectures or ()
        )
        if is_classifier and config.num_labels != 1:
            raise ModelError(
                f"{path!r} classifies into {config.num_labels} labels; a reward model has 1"
            )
        config.num_labels = 1
        check_classifier(config)
        model, loading = load_weights(
            AutoModelForSequenceClassification, path, config, dtype, trust_remote_code
        )
        head = score_head(model)
        missing = sorted(set(loading["missing_keys"]) - {"score.weight"})
        if missing:
            raise ModelError(
                f"the weights in {path!r} lack {missing[:3]}, which would start at random; give a "
                "complete causal language model or reward model"
            )
        if "score.weight" in loading["missing_keys"]:
            _initialize_head(head, seed)
        model.score = ScoreHead.of(head)
        return cls(model)

    @property
    def config(self) -> PretrainedConfig:
        """The config of the inner model."""
        return self.model.config

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """A value at every token, fp32 `(batch, seq)`; those at padding mean nothing."""
        decoder = self.model.base_model
        hidden = decoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            use_cache=False,
            **position_arguments(decoder, attention_mask),
        ).last_hidden_state
        return self.model.score(hidden).squeeze(-1)

    def values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The same as calling the model: fp32 `(batch, seq)`."""
        return self(input_ids, attention_mask)

    def scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The value at the last real token of each row, left or right padded; fp32 `(batch,)`."""
        return gather_last(self(input_ids, attention_mask), attention_mask)


def check_classifier(config: PretrainedConfig) -> None:
    """Refuse a family that transformers has no classifier for, before anything is loaded.

    Raises:
        ModelError: there is none.
    """
    remote = getattr(config, "auto_map", None) or {}
    name = AutoModelForSequenceClassification.__name__
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and name not in remote:
        raise ModelError(
            f"transformers has no {name} for models of type {config.model_type!r}, so they cannot "
            f"be reward models; {_OTHER_FAMILY}"
        )


def score_head(model: PreTrainedModel) -> nn.Linear:
    """The head of a classifier of transformers that can be a reward model.

    Raises:
        ModelError: it has another head.
    """
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ModelError(
            f"models of type {model.config.model_type!r} have no linear head 'score' without bias, "
            f"so they cannot be reward models; {_OTHER_FAMILY}"
        )
    return head


@torch.no_grad()
def _initialize_head(head: nn.Linear, seed: int) -> None:
    """Fill a fresh head from a generator of its own, so that no other random state matters."""
    generator = torch.Generator().manual_seed(seed)
    fresh = torch.randn(1, head.in_features, generator=generator) * _HEAD_STD
    if not hasattr(head.weight, "ds_id"):
        head.weight.copy_(fresh)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(head.weight, modifier_rank=0):
        if dist.get_rank() == 0:
            head.weight.copy_(fresh)
