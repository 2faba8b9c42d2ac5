"""Models of a step in their engines: one to train, and the frozen reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deepspeed import DeepSpeedEngine
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.config.deepspeed import EngineConfig, deepspeed_config, role_layout
from engine.config.schema import PretrainingStyleStep, RoleConfig, StepConfig
from engine.config.steps import RoleName
from engine.distributed import world_size
from engine.models.lora import adapters_off, add_lora, describe_lora, parameter_groups
from engine.models.quantization import quantize_frozen
from engine.models.reward import RewardModel
from engine.planning.shapes import ModelShape
from engine.precision import dtype_name
from engine.trainers.context import BatchPlan, StepContext
from engine.trainers.engines import frozen_engine, training_engine, zero3_loading


@dataclass(frozen=True)
class TrainedModel:
    """A model that a step trains, and how its batches are cut.

    Attributes:
        engine: what trains it.
        shape: what its operations are counted by; None for a family that the planner does not know.
        parameters: elements of the model without adapters.
        plan: of its batches.
    """

    engine: DeepSpeedEngine
    shape: ModelShape | None
    parameters: int
    plan: BatchPlan


def trained_model(
    context: StepContext,
    role: RoleName,
    options: StepConfig,
    rates: PretrainingStyleStep | RoleConfig,
    optimizer_steps: int,
    load: Callable[[], PreTrainedModel | RewardModel],
    *,
    name: str = "model",
    eps: float = 1e-8,
) -> TrainedModel:
    """Load a model, with ZeRO-3 shards and adapters if configured, and make its engine.

    Args:
        context: of the step.
        role: whose layout it has.
        options: of the step.
        rates: whose learning rate and weight decay it has.
        optimizer_steps: of the whole schedule.
        load: gives the model.
        name: what to call it in the log, where a step trains several.
        eps: Adam's epsilon.
    """
    config, report = context.config, context.report
    layout: RoleConfig = getattr(config, role)
    report.phase(f"loading the {name}")
    plan = BatchPlan.of(options, world_size())
    engine_config = deepspeed_config(
        dtype=dtype_name(context.dtype),
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation,
        ranks=world_size(),
        max_gradient_norm=options.max_gradient_norm,
        monitor=context.monitor(context.step if name == "model" else name),
        **role_layout(config, role),
    )
    with zero3_loading(engine_config):
        model = load()
    # Before adapters are added, which do not count.
    shape, parameters = ModelShape.if_known(model.config.to_dict()), parameter_count(model)
    if layout.gradient_checkpointing:
        plain = model.model if isinstance(model, RewardModel) else model
        plain.activation_checkpointing_enable()
    if layout.lora.rank:
        add_lora(model, layout.lora)
        report.note(describe_lora(model) if name == "model" else f"{name} {describe_lora(model)}")
    groups = parameter_groups(
        model, rates.learning_rate, rates.weight_decay, layout.lora.learning_rate
    )
    engine = training_engine(
        model, engine_config, groups, options, optimizer_steps, report, eps=eps
    )
    if role == "actor" and config.mixz.enabled:
        report.note(str(quantize_frozen(engine.module)))
    return TrainedModel(engine, shape, parameters, plan)


def parameter_count(model: nn.Module) -> int:
    """Elements of a whole model, however ZeRO-3 has sharded it; a tied weight counts once."""
    return sum(getattr(weight, "ds_numel", weight.numel()) for weight in model.parameters())


def frozen_config(
    context: StepContext, layout: RoleConfig, offload: bool, plan: BatchPlan
) -> EngineConfig:
    """DeepSpeed's configuration of a model that is not trained: it has only weights to shard."""
    return deepspeed_config(
        zero_stage=3 if layout.zero_stage == 3 or offload else 0,
        offload=offload,
        dtype=dtype_name(context.dtype),
        micro_batch_size=plan.micro_batch_size,
        accumulation=plan.accumulation,
        ranks=world_size(),
    )


def reference_engine(
    context: StepContext, tokenizer: PreTrainedTokenizerBase, plan: BatchPlan
) -> DeepSpeedEngine | None:
    """The SFT model, frozen; None where the actor with its adapters off is the same model."""
    config = context.config
    if config.ref.share_actor and config.actor.lora.only and config.actor.lora.rank > 0:
        context.report.note("the reference is the actor with its adapters off")
        return None
    context.report.phase("loading the reference")
    engine_config = frozen_config(context, config.actor, config.ref.offload, plan)
    with zero3_loading(engine_config):
        model = context.load_actor(context.sft_model(), tokenizer)
    return frozen_engine(model, engine_config)


@contextmanager
def reference_of(actor: DeepSpeedEngine, ref: DeepSpeedEngine | None) -> Iterator[DeepSpeedEngine]:
    """The reference for the body: `ref`, or the actor without adapters and dropout."""
    if ref is not None:
        yield ref
        return
    training = actor.training
    actor.eval()
    try:
        with adapters_off(actor.module):
            yield actor
    finally:
        actor.train(training)
