"""The models of step 3: actor, reference, critic, reward model, and the actor's average."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.algorithms.log_probs import token_log_probs
from engine.algorithms.preference import gather_last
from engine.config.schema import RoleConfig
from engine.config.steps import RoleName
from engine.models.positions import position_arguments
from engine.models.reward import RewardModel
from engine.planning.shapes import ModelShape
from engine.rlhf.actor_average import ActorAverage
from engine.trainers.context import StepContext
from engine.trainers.engines import frozen_engine, zero3_loading
from engine.trainers.setup import (
    TrainedModel,
    frozen_config,
    reference_engine,
    reference_of,
    trained_model,
)


class RLHFEngine:
    """Holds the engines of step 3 and computes with them.

    All per-token results are `(batch, answer)`: entry t belongs to the answer's token t, its
    log-probability and value to the state before it.

    Attributes:
        actor: trained, from the SFT model.
        ref: frozen, where the actor started; None where it is the actor without its adapters.
        critic: trained to predict returns, from the reward model; None where none is needed.
        reward: frozen, the reward model; None where all rewards are functions.
        actor_ema: average of the actor's weights, or None.
    """

    def __init__(
        self,
        context: StepContext,
        tokenizer: PreTrainedTokenizerBase,
        optimizer_steps: int,
        has_critic: bool = True,
        has_reward: bool = True,
    ) -> None:
        self.context = context
        config, options = context.config, context.config.ppo

        def load_actor() -> PreTrainedModel:
            dropout = config.actor.dropout or 0.0
            return context.load_actor(context.sft_model(), tokenizer, dropout)

        def train(
            role: RoleName, load: Callable[[], PreTrainedModel | RewardModel]
        ) -> TrainedModel:
            rates: RoleConfig = getattr(config, role)
            return trained_model(
                context,
                role,
                options,
                rates,
                optimizer_steps,
                load,
                name=role,
                eps=options.adam_eps,
            )

        actor = train("actor", load_actor)
        self.plan = actor.plan
        self.actor, self.actor_shape = actor.engine, actor.shape
        self.actor_parameters = actor.parameters
        self.ref = reference_engine(context, tokenizer, self.plan)
        critic = train("critic", self._load_critic) if has_critic else None
        self.critic = None if critic is None else critic.engine
        self.critic_shape = None if critic is None else critic.shape
        self.critic_parameters = None if critic is None else critic.parameters
        self.reward = self._load_reward() if has_reward else None
        self.reward_shape = (
            None
            if self.reward is None
            else ModelShape.if_known(self.reward.module.config.to_dict())
        )
        self.actor_ema = (
            ActorAverage(self.actor, config.ema.decay, on_host=config.actor.offload)
            if config.ema.enabled
            else None
        )

    @property
    def trained(self) -> dict[str, DeepSpeedEngine]:
        """The engines that train, by role."""
        both = {"actor": self.actor, "critic": self.critic}
        return {role: engine for role, engine in both.items() if engine is not None}

    def _load_critic(self) -> RewardModel:
        config = self.context.config
        return RewardModel.from_pretrained(
            self.context.trained_reward_model(),
            self.context.dtype,
            dropout=config.critic.dropout or 0.0,
            trust_remote_code=config.models.trust_remote_code,
        )

    def _load_reward(self) -> DeepSpeedEngine:
        self.context.report.phase("loading the reward model")
        config = self.context.config
        offload = config.ref.offload_reward
        engine_config = frozen_config(self.context, config.critic, offload, self.plan)
        with zero3_loading(engine_config):
            model = RewardModel.from_pretrained(
                self.context.trained_reward_model(),
                self.context.dtype,
                trust_remote_code=config.models.trust_remote_code,
            )
        return frozen_engine(model, engine_config)

    def answer_logits(
        self, model: DeepSpeedEngine, ids: Tensor, mask: Tensor, width: int
    ) -> Tensor:
        """Logits that predict the last `width` tokens of each row: `(batch, width, vocabulary)`."""
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=False,
            logits_to_keep=width + 1,
            **position_arguments(model.module, mask),
        ).logits
        return logits[:, -width - 1 : -1]

    @torch.no_grad()
    def ref_log_probs(self, ids: Tensor, mask: Tensor, answers: Tensor) -> Tensor:
        """Log-probabilities of the answers under the reference, `(batch, answer)`."""
        with reference_of(self.actor, self.ref) as model:
            logits = self.answer_logits(model, ids, mask, answers.shape[1])
        return token_log_probs(logits, answers, self.context.config.ppo.temperature)

    def values(self, ids: Tensor, mask: Tensor, width: int) -> Tensor:
        """The critic's values of the states before the last `width` tokens, `(batch, width)`."""
        assert self.critic is not None
        return self.critic(input_ids=ids, attention_mask=mask)[:, -width - 1 : -1]

    @torch.no_grad()
    def scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The reward model's score of each row at its last token, `(batch,)`."""
        assert self.reward is not None
        return gather_last(self.reward(input_ids=ids, attention_mask=mask), mask)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Actor and critic without dropout inside, training after."""
        for engine in self.trained.values():
            engine.eval()
        try:
            yield
        finally:
            for engine in self.trained.values():
                engine.train()
