"""The typed configuration of a run: one field for every option, with title, unit, help, default.

From these fields come the validation, the help of the command line, the form of the dashboard and
the documentation table. Defaults follow the scripts of DeepSpeed-Chat where they are sound.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from engine.config.algorithms import (
    PRESETS,
    Aggregation,
    Algorithm,
    AlgorithmName,
    Baseline,
    KlEstimator,
    KlPlace,
    Ratio,
    Scale,
    Surrogate,
)
from engine.config.steps import STEPS, Step, StepName, pipeline

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
ZeroStage = Annotated[int, Field(ge=0, le=3)]


# The tabs of the form.
Group = Literal["memory", "speed", "LoRA", "stability", "data", "logging"]
ALL_STEPS: tuple[StepName, ...] = tuple(step.name for step in STEPS)


def option(
    default: Any,
    title: str,
    help: str,
    unit: str = "",
    group: Group | None = None,
    fixed_by: tuple[StepName, ...] | None = None,
) -> Any:
    """A configuration field with the texts that the CLI, the dashboard and the docs show.

    Args:
        default: the value where none is given.
        title: a few words.
        help: what it does, and what an empty value means.
        unit: of the value.
        group: tab of the form; None: that of its section, and without one the tab of all options.
        fixed_by: the steps whose checkpoints depend on it. A resumed run may change it until one
            of them has begun; (): at any time; None: as its section, and without one never.
    """
    extra: dict[str, Any] = {"unit": unit, "group": group, "fixed_by": fixed_by}
    return Field(default, title=title, description=help, json_schema_extra=extra)


def section(
    model: type[BaseModel],
    title: str,
    help: str,
    group: Group | None = None,
    fixed_by: tuple[StepName, ...] | None = None,
) -> Any:
    """A nested group of options, with the defaults for options that set nothing themselves."""
    extra: dict[str, Any] = {"group": group, "fixed_by": fixed_by}
    return Field(default_factory=model, title=title, description=help, json_schema_extra=extra)


def merged(base: Any, changes: Any) -> Any:
    """`base` with `changes` applied: mappings key by key, everything else as a whole."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return {**base, **{key: merged(base.get(key), value) for key, value in changes.items()}}


def _split_list(value: Any) -> Any:
    """Accept `a,b` for a list, as the command line and the original's flags write it."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


class Section(BaseModel):
    """Base of all groups: unknown keys are errors, assignments are validated."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, allow_inf_nan=False)


class DataSource(Section):
    """One data set: a Hub name, a local path or an embedded corpus, and how to read it."""

    path: str = Field(
        title="Path or name",
        description="Local file or folder (JSON, JSONL, CSV, Parquet, save_to_disk), the name of a "
        "data set on the Hub, or embedded:NAME",
    )
    subset: str | None = option(None, "Subset", "Configuration name of a Hub data set")
    columns: dict[str, str] = Field(
        default_factory=dict,
        title="Column mapping",
        description="Ours to theirs, if the schema is not detected: prompt, chosen, "
        "rejected, response, messages, text",
    )


def _sources(value: Any) -> Any:
    value = _split_list(value)
    if isinstance(value, list):
        return [{"path": item} if isinstance(item, str) else item for item in value]
    return value


SourceList = Annotated[list[DataSource], BeforeValidator(_sources)]


class ModelsConfig(Section):
    """Which models a run starts from."""

    actor: str = option(
        "embedded:tiny-llama",
        "Actor model",
        "Base model of step 1: a Hub id, a local folder, or embedded:NAME",
    )
    reward: str = option(
        "sft",
        "Reward model",
        "Base model of step 2: a Hub id, a local folder, embedded:NAME, or 'sft' for the model "
        "that step 1 made (as InstructGPT did)",
    )
    sft: str | None = option(
        None,
        "Finished SFT model",
        "Folder of an SFT model to use in place of this run's step 1",
    )
    trained_reward: str | None = option(
        None,
        "Finished reward model",
        "Folder of a reward model to use in place of this run's step 2",
    )
    trust_remote_code: bool = option(
        False, "Trust remote code", "Run Python code that comes with a model from the Hub"
    )


class DataConfig(Section):
    """The data that a run trains on, and how text becomes tokens."""

    sources: SourceList = Field(
        default_factory=lambda: [DataSource(path="embedded:facts")],
        title="Sources",
        description="Data sets blended for all three steps, split between them by data.split",
    )
    sft_only_sources: SourceList = Field(
        default_factory=list,
        title="SFT-only sources",
        description="Data sets used by step 1 only, in full",
    )
    unsupervised_sources: SourceList = Field(
        default_factory=list,
        title="Unsupervised text",
        description="Plain text for the mixture (pretraining) loss of step 3; empty: off",
    )
    split: Annotated[
        tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat], BeforeValidator(_split_list)
    ] = option(
        (2.0, 4.0, 4.0),
        "Split over the steps",
        "Shares of the rows that go to steps 1, 2, 3; a share of 0 gives the step no rows",
    )
    eval_share: Annotated[float, Field(gt=0, lt=1)] = option(
        0.05, "Held-out share", "Share of the rows of a source without a test part held out"
    )
    eval_rows: PositiveInt = option(
        400, "Held-out rows", "Most rows used for one evaluation", "rows"
    )
    template: Literal["human_assistant", "chat_template"] = option(
        "human_assistant",
        "Dialogue template",
        "human_assistant: the original's 'Human: ... Assistant:'; chat_template: the tokenizer's",
    )
    end_of_conversation_token: str | None = option(
        None,
        "End-of-conversation token",
        "A token that ends an answer, added to the vocabulary if missing; "
        "empty: the tokenizer's EOS",
    )
    cache_dir: str | None = option(
        None,
        "Cache folder",
        "Where tokenised data is kept; empty: the user's cache folder",
        fixed_by=(),
    )


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021) on the base weights."""

    rank: NonNegativeInt = option(0, "LoRA rank", "Rank of the adapters; 0 trains without LoRA")
    alpha: PositiveFloat | None = option(
        None, "LoRA alpha", "Scale numerator: updates are scaled by alpha / rank; empty: the rank"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = option(
        0.0, "LoRA dropout", "Dropout before the adapters"
    )
    targets: Annotated[list[str], BeforeValidator(_split_list)] = Field(
        default_factory=list,
        title="LoRA targets",
        description="Patterns (regular expressions, searched in module names) of the linear "
        "layers that get adapters; empty: those of the model's family",
    )
    only: bool = option(
        False,
        "Only LoRA",
        "Train only the adapters (and the reward head); base weights stay frozen",
    )
    learning_rate: PositiveFloat = option(
        5e-4, "LoRA learning rate", "Peak learning rate of the adapters"
    )
    export: bool = option(
        False,
        "Export adapters",
        "Also save only the adapters, in a folder for peft; needs only-LoRA",
    )


class RoleConfig(Section):
    """How one trained model is laid out: the actor (steps 1, 3) or the critic (steps 2, 3)."""

    zero_stage: ZeroStage = option(
        0,
        "ZeRO stage",
        "0 replicated, 1 optimizer states, 2 and gradients, 3 and parameters sharded over devices",
        group="memory",
    )
    offload: bool = option(
        False,
        "Offload",
        "Keep optimizer states (and, under ZeRO-3, parameters) in host memory; slower",
        group="memory",
    )
    nvme_path: str | None = option(
        None,
        "NVMe folder",
        "Offload into files of this folder instead of host memory (ZeRO-Infinity); needs ZeRO-3",
        group="memory",
    )
    zero_quantized_weights: bool = option(
        False,
        "Quantised gather",
        "ZeRO++: send weights as int8 when ZeRO-3 gathers them; half the traffic, small errors",
        group="speed",
    )
    zero_quantized_gradients: bool = option(
        False,
        "Quantised gradients",
        "ZeRO++: send gradients as int4 when ZeRO-3 reduces them; needs CUDA",
        group="speed",
    )
    hierarchical_partition: bool = option(
        False,
        "Hierarchical partition",
        "ZeRO++: a second copy of the weights on each of several nodes, so that backward passes "
        "gather within the node",
        group="speed",
    )
    gradient_checkpointing: bool = option(
        False,
        "Gradient checkpointing",
        "Recompute activations in the backward pass: about a third more compute, far less memory",
        group="memory",
        fixed_by=(),
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = option(
        None,
        "Dropout",
        "Dropout of the model; empty: as in its own configuration (0 in PPO, DPO)",
        group="stability",
    )
    learning_rate: PositiveFloat = option(
        9.65e-6,
        "PPO learning rate",
        "Peak learning rate of this model in step 3",
        group="stability",
        fixed_by=("ppo",),
    )
    weight_decay: NonNegativeFloat = option(
        0.1, "PPO weight decay", "Weight decay of this model in step 3", fixed_by=("ppo",)
    )
    lora: LoraConfig = section(LoraConfig, "LoRA", "Low-rank adapters", group="LoRA")


class CriticConfig(RoleConfig):
    """The critic's layout; its learning rate is lower than the actor's."""

    learning_rate: PositiveFloat = option(
        5e-6,
        "PPO learning rate",
        "Peak learning rate of this model in step 3",
        group="stability",
        fixed_by=("ppo",),
    )


class RefConfig(Section):
    """The frozen models of step 3, and the reference of DPO."""

    offload: bool = option(
        False, "Offload reference", "Keep the reference model's parameters in host memory"
    )
    offload_reward: bool = option(
        False, "Offload reward model", "Keep the reward model's parameters in host memory in step 3"
    )
    share_actor: bool = option(
        True,
        "Share with the actor",
        "With only-LoRA the reference is the actor with its adapters off: no second copy",
        group="LoRA",
    )


class HybridEngineConfig(Section):
    """Generation in step 3 with a model laid out for inference, switched back for training."""

    enabled: bool = option(
        False,
        "Hybrid engine",
        "Gather ZeRO-3 shards once, merge LoRA, decode with a static cache; off: plain generate",
    )
    release_inference_cache: bool = option(
        False, "Release cache", "Free the key/value cache between generation phases"
    )
    unpin_actor_parameters: bool = option(
        False, "Unpin actor", "Free the gathered parameters after each generation batch"
    )


class MixzConfig(Section):
    """Mixed-precision ZeRO++ (MixZ): frozen weights kept quantised in int8."""

    enabled: bool = option(
        False, "MixZ", "Quantise the frozen weights of LoRA training; needs ZeRO-3 and LoRA"
    )
    hpz_partition_size: PositiveInt | None = option(
        None,
        "Secondary partition",
        "Devices that share a secondary copy of the weights; empty: the devices per node if there "
        "are several nodes, else none",
        "devices",
    )


class EmaConfig(Section):
    """An exponential moving average of the actor."""

    enabled: bool = option(False, "EMA actor", "Keep and save an average of the actor's weights")
    decay: Annotated[float, Field(gt=0, lt=1)] = option(
        0.992, "EMA decay", "Weight of the old average at each optimizer step"
    )


class LaunchConfig(Section):
    """Where a run's processes start."""

    deployment: Literal["single_gpu", "single_node", "multi_node"] = option(
        "single_gpu", "Deployment", "One device, all devices of a node, or several nodes"
    )
    num_accelerators: PositiveInt = option(
        1, "Accelerators", "Ranks per node: GPUs, or processes on a CPU", "ranks"
    )
    num_nodes: PositiveInt | None = option(
        None, "Nodes", "Nodes that a multi_node run takes; empty: all of the hostfile", "nodes"
    )
    hostfile: str | None = option(
        None, "Hostfile", "Lines 'host slots=N' of the nodes of a multi_node run", fixed_by=()
    )
    memory_gib: PositiveFloat | None = option(
        None,
        "Memory of an accelerator",
        "What a profile was chosen for, and `dschat profiles` holds its plan against",
        "GiB",
    )
    master_port: Annotated[int, Field(ge=1024, le=65535)] | None = option(
        None, "Master port", "Port of the rendezvous; empty: a free one for each run", fixed_by=()
    )


Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup"
]


class StepConfig(Section):
    """What the three steps share: how long, how fast."""

    epochs: PositiveInt = option(
        1, "Epochs", "Passes over the data of the step", "epochs", group="speed"
    )
    max_steps: PositiveInt | None = option(
        None, "Most steps", "Stop after so many steps; empty: all epochs", "steps", group="speed"
    )
    batch_size: PositiveInt = option(
        32, "Batch size", "Rows of one optimizer step over all devices", "rows", group="speed"
    )
    micro_batch_size: PositiveInt | None = option(
        None,
        "Micro batch size",
        "Rows per device at a time; empty: batch size / devices. Accumulation follows from both",
        "rows per device",
        group="memory",
        fixed_by=(),
    )
    scheduler: Scheduler = option("cosine", "Schedule", "Decay of the learning rate")
    warmup_steps: NonNegativeInt = option(
        0, "Warm-up", "Optimizer steps from 0 to the peak learning rate", "steps", group="stability"
    )
    adam_betas: Annotated[tuple[Share, Share], BeforeValidator(_split_list)] = option(
        (0.9, 0.95), "Adam betas", "Decay of the first and second moment"
    )
    max_gradient_norm: PositiveFloat = option(
        1.0, "Gradient clipping", "Largest global norm of the gradient"
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict,
        title="Only in this step",
        description="Options of actor, critic and data with other values in this step, nested as "
        "in a profile: {critic: {zero_stage: 0}}",
    )

    @field_validator("overrides")
    @classmethod
    def _known_groups(cls, value: dict[str, Any]) -> dict[str, Any]:
        for group in value.keys() - {"actor", "critic", "data"}:
            raise ValueError(f"{group!r} cannot differ in one step; actor, critic and data can")
        return value

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of one step of training."""
        return 1


class PretrainingStyleStep(StepConfig):
    """What steps 1 and 2 share."""

    learning_rate: PositiveFloat = option(
        9.65e-6, "Learning rate", "Peak learning rate", group="stability"
    )
    weight_decay: NonNegativeFloat = option(0.0, "Weight decay", "Weight decay (AdamW)")
    max_length: PositiveInt = option(
        512,
        "Length",
        "Most tokens per row; longer rows lose their oldest turns",
        "tokens",
        group="data",
    )
    eval_batch_size: PositiveInt = option(
        16, "Evaluation batch", "Rows per device in evaluation", "rows per device", fixed_by=()
    )
    eval_interval: PositiveInt | None = option(
        None,
        "Evaluation interval",
        "Also evaluate every so many optimizer steps; empty: only before and after each epoch",
        "steps",
        fixed_by=(),
    )


class SftConfig(PretrainingStyleStep):
    """Step 1, supervised fine-tuning."""

    loss_on_prompt: bool = option(
        False, "Loss on the prompt", "Train on prompt tokens too, as the original did"
    )


class RewardConfig(PretrainingStyleStep):
    """Step 2, the reward model."""

    loss: Literal["last_token", "all_tokens"] = option(
        "last_token",
        "Loss",
        "last_token: one score per answer; all_tokens: the original's mean from the first "
        "difference on",
    )
    weight_decay: NonNegativeFloat = option(0.1, "Weight decay", "Weight decay (AdamW)")
    score_penalty: NonNegativeFloat = option(
        0.0, "Score penalty", "Weight of the mean squared score, which keeps scores near 0"
    )


class DpoConfig(PretrainingStyleStep):
    """Step 2 as a direct preference optimisation of the actor (Rafailov et al. 2023)."""

    beta: PositiveFloat = option(
        0.1,
        "Beta",
        "Scale of the implicit rewards: a larger one stays closer to the reference",
        group="stability",
    )
    label_smoothing: Annotated[float, Field(ge=0, le=0.5)] = option(
        0.0, "Label smoothing", "Share of the pairs that are taken to be labelled the wrong way"
    )
    weight_decay: NonNegativeFloat = option(0.1, "Weight decay", "Weight decay (AdamW)")


_OF_ALGORITHM = "empty: as rlhf.algorithm has it"


class RlhfConfig(Section):
    """How step 3 learns: an algorithm, and what is to differ from it."""

    algorithm: AlgorithmName = option(
        "ppo",
        "Algorithm",
        "ppo has a critic; all others have none and mostly compare the answers to a prompt with "
        "each other. docs/algorithms.md has a table of what each one is",
    )
    answers_per_prompt: PositiveInt | None = option(
        None,
        "Answers per prompt",
        f"Answers sampled for each prompt, G; {_OF_ALGORITHM} (8 in groups, rloo 2, else 1). All "
        "batch sizes of step 3 count answers",
        "answers",
    )
    baseline: Baseline | None = option(
        None,
        "Baseline",
        "What an answer's reward is compared with: the critic's value, the mean of its group, the "
        f"mean of the others in it, or nothing; {_OF_ALGORITHM}",
    )
    scale: Scale | None = option(
        None,
        "Scale",
        "What divides advantages: the standard deviation of the group's rewards or of the whole "
        f"batch's, or nothing; {_OF_ALGORITHM}",
    )
    ratio: Ratio | None = option(
        None,
        "Ratio",
        "Of the new policy to the one that answered: of each token, the geometric mean over an "
        f"answer, or of the answer as a whole; {_OF_ALGORITHM}",
    )
    surrogate: Surrogate | None = option(
        None,
        "Surrogate",
        "clipped: no gradient beyond the bounds of the ratio; cispo: the bounded ratio weighs the "
        f"log-probability; {_OF_ALGORITHM}",
    )
    aggregation: Aggregation | None = option(
        None,
        "Mean of the loss",
        "Over all tokens of the batch, over each answer's and then over answers, or a sum divided "
        f"by answers and ppo.max_answer_length; {_OF_ALGORITHM}",
    )
    clip_high: PositiveFloat | None = option(
        None,
        "Upper clip",
        "Largest rise of the ratio, where it is not ppo.clip; empty: as ppo.clip",
    )
    clip_delta: PositiveFloat | None = option(
        None,
        "Second upper clip",
        "Largest ratio where the advantage is below 0, where nothing else bounds it; empty: none",
    )
    kl_in: KlPlace | None = option(
        None, "Place of the KL", f"In the reward or in the loss; {_OF_ALGORITHM}"
    )
    kl_estimator: KlEstimator | None = option(
        None, "KL estimator", f"Of the KL that is learnt from (Schulman 2020); {_OF_ALGORITHM}"
    )
    mask_truncated: bool = option(
        False,
        "Mask truncated answers",
        "Learn nothing from answers that ppo.max_answer_length cut off",
    )
    resampling_tries: NonNegativeInt | None = option(
        None,
        "Resampling",
        "How often groups whose rewards are all equal are replaced by those of other prompts "
        f"(dynamic sampling); {_OF_ALGORITHM} (dapo 10, else 0)",
        "tries",
    )
    overlong_buffer: Share | None = option(
        None,
        "Overlong buffer",
        "Share of ppo.max_answer_length, at its end, over which the reward of an answer falls by "
        f"1; {_OF_ALGORITHM} (dapo 0.2, else 0)",
    )


class RewardFunction(Section):
    """Something that rewards answers: a function of a Python file, or the reward model."""

    name: str = option("reward", "Name", "Of the function, and in metrics")
    path: str | None = option(None, "File", "Python file with the function")
    kind: Literal["function", "model"] = option(
        "function", "Kind", "model: the reward model of step 2, beside functions"
    )
    weight: float = option(1.0, "Weight", "In the sum of all rewards")


class RewardsConfig(Section):
    """What rewards answers in step 3."""

    functions: list[RewardFunction] = Field(
        default_factory=list,
        title="Reward functions",
        description="What is added up to an answer's reward; empty: only the reward model",
    )


class PpoConfig(StepConfig):
    """Step 3, learning from rewards; sizes count answers."""

    rollout_batch_size: PositiveInt = option(
        32,
        "Rollout batch",
        "Answers of one generation step over all devices: prompts times rlhf.answers_per_prompt",
        "answers",
        group="speed",
    )
    generation_batch_size: PositiveInt | None = option(
        None,
        "Generation batch",
        "Answers that a device generates at a time; empty: rollout batch / devices",
        "answers per device",
        group="memory",
        fixed_by=(),
    )
    inner_epochs: PositiveInt = option(
        1, "PPO epochs", "Passes over one rollout batch, each in a fresh order", "epochs"
    )
    max_prompt_length: PositiveInt = option(
        256,
        "Prompt length",
        "Most tokens of a prompt; longer prompts are dropped",
        "tokens",
        group="data",
    )
    max_answer_length: PositiveInt = option(
        256, "Answer length", "Most tokens generated for an answer", "tokens", group="data"
    )
    temperature: PositiveFloat = option(1.0, "Temperature", "Of sampling and of all log-probs")
    kl_coef: NonNegativeFloat | None = option(
        None,
        "KL coefficient",
        f"Weight of the KL to the reference; {_OF_ALGORITHM} (ppo 0.1)",
        group="stability",
    )
    kl_target: PositiveFloat | None = option(
        None,
        "KL target",
        "Adapts the KL coefficient to this KL per answer; empty: fixed",
        "nats",
        group="stability",
    )
    kl_horizon: PositiveInt = option(
        10_000, "KL horizon", "Sequences over which the KL coefficient adapts", "sequences"
    )
    clip: PositiveFloat | None = option(
        None,
        "Policy clip",
        f"Largest change of the probability ratio; {_OF_ALGORITHM} (ppo 0.2)",
        group="stability",
    )
    value_clip: PositiveFloat = option(
        0.2, "Value clip", "Largest change of a value an update", group="stability"
    )
    gamma: Share = option(1.0, "Discount", "Discount of later rewards")
    gae_lambda: Share = option(0.95, "GAE lambda", "Bias against variance of the advantages")
    whiten_advantages: bool | None = option(
        None,
        "Whiten advantages",
        "Mean 0 and standard deviation 1 over all tokens of a rollout batch; "
        f"{_OF_ALGORITHM} (ppo: yes)",
        group="stability",
    )
    reward_clip: PositiveFloat = option(
        5.0, "Reward clip", "Bound of the score on both sides", group="stability"
    )
    normalize_reward: bool = option(
        False,
        "Normalise reward",
        "Subtract mean and divide by standard deviation of the scores of the SFT model's answers",
        group="stability",
    )
    missing_eos_penalty: NonNegativeFloat | None = option(
        None,
        "Missing EOS penalty",
        "Subtracted from the score of an answer without EOS",
        group="stability",
    )
    unsupervised_coef: NonNegativeFloat = option(
        27.8,
        "Mixture coefficient",
        "Weight of the unsupervised loss, added to the actor's",
        group="stability",
    )
    align_overflow: bool = option(
        False,
        "Align overflow",
        "fp16: if actor or critic overflows, both skip the step",
        group="stability",
    )
    warmup_steps: NonNegativeInt = option(
        100,
        "Warm-up",
        "Optimizer steps from 0 to the peak learning rate",
        "steps",
        group="stability",
    )
    adam_eps: PositiveFloat = option(1e-5, "Adam epsilon", "Epsilon of the optimizers of step 3")

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of actor and critic on the answers of one generation step."""
        return self.inner_epochs * (self.rollout_batch_size // self.batch_size)


class GatesConfig(Section):
    """What steps 1 and 2 must reach for the run to continue."""

    sft_perplexity: PositiveFloat | None = option(
        None, "Perplexity gate", "Highest held-out perplexity after step 1; empty: no gate"
    )
    reward_accuracy: Share | None = option(
        None, "Accuracy gate", "Lowest held-out accuracy after step 2; empty: no gate"
    )
    reward_margin: float | None = option(
        None, "Margin gate", "Lowest held-out margin of the scores after step 2; empty: no gate"
    )
    action: Literal["pause", "warn"] = option(
        "pause",
        "At a gate",
        "What to do when a gate is not reached. pause: wait until someone gives a reason to "
        "continue; warn: note it and continue",
    )


class LoggingConfig(Section):
    """What a run writes besides its models."""

    print_loss: bool = option(False, "Print loss", "A line with the loss of each rank and step")
    print_answers: bool = option(False, "Print answers", "Prompts and answers of step 3 in the log")
    print_answers_interval: PositiveInt = option(
        20, "Answers interval", "Generation steps between printed answers", "steps"
    )
    tensorboard: bool = option(
        False, "TensorBoard", "Event files: DeepSpeed's monitor an engine, and the pipeline's own"
    )
    tensorboard_dir: str | None = option(
        None, "TensorBoard folder", "Where event files go; empty: tensorboard/ of the step's folder"
    )
    optimizer_interval: PositiveInt = option(
        10,
        "Optimizer interval",
        "Optimizer steps between lines with each engine's steps, skipped steps, learning rates",
        "steps",
    )


class CheckpointConfig(Section):
    """What a run keeps to resume after a stop."""

    interval: PositiveInt | None = option(
        200, "Checkpoint interval", "Steps between checkpoints; empty: only when stopped", "steps"
    )
    keep_last: PositiveInt = option(
        2, "Checkpoints kept", "Newest checkpoints kept; the best is kept beside them"
    )


class RunConfig(Section):
    """Everything that decides what a run does."""

    models: ModelsConfig = section(
        ModelsConfig, "Models", "Which models a run starts from", group="data"
    )
    data: DataConfig = section(DataConfig, "Data", "What is learnt from", group="data")
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = option(
        "auto",
        "Precision",
        "auto: bf16 if the hardware supports it, else fp16 on a GPU that does, else fp32",
        group="memory",
        fixed_by=ALL_STEPS,
    )
    seed: NonNegativeInt = option(1234, "Seed", "Of data order, sampling and new weights")
    alignment: Literal["ppo", "dpo"] = option(
        "ppo",
        "Alignment",
        "ppo: a reward model (step 2), then PPO on it (step 3); dpo: step 2 is a direct preference "
        "optimisation of the actor, and the run ends with it",
        group="data",
    )
    launch: LaunchConfig = section(
        LaunchConfig, "Launch", "Where processes start", group="speed", fixed_by=ALL_STEPS
    )
    actor: RoleConfig = section(
        RoleConfig,
        "Actor",
        "Layout of the actor; applies in steps 1 and 3, and in DPO",
        fixed_by=("sft", "ppo", "dpo"),
    )
    critic: CriticConfig = section(
        CriticConfig,
        "Critic",
        "Layout of the critic; applies in steps 2 and 3",
        fixed_by=("reward", "ppo"),
    )
    ref: RefConfig = section(
        RefConfig,
        "Reference",
        "The frozen reference of step 3 and of DPO",
        group="memory",
        fixed_by=("ppo", "dpo"),
    )
    hybrid_engine: HybridEngineConfig = section(
        HybridEngineConfig, "Hybrid engine", "Fast generation in step 3", group="speed", fixed_by=()
    )
    mixz: MixzConfig = section(
        MixzConfig, "MixZ", "Mixed-precision ZeRO++", group="memory", fixed_by=ALL_STEPS
    )
    ema: EmaConfig = section(
        EmaConfig, "EMA", "Average of the actor's weights", group="stability", fixed_by=("ppo",)
    )
    sft: SftConfig = section(SftConfig, "Step 1: SFT", "Supervised fine-tuning", fixed_by=("sft",))
    reward: RewardConfig = section(
        RewardConfig, "Step 2: reward model", "Learning to score", fixed_by=("reward",)
    )
    dpo: DpoConfig = section(
        DpoConfig, "Step 2: DPO", "Direct preference optimisation", fixed_by=("dpo",)
    )
    ppo: PpoConfig = section(
        PpoConfig, "Step 3", "Reinforcement learning on the reward", fixed_by=("ppo",)
    )
    rlhf: RlhfConfig = section(
        RlhfConfig,
        "Step 3: algorithm",
        "How step 3 learns",
        group="stability",
        fixed_by=("ppo",),
    )
    rewards: RewardsConfig = section(
        RewardsConfig, "Rewards", "What rewards answers in step 3", fixed_by=("ppo",)
    )
    gates: GatesConfig = section(
        GatesConfig,
        "Gates",
        "What steps 1 and 2 must reach for the run to continue",
        group="stability",
        fixed_by=(),
    )
    checkpoint: CheckpointConfig = section(
        CheckpointConfig,
        "Checkpoints",
        "What a run keeps to resume after a stop",
        group="logging",
        fixed_by=(),
    )
    logging: LoggingConfig = section(
        LoggingConfig, "Logging", "What a run writes", group="logging", fixed_by=()
    )

    @model_validator(mode="after")
    def _overrides_are_valid(self) -> RunConfig:
        for step in ALL_STEPS:
            try:
                self.for_step(step)
            except ValidationError as error:
                first = error.errors()[0]
                key = ".".join([step, "overrides", *map(str, first["loc"])])
                raise ValueError(f"{key} = {first['input']!r}: {first['msg']}") from error
        return self

    @property
    def algorithm(self) -> Algorithm:
        """How step 3 learns: the preset of `rlhf.algorithm` with what is set beside it."""
        rlhf, ppo = self.rlhf, self.ppo
        chosen = {
            "answers_per_prompt": rlhf.answers_per_prompt,
            "baseline": rlhf.baseline,
            "scale": rlhf.scale,
            "whiten": ppo.whiten_advantages,
            "ratio": rlhf.ratio,
            "surrogate": rlhf.surrogate,
            "clip_low": ppo.clip,
            "clip_high": ppo.clip if rlhf.clip_high is None else rlhf.clip_high,
            "aggregation": rlhf.aggregation,
            "kl_coef": ppo.kl_coef,
            "kl_in": rlhf.kl_in,
            "kl_estimator": rlhf.kl_estimator,
            "resampling_tries": rlhf.resampling_tries,
            "overlong_buffer": rlhf.overlong_buffer,
        }
        values: dict[str, Any] = {name: x for name, x in chosen.items() if x is not None}
        return replace(PRESETS[rlhf.algorithm], **values)

    @property
    def needs_reward_model(self) -> bool:
        """Whether step 3 begins with a trained reward model, for rewards or for its critic."""
        return self.algorithm.has_critic or self.rewarded_by_model

    @property
    def rewarded_by_model(self) -> bool:
        """Whether the reward model rewards answers."""
        entries = self.rewards.functions
        return not entries or any(entry.kind == "model" for entry in entries)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that this run leads through."""
        return pipeline(self.alignment, self.needs_reward_model)

    @property
    def pair_options(self) -> PretrainingStyleStep:
        """Options of the step that learns from pairs; the reward model's if this run has none."""
        name = next((step.name for step in self.steps if step.phase == "reward"), "reward")
        found = getattr(self, name)
        assert isinstance(found, PretrainingStyleStep)
        return found

    def has_step(self, name: StepName) -> bool:
        """Whether this run leads through a step."""
        return any(step.name == name for step in self.steps)

    def for_step(self, step: StepName) -> RunConfig:
        """The configuration that one step runs under: this one with the step's overrides."""
        overrides = getattr(self, step).overrides
        if not overrides:
            return self
        values = merged(self.model_dump(), overrides)
        for name in ALL_STEPS:
            values[name] = {**values[name], "overrides": {}}
        return RunConfig.model_validate(values)
