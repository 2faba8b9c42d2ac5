"""The models of step 3: actor, reference, critic, reward model, and the actor's average."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from engine.algorithms.log_probs import token_log_probs
from engine.algorithms.preference import gather_last
from engine.config.deepspeed import Role, deepspeed_config, role_layout
from engine.config.schema import RoleConfig
from engine.distributed import world_size
from engine.models.families import position_arguments
from engine.models.lora import add_lora, describe_lora, parameter_groups
from engine.models.quantization import quantize_frozen
from engine.models.reward import RewardModel
from engine.planning.shapes import ModelShape
from engine.precision import dtype_name
from engine.rlhf.actor_average import ActorAverage
from engine.trainers.context import BatchPlan, StepContext
from engine.trainers.engines import frozen_engine, training_engine, zero3_loading
from engine.trainers.setup import (
    frozen_config,
    parameter_count,
    reference_engine,
    reference_of,
)


class RLHFEngine:
    """Holds the four engines of step 3 and computes with them.

    All per-token results are `(batch, answer)`: entry t belongs to the answer's token t, its
    log-probability and value to the state before it.

    Attributes:
        actor: trained by PPO, from the SFT model.
        ref: frozen, where the actor started; None where it is the actor without its adapters.
        critic: trained to predict returns, from the reward model.
        reward: frozen, the reward model.
        actor_ema: average of the actor's weights, or None.
    """

    def __init__(
        self, context: StepContext, tokenizer: PreTrainedTokenizerBase, optimizer_steps: int
    ) -> None:
        self.context = context
        self.tokenizer = tokenizer
        config, report = context.config, context.report
        self.plan = BatchPlan.of(config.ppo, world_size())

        report.phase("loading the actor")
        actor = self._load_actor(config.actor)
        self.actor_shape = ModelShape.if_known(actor.config.to_dict())
        self.actor_parameters = parameter_count(actor)
        if config.actor.gradient_checkpointing:
            actor.activation_checkpointing_enable()
        if config.actor.lora.rank:
            actor = add_lora(actor, config.actor.lora)
            report.note(f"actor {describe_lora(actor)}")
        self.actor = self._train(actor, "actor", config.actor, optimizer_steps)
        if config.mixz.enabled:
            report.note(str(quantize_frozen(self.actor.module)))

        self.ref = reference_engine(context, tokenizer, self.plan)

        report.phase("loading the critic")
        critic = self._load_critic(config.critic)
        self.critic_shape = ModelShape.if_known(critic.config.to_dict())
        self.critic_parameters = parameter_count(critic)
        if config.critic.gradient_checkpointing:
            critic.model.activation_checkpointing_enable()
        if config.critic.lora.rank:
            critic = add_lora(critic, config.critic.lora)
            report.note(f"critic {describe_lora(critic)}")
        self.critic = self._train(critic, "critic", config.critic, optimizer_steps)

        report.phase("loading the reward model")
        self.reward = self._load_reward()
        self.actor_ema = (
            ActorAverage(self.actor, config.ema.decay, on_host=config.actor.offload)
            if config.ema.enabled
            else None
        )

    def _training_config(self, role: Role) -> dict[str, Any]:
        context = self.context
        return deepspeed_config(
            dtype=dtype_name(context.dtype),
            micro_batch_size=self.plan.micro_batch_size,
            accumulation=self.plan.accumulation,
            ranks=world_size(),
            max_gradient_norm=context.config.ppo.max_gradient_norm,
            monitor=context.monitor(role),
            **role_layout(context.config, role),
        )

    def _load_actor(self, role: RoleConfig) -> nn.Module:
        with zero3_loading(self._training_config("actor")):
            source = self.context.sft_model()
            return self.context.load_actor(source, self.tokenizer, role.dropout or 0.0)

    def _load_critic(self, role: RoleConfig) -> RewardModel:
        with zero3_loading(self._training_config("critic")):
            return RewardModel.from_pretrained(
                self.context.trained_reward_model(),
                self.context.dtype,
                dropout=role.dropout or 0.0,
                trust_remote_code=self.context.config.models.trust_remote_code,
            )

    def _load_reward(self) -> DeepSpeedEngine:
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

    def _train(
        self, model: nn.Module, name: Role, role: RoleConfig, optimizer_steps: int
    ) -> DeepSpeedEngine:
        ppo, report = self.context.config.ppo, self.context.report
        groups = parameter_groups(
            model, role.learning_rate, role.weight_decay, role.lora.learning_rate
        )
        config = self._training_config(name)
        return training_engine(
            model, config, groups, ppo, optimizer_steps, report, eps=ppo.adam_eps
        )

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
        return self.critic(input_ids=ids, attention_mask=mask)[:, -width - 1 : -1]

    @torch.no_grad()
    def scores(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The reward model's score of each row at its last token, `(batch,)`."""
        return gather_last(self.reward(input_ids=ids, attention_mask=mask), mask)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Actor and critic without dropout inside, training after."""
        self.actor.eval()
        self.critic.eval()
        try:
            yield
        finally:
            self.actor.train()
            self.critic.train()
