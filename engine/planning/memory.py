"""Memory of the three steps, a device and on the host, from models' shapes and a configuration.

What DeepSpeed 0.19 holds was read from its optimizers and measured on engines (see the tests).
With T trained and F frozen parameters of one model, e bytes a number and R ranks:

stage 0      weights e(T+F), gradients eT, Adam 8T; 16 bit: master copy 4T, in the step 4T more
stages 1, 2  weights e(T+F); master copy 4T/R (in fp32 too), Adam 8T/R, gradients eT/R (stage 1
             accumulates in eT); in the step 4T/R more
stage 3      all sharded: e(T+F)/R, 4T/R, 8T/R, eT/R; in the step 4 bytes of a group of at most
             1e9 parameters more
offload      master copy, Adam, gradients, an fp32 copy of them on the host; stage 2 keeps a copy
             of the weights and accumulated gradients there too, stage 3 the weights

Stages 1 to 3 reduce gradients through a bucket on the device, of T numbers but at most 5e8.

The average of the actor takes 4T/R at every stage. Models are written a file at a time, by the
first rank alone, which has the file's tensors on the host; under ZeRO-3 all gather one by one.

On a CPU freed blocks count too: glibc keeps those below 32 MiB in its heap, and a hole takes no new
block of its own size, as torch asks for aligned ones, which need some bytes more. With small models
that is up to half of the process. Larger blocks are mapped one by one and given back when freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from engine.config.loading import get_value
from engine.config.schema import PretrainingStyleStep, RoleConfig, RunConfig, StepConfig
from engine.config.steps import StepName
from engine.planning.activations import (
    freed_blocks_per_token,
    logits_scoring_bytes,
    logits_training_bytes,
    saved_blocks_per_token,
    working_bytes_per_token,
)
from engine.planning.flops import kv_cache_bytes
from engine.planning.shapes import Head, ModelShape

Device = Literal["cuda", "cpu"]

# Gradients of so many parameters at most are reduced at once.
LARGEST_REDUCE_BUCKET = 500_000_000
# Defaults of DeepSpeed that decide memory; elements, not bytes.
_PREFETCH_BUCKET = 50_000_000
_STEP_GROUP = 1_000_000_000
# ZeRO-3 keeps gathered what is used again within 1e9 parameters: the last 5e8 of a forward pass.
_KEPT_GATHERED = 500_000_000
# MixZ leaves smaller tensors alone; a scale of 4 bytes serves 8,000 elements.
_QUANTIZED_FROM = 500_000
_QUANTIZATION_GROUP = 8_000
# Weights in a file of a saved model, as in engine.models.save.
_FILE_BYTES = 5 * 10**9
# A CUDA context with the kernels of torch and of cuBLAS, and NCCL's buffers.
_CUDA_CONTEXT = 700 * 2**20
# What the first step leaves in a process on a CPU beside tensors, as measured.
_CPU_HEAP = 30 * 2**20
# Blocks of this size and above are no part of glibc's heap (its DEFAULT_MMAP_THRESHOLD_MAX).
_MAPPED_BLOCK = 32 * 2**20
# Holes in the heap, as measured: shares of what a forward pass allocates and frees. While scoring
# that is all of it; what is kept of the answers, and of weights that ZeRO-3 gathers, divides holes.
_HOLES_OF_TRAINING, _HOLES_OF_SCORING, _HOLES_OF_SCORING_ZERO_3 = 0.6, 0.35, 0.65

ALWAYS = "always"


@dataclass(frozen=True)
class Item:
    """Bytes of one thing that one model holds, for one rank.

    `phase` is the part of the step in which it lives, or "always". `first_rank`: other ranks do not
    hold it.
    """

    model: str
    what: str
    phase: str
    device_bytes: int
    host_bytes: int
    first_rank: bool = False


@dataclass(frozen=True)
class StepPlan:
    """Memory of one step; figures are bytes of the first rank, at the peak over the phases."""

    step: StepName
    items: tuple[Item, ...]

    def phases(self) -> dict[str, tuple[int, int]]:
        """Device and host bytes of each phase, with what is always there."""
        return {name: self._total({ALWAYS, name}, self.items) for name in self._names()}

    def node_phases(self, ranks: int) -> dict[str, int]:
        """Host bytes of each phase, of all `ranks` of the node that has the first one."""
        others = [item for item in self.items if not item.first_rank]
        return {
            name: host + (ranks - 1) * self._total({ALWAYS, name}, others)[1]
            for name, (_, host) in self.phases().items()
        }

    @property
    def peak_phase(self) -> str:
        """The phase that holds most on the device, or on a CPU on the host."""
        phases = self.phases()
        return max(phases, key=phases.__getitem__)

    @property
    def device_bytes(self) -> int:
        """Most bytes on a device."""
        return max(device for device, _ in self.phases().values())

    @property
    def host_bytes(self) -> int:
        """Most bytes in use at once in a rank's process on the host."""
        return max(host for _, host in self.phases().values())

    def _names(self) -> Iterable[str]:
        return dict.fromkeys(item.phase for item in self.items if item.phase != ALWAYS)

    @staticmethod
    def _total(phases: set[str], items: Iterable[Item]) -> tuple[int, int]:
        """Bytes of the items of some phases; an item of several counts once."""
        held: dict[tuple[str, str], list[int]] = {}
        for name in phases:
            of_phase: dict[tuple[str, str], list[int]] = {}
            for item in items:
                if item.phase == name:
                    own = of_phase.setdefault((item.model, item.what), [0, 0])
                    own[0] += item.device_bytes
                    own[1] += item.host_bytes
            for key, own in of_phase.items():
                before = held.get(key, [0, 0])
                held[key] = [max(pair) for pair in zip(before, own, strict=True)]
        return sum(own[0] for own in held.values()), sum(own[1] for own in held.values())


@dataclass(frozen=True)
class Plan:
    """Memory of a run. On a CPU everything is host memory, and `device_bytes` are 0."""

    device: Device
    dtype: str
    ranks: int
    ranks_per_node: int
    steps: tuple[StepPlan, ...]

    @property
    def device_bytes(self) -> int:
        """Most bytes on a device over all steps."""
        return max(step.device_bytes for step in self.steps)

    @property
    def node_host_bytes(self) -> int:
        """Most bytes on the host of a node, all its ranks together."""
        ranks = self.ranks_per_node
        return max(size for step in self.steps for size in step.node_phases(ranks).values())

    def fits(self, memory_bytes: int, host_memory_bytes: int | None = None) -> bool:
        """Tell whether every step fits.

        `memory_bytes` is that of one accelerator; on a CPU that of a node. `host_memory_bytes` is
        a node's beside accelerators; None: not checked.
        """
        if self.device == "cpu":
            return self.node_host_bytes <= memory_bytes
        enough_host = host_memory_bytes is None or self.node_host_bytes <= host_memory_bytes
        return self.device_bytes <= memory_bytes and enough_host


@dataclass(frozen=True)
class _Place:
    """What all items of a run share."""

    device: Device
    element: int
    ranks: int

    def item(
        self,
        model: str,
        what: str,
        count: float,
        phase: str = ALWAYS,
        host: bool = False,
        first_rank: bool = False,
    ) -> Item:
        """`count` bytes on the device, or on the host: by offload or for want of a device."""
        size = int(count)
        if host or self.device == "cpu":
            return Item(model, what, phase, 0, size, first_rank)
        return Item(model, what, phase, size, 0, first_rank)


@dataclass(frozen=True)
class _Model:
    """One of the models of a step, as an engine holds it."""

    name: str
    shape: ModelShape
    head: Head
    stage: int
    offload: bool
    trained: int
    frozen: int
    quantized: int = 0
    largest_trained: int = 0
    adapters_only: bool = False

    @classmethod
    def training(
        cls, name: str, shape: ModelShape, head: Head, role: RoleConfig, mixz: bool = False
    ) -> _Model:
        base = shape.parameters_with(head)
        trained = shape.lora_parameters(role.lora.rank, role.lora.targets)
        frozen = quantized = 0
        largest = shape.vocabulary * shape.head_inputs
        if role.lora.only and role.lora.rank:
            # The score head trains all the same.
            trained_head = shape.head_inputs if head == "score" else 0
            trained, frozen = trained + trained_head, base - trained_head
            largest = role.lora.rank * max(max(each.inputs, each.outputs) for each in shape.block)
            if mixz and role.zero_stage == 3:
                quantized = _large_parameters(shape, head)
        else:
            trained += base
        return cls(
            name,
            shape,
            head,
            role.zero_stage,
            role.offload,
            trained,
            frozen,
            quantized=quantized,
            largest_trained=largest,
            adapters_only=frozen > 0,
        )

    @classmethod
    def reading(cls, name: str, shape: ModelShape, head: Head, stage: int, offload: bool) -> _Model:
        # DeepSpeed offloads the parameters of ZeRO-3 alone.
        stage = 3 if stage == 3 or offload else 0
        return cls(name, shape, head, stage, offload, 0, shape.parameters_with(head))

    @property
    def parameters(self) -> int:
        return self.trained + self.frozen

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        in_blocks = max(layer.weights for layer in self.shape.block)
        return max(self.shape.vocabulary * self.shape.head_inputs, in_blocks)

    def weights(self, place: _Place) -> list[Item]:
        """Weights as they lie between uses."""
        sharded = place.ranks if self.stage == 3 else 1
        host = self.offload and self.stage == 3
        plain = place.element * (self.parameters - self.quantized)
        packed = self.quantized * (1 + 4 / _QUANTIZATION_GROUP)
        return [place.item(self.name, "weights", (plain + packed) / sharded, host=host)]

    def gathered(self, place: _Place, phase: str) -> list[Item]:
        """Parameters that ZeRO-3 has gathered while the model computes."""
        # A single rank's shard is the whole parameter, used where it lies.
        in_place = place.ranks == 1 and not (self.offload and place.device == "cuda")
        if self.stage != 3 or (in_place and not self.quantized):
            return []
        live = min(self.parameters, _KEPT_GATHERED + _PREFETCH_BUCKET + self.largest)
        return [place.item(self.name, "gathered parameters", place.element * live, phase)]

    def training_states(
        self, place: _Place, accumulates: bool, other_phases: tuple[str, ...] = ()
    ) -> list[Item]:
        """Master copy, Adam's moments, gradients, and DeepSpeed's buffers.

        `other_phases`: those between the micro batches, in which summed gradients wait.
        """
        trained, element, stage = self.trained, place.element, self.stage
        shard = trained / place.ranks if stage else trained
        train, reduce, update = (f"{verb} {self.name}" for verb in ("train", "reduce", "update"))
        if stage == 0:
            # Parameter by parameter, in what activations have left.
            update = f"step {self.name}"
        item, name, host = place.item, self.name, self.offload
        items = []
        if stage or element == 2:
            items.append(item(name, "master weights (fp32)", 4 * shard, host=host))
        items.append(item(name, "Adam moments (fp32)", 8 * shard, host=host))
        if stage == 3:
            items.append(item(name, "gradients", element * shard, host=host))
            group = shard if host else min(shard, _STEP_GROUP)
            phase = ALWAYS if host else update
            items.append(item(name, "gradients (fp32)", 4 * group, phase, host))
        elif host:
            if accumulates:
                items.append(item(name, "gradients", element * shard, host=True))
            items += [
                item(name, "gradients (fp32)", 4 * shard, host=True),
                item(name, "copy for the way back", element * shard, host=True),
                item(name, "gradient buffers", element * self.largest_trained),
                item(name, "gradient buffers", element * self.largest_trained, host=True),
            ]
        else:
            # Unless they are summed over micro batches or, in stage 1, reduced at the end,
            # gradients grow while activations go.
            summed = element * (shard if stage == 2 else trained)
            phases = [reduce]
            if accumulates or stage == 1:
                phases.append(train)
            if accumulates:
                phases += other_phases
            items += [item(name, "gradients", summed, phase) for phase in phases]
            if not (stage and self.adapters_only):
                # Those of matrices wait for those of biases and norms, which adapters lack.
                items.append(item(name, "gradients", element * shard, update))
            if stage or element == 2:
                items.append(item(name, "gradients (fp32)", 4 * shard, update))
        items += self._reduction(place, (train, reduce))
        items += self.gradient_holes(place)
        return items

    def _reduction(self, place: _Place, phases: tuple[str, str]) -> list[Item]:
        """Buffers in which gradients of the backward pass are summed over ranks."""
        train, reduce = phases
        bucket = place.element * min(LARGEST_REDUCE_BUCKET, self.trained)
        if self.stage == 0:
            return [place.item(self.name, "reduction bucket", bucket, reduce)]
        if self.stage == 3:
            return [
                place.item(self.name, "reduction bucket", bucket),
                place.item(self.name, "reduction copy", bucket, train),
            ]
        return [place.item(self.name, "reduction bucket", bucket, phase) for phase in phases]

    def saving(self, place: _Place, role: RoleConfig, average: bool = False) -> Iterable[Item]:
        """What is there while the model, or the average of it, is written a file at a time."""
        name, element = "actor_ema" if average else self.name, place.element
        phase = f"save {name}"
        adapted = self.shape.lora_layers(role.lora.targets) if role.lora.rank else []
        copied = self.shape.parameters_with(self.head)
        # The whole average of a single rank is in the format of a file where that is fp32.
        new = average and not self.adapters_only and (place.ranks > 1 or element == 2)
        if place.device == "cpu" and self.stage != 3 and not new:
            # All but the merged layers is written from where it lies.
            copied = sum(layer.weights for layer in adapted)
        size = min(element * copied, _FILE_BYTES)
        yield place.item(name, "weights of a file", size, phase, host=True, first_rank=True)
        if self.stage == 3 and (self.adapters_only or not average):
            # Also that of a single rank, which a forward pass uses where it lies.
            yield place.item(name, "gathered tensor", element * self.largest, phase)
        if average and place.ranks > 1:
            gathered = 4 * self.largest_trained * (1 + 1 / place.ranks)
            yield place.item(name, "gathered average", gathered, phase)
        if adapted:
            merged = (4 + element) * max(layer.weights for layer in adapted)
            yield place.item(name, "copy of a merged layer", merged, phase, first_rank=True)

    def checkpoint(self, place: _Place) -> Iterable[Item]:
        """What a checkpoint brings to the host: one storage of the optimizer's states at a time."""
        if place.device == "cpu" or self.offload:
            return
        shard = self.trained / (place.ranks if self.stage else 1)
        size = 4 * (min(shard, _STEP_GROUP) if self.stage == 3 else shard)
        phase = f"write a checkpoint of {self.name}"
        # Without shards one rank writes for all.
        first = self.stage == 0
        what = "copy of master weights"
        yield place.item(self.name, what, size, phase, host=True, first_rank=first)

    def average(self, place: _Place, role: RoleConfig) -> Iterable[Item]:
        """The average of what is trained, a slice per rank, beside the optimizer's states."""
        name, host = "actor_ema", self.offload
        yield place.item(name, "average (fp32)", 4 * self.trained / place.ranks, host=host)
        piece = 4 * self.largest_trained / place.ranks
        yield place.item(name, "slice of the weights", piece, "update the average", host)
        yield from self.saving(place, role, average=True)

    def block_tensors(
        self, place: _Place, role: RoleConfig, seq: int, dropout: float | None
    ) -> tuple[list[int], list[int]]:
        """Bytes per token of the tensors that a block's forward pass leaves for the backward pass,
        and of those that it frees.
        """
        shape, element = self.shape, place.element
        adapted = shape.lora_layers(role.lora.targets) if role.lora.rank else []
        adapted = adapted[: len(adapted) // shape.layers]
        saved = saved_blocks_per_token(
            shape,
            element,
            seq,
            dropout,
            on_cpu=place.device == "cpu",
            lora_rank=role.lora.rank,
            lora_layers=len(adapted),
            frozen_base=self.adapters_only,
        )
        return saved, freed_blocks_per_token(shape, element, adapted, self.adapters_only)

    def training_activations(
        self, place: _Place, role: RoleConfig, rows: int, seq: int, dropout: float | None
    ) -> list[Item]:
        """What the forward pass leaves for the backward pass."""
        shape, element, tokens = self.shape, place.element, rows * seq
        kept, freed = self.block_tensors(place, role, seq, dropout)
        saved = sum(kept)
        outside = 3 * element * shape.hidden
        working = working_bytes_per_token(shape, element)
        if role.gradient_checkpointing:
            per_token = shape.layers * element * shape.hidden + outside + saved + working
        else:
            per_token = shape.layers * saved + outside + working
        phase = f"train {self.name}"
        return [
            place.item(self.name, "activations", per_token * tokens, phase),
            *self.holes(place, tokens, freed, _HOLES_OF_TRAINING, phase),
        ]

    def holes(
        self, place: _Place, tokens: int, freed: list[int], share: float, phase: str
    ) -> list[Item]:
        """Room between blocks of the C library's heap, after a forward pass over `tokens`.

        Args:
            place: a CPU, or there are none.
            tokens: of the pass.
            freed: bytes per token of each tensor that a block of the model allocates and frees.
            share: of what lay in the heap and was freed, that no later tensor takes.
            phase: in which they are there.
        """
        in_heap = [size * tokens for size in freed if size * tokens < _MAPPED_BLOCK]
        if place.device != "cpu" or not in_heap:
            return []
        size = share * self.shape.layers * sum(in_heap)
        return [place.item(self.name, "holes in the heap", size, phase)]

    def gradient_holes(self, place: _Place) -> list[Item]:
        """Room in the heap where gradients lay that came between activations and went."""
        if place.device != "cpu" or self.adapters_only:
            return []
        sizes = [place.element * layer.weights for layer in self.shape.block]
        size = self.shape.layers * sum(size for size in sizes if size < _MAPPED_BLOCK)
        return [place.item(self.name, "holes of gradients", size, f"train {self.name}")]


def _large_parameters(shape: ModelShape, head: Head) -> int:
    """Elements of the frozen tensors that MixZ quantises."""
    tables = [shape.vocabulary * shape.head_inputs, shape.position_rows * shape.hidden]
    if head == "lm" and not shape.tied:
        tables.append(tables[0])
    sizes = tables + [layer.weights for layer in shape.linear_layers()]
    return sum(size for size in sizes if size >= _QUANTIZED_FROM)


def plan_memory(
    config: RunConfig,
    actor: ModelShape,
    reward: ModelShape | None = None,
    *,
    dtype: Literal["fp32", "bf16", "fp16"],
    device: Device = "cuda",
    nodes: int = 1,
) -> Plan:
    """Memory of every step that a configuration runs.

    Args:
        config: a checked configuration.
        actor: shape of `models.actor`.
        reward: shape of `models.reward`; None: the same (the model that step 1 makes).
        dtype: what `config.dtype` comes to on the machine, where it is auto.
        device: on a CPU all is host memory.
        nodes: hosts with `launch.num_accelerators` ranks each.
    """
    place = _Place(device, 4 if dtype == "fp32" else 2, nodes * config.launch.num_accelerators)
    critic = reward or actor
    items: dict[StepName, Callable[[RunConfig], Iterable[Item]]] = {
        "sft": lambda own: _sft(own, actor, place),
        "reward": lambda own: _reward(own, critic, place),
        "ppo": lambda own: _ppo(own, actor, critic, place, nodes),
        "dpo": lambda own: _dpo(own, actor, place),
    }
    steps = tuple(
        StepPlan(step.name, tuple(items[step.name](config.for_step(step.name))))
        for step in config.steps
        if step.replaced_by is None or get_value(config, step.replaced_by) is None
    )
    return Plan(device, dtype, place.ranks, config.launch.num_accelerators, steps)


def _micro_batch(options: StepConfig, ranks: int) -> tuple[int, bool]:
    """Rows a rank at once, and whether gradients of several such are summed."""
    rows = max(1, options.batch_size // ranks)
    micro = options.micro_batch_size or rows
    return micro, micro < rows


def _process(place: _Place) -> list[Item]:
    if place.device == "cpu":
        return [place.item("process", "heap and buffers of libraries", _CPU_HEAP)]
    return [place.item("process", "CUDA context", _CUDA_CONTEXT)]


def _sft(config: RunConfig, shape: ModelShape, place: _Place) -> Iterable[Item]:
    options, role = config.sft, config.actor
    model = _Model.training("actor", shape, "lm", role)
    yield from _language_modeling(model, role, options, 1, role.dropout, None, place)


def _dpo(config: RunConfig, shape: ModelShape, place: _Place) -> Iterable[Item]:
    options, role = config.dpo, config.actor
    model = _Model.training("actor", shape, "lm", role, config.mixz.enabled)
    reference = None if _reference_is_shared(config) else _reference(config, shape)
    # Chosen and rejected answers of a pair are two rows of one batch.
    yield from _language_modeling(model, role, options, 2, role.dropout or 0.0, reference, place)


def _reference_is_shared(config: RunConfig) -> bool:
    """Whether the reference is the actor without its adapters."""
    return config.ref.share_actor and config.actor.lora.only and config.actor.lora.rank > 0


def _reference(config: RunConfig, shape: ModelShape) -> _Model:
    stage, offload = config.actor.zero_stage, config.ref.offload
    return _Model.reading("reference", shape, "lm", stage, offload)


def _language_modeling(
    model: _Model,
    role: RoleConfig,
    options: PretrainingStyleStep,
    texts: int,
    dropout: float | None,
    reference: _Model | None,
    place: _Place,
) -> Iterable[Item]:
    """Training on the tokens of `texts` rows for each that the options count."""
    shape = model.shape
    units, accumulates = _micro_batch(options, place.ranks)
    rows, evaluated = texts * units, texts * options.eval_batch_size * options.max_length
    train = "train actor"
    models = [model] if reference is None else [model, reference]
    yield from _process(place)
    for each in models:
        yield from each.weights(place)
    yield from model.training_states(place, accumulates)
    yield from model.training_activations(place, role, rows, options.max_length, dropout)
    for phase in (train, "evaluate"):
        yield from _largest([item for each in models for item in each.gathered(place, phase)])
    logits = logits_training_bytes(shape, rows * options.max_length, place.element)
    yield place.item("actor", "logits", logits, train)
    yield from model.checkpoint(place)
    yield from model.saving(place, role)
    reading = max(
        logits_scoring_bytes(shape, evaluated, place.element),
        working_bytes_per_token(shape, place.element) * evaluated,
    )
    yield place.item("actor", "activations and logits", reading, "evaluate")


def _largest(items: list[Item]) -> list[Item]:
    """The one of several that are never there together which takes most; none of none."""
    return sorted(items, key=lambda item: item.device_bytes + item.host_bytes)[-1:]


def _reward(config: RunConfig, shape: ModelShape, place: _Place) -> Iterable[Item]:
    options, role = config.reward, config.critic
    model = _Model.training("critic", shape, "score", role)
    pairs, accumulates = _micro_batch(options, place.ranks)
    evaluated = 2 * options.eval_batch_size * options.max_length
    yield from _process(place)
    yield from model.weights(place)
    yield from model.training_states(place, accumulates)
    # Chosen and rejected answers of a pair are two rows of one batch.
    yield from model.training_activations(place, role, 2 * pairs, options.max_length, role.dropout)
    yield from model.gathered(place, "train critic")
    yield from model.gathered(place, "evaluate")
    yield from model.checkpoint(place)
    yield from model.saving(place, role)
    reading = working_bytes_per_token(shape, place.element) * evaluated
    yield place.item("critic", "activations", reading, "evaluate")


def _ppo(
    config: RunConfig, actor_shape: ModelShape, critic_shape: ModelShape, place: _Place, nodes: int
) -> Iterable[Item]:
    options, element = config.ppo, place.element
    actor = _Model.training("actor", actor_shape, "lm", config.actor, config.mixz.enabled)
    trained = [(actor, config.actor)]
    if config.algorithm.has_critic:
        critic = _Model.training("critic", critic_shape, "score", config.critic)
        trained.append((critic, config.critic))
    frozen = [] if _reference_is_shared(config) else [_reference(config, actor_shape)]
    if config.needs_reward_model:
        stage, offload = config.critic.zero_stage, config.ref.offload_reward
        frozen.append(_Model.reading("reward", critic_shape, "score", stage, offload))
    models = [*(model for model, _ in trained), *frozen]

    micro, accumulates = _micro_batch(options, place.ranks)
    seq = options.max_prompt_length + options.max_answer_length
    answer = options.max_answer_length
    generated = options.generation_batch_size or max(1, options.rollout_batch_size // place.ranks)

    # 1. What lies there all the time.
    yield from _process(place)
    for model in models:
        yield from model.weights(place)
    if actor.quantized and nodes > 1:
        secondary = element * actor.frozen / config.launch.num_accelerators
        yield place.item("actor", "secondary partition", secondary)
    if config.ema.enabled:
        yield from actor.average(place, config.actor)

    # 2. Generation.
    yield from _generation(config, actor, place, generated, seq)

    # 3. Log-probabilities, values and scores of the answers.
    scored = generated * seq
    # One model after another gathers its parameters and lets them go.
    yield from _largest([item for model in models for item in model.gathered(place, "score")])
    logits = logits_scoring_bytes(actor_shape, generated * answer, element, with_reference=True)
    shapes = {model.name: model.shape for model in models}.values()
    working = max(working_bytes_per_token(shape, element) * scored for shape in shapes)
    yield place.item("actor", "activations and logits", max(logits, working), "score")
    saved, freed = actor.block_tensors(place, config.actor, seq, config.actor.dropout or 0.0)
    share = _HOLES_OF_SCORING_ZERO_3 if actor.stage == 3 else _HOLES_OF_SCORING
    for model, _ in trained:
        for item in actor.holes(place, scored, saved + freed, share, f"train {model.name}"):
            yield replace(item, what=f"{item.what} since scoring")

    # 4. Updates of the actor, and of the critic if there is one.
    for model, role in trained:
        # In step 3 dropout is off unless it is asked for.
        between = tuple(f"train {other.name}" for other, _ in trained if other != model)
        yield from model.training_states(place, accumulates, between)
        yield from model.training_activations(place, role, micro, seq, role.dropout or 0.0)
        yield from model.gathered(place, f"train {model.name}")
        yield from model.checkpoint(place)
        yield from model.saving(place, role)
    kept = logits_training_bytes(actor_shape, micro * answer, element, held=True)
    yield place.item("actor", "logits", kept, "train actor")
    if config.data.unsupervised_sources:
        yield from (
            replace(item, what=f"{item.what} of the mixture")
            for item in actor.training_activations(
                place, config.actor, micro, seq, config.actor.dropout or 0.0
            )
        )
        mixture = logits_training_bytes(actor_shape, micro * seq, element)
        yield place.item("actor", "logits of the mixture", mixture, "train actor")


def _generation(
    config: RunConfig, actor: _Model, place: _Place, rows: int, seq: int
) -> Iterable[Item]:
    shape, element, hybrid = actor.shape, place.element, config.hybrid_engine
    keeps_cache = hybrid.enabled and not hybrid.release_inference_cache
    cache = kv_cache_bytes(shape, rows, seq, element)
    yield place.item("actor", "KV cache", cache, ALWAYS if keeps_cache else "generate")
    prompts = rows * config.ppo.max_prompt_length
    working = working_bytes_per_token(shape, element) * prompts
    # Choosing a token takes logits, weights and a cumulative sum in fp64.
    choosing = (element + 16) * rows * shape.vocabulary
    yield place.item("actor", "activations", max(working, choosing), "generate")
    if not hybrid.enabled:
        yield from actor.gathered(place, "generate")
        return
    copied = _generation_copy(actor, place, config.actor)
    if copied:
        name = "hybrid engine's gathered copy"
        yield place.item("actor", name, element * copied, "generate")


def _generation_copy(actor: _Model, place: _Place, role: RoleConfig) -> int:
    """Elements of the weights that the hybrid engine lays out anew for generation."""
    shape, lora = actor.shape, role.lora
    adapted = shape.lora_layers(lora.targets) if lora.rank else []
    layout = shape.family.packed
    if layout is None:
        whole = shape.parameters if actor.gathered(place, "generate") else 0
        return whole + sum(layer.weights for layer in adapted)
    if actor.stage == 3:
        return shape.matmul_parameters + shape.embedding_parameters
    if place.device == "cpu":
        return shape.matmul_parameters
    merged = {layer.name for layer in adapted}
    return sum(
        layer.weights
        for layer in shape.linear_layers()
        if layer.name in merged or layout.is_joined(layer.name)
    )
