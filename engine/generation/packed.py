"""Decoders laid out for generation: weights read once from a transformers model, projections
fused, one short forward for a token.

For families whose file names a `PackedLayout`. The model itself stays as it is: ZeRO-3 shards are
gathered one layer at a time while reading, LoRA is added out of place. None of its modules is
called, only their `forward`: DeepSpeed's hooks would take each call for a part of a training step,
and ranks whose answers differ in length would disagree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.families import family_of
from engine.families.family import PackedLayout
from engine.generation.cache import KeyValueCache

Projection = Callable[[Tensor], Tensor]

# oneDNN reorders weights for an expected number of rows; this many serve 1 to 512 alike.
_EXPECTED_ROWS = 8


class UnsupportedModel(ValueError):
    """The model has a part that the packed decoders do not know."""


class GatherFailed(RuntimeError):
    """This rank could not gather parameters while others may wait in the gather: nothing can go on.

    A failure within the gathered section is no such thing: it concerns this rank alone.
    """


@contextmanager
def gathered(*modules: nn.Module) -> Iterator[None]:
    """Hold the whole parameters of modules that ZeRO-3 has sharded; a collective there.

    Raises:
        GatherFailed: see there.
    """
    parameters = [p for module in modules for p in module.parameters() if hasattr(p, "ds_id")]
    with ExitStack() as stack:
        if parameters:
            import deepspeed

            try:
                stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
            except Exception as error:
                raise GatherFailed(f"gathering parameters of ZeRO-3: {error}") from error
        yield


class _Reading:
    """Reads a model part by part, each gathered while it is read.

    Other ranks wait in every gather: a rank that fails to read one part still gathers the rest.

    Attributes:
        error: what failed first; None so far.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, read: Callable[..., Any], *modules: nn.Module) -> Any:
        """What `read` makes of the modules; None after a failure."""
        with gathered(*modules):
            if self.error is not None:
                return None
            try:
                return read(*modules)
            except Exception as error:
                self.error = error
                return None

    def finish(self) -> None:
        """Raise what failed, now that all parts were gathered."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            # Else the error and this frame, which its traceback holds, would keep each other and
            # the weights read so far.
            del error


def effective_weight(module: Any) -> Tensor:
    """The weight of a layer with its active LoRA adapters added, as a new tensor; else its own.

    Raises:
        UnsupportedModel: adapters of another kind than plain LoRA.
    """
    if not hasattr(module, "base_layer"):
        return module.weight.detach()
    # Only here: a chat with a finished model has no adapters, and starts faster without peft.
    from peft.tuners.lora import LoraLayer

    from engine.models.lora import merged_weight

    if not isinstance(module, LoraLayer) or module.lora_variant or module.lora_embedding_A:
        raise UnsupportedModel(f"{type(module).__name__} is an adapter other than plain LoRA")
    if module.disable_adapters or module.merged:
        return module.base_layer.weight.detach()
    if any(module.lora_bias.get(adapter, False) for adapter in module.active_adapters):
        raise UnsupportedModel("LoRA with a bias")
    return merged_weight(module)


def _bias(module: Any) -> Tensor | None:
    bias = getattr(module, "base_layer", module).bias
    return None if bias is None else bias.detach()


def _native_on_cpu(dtype: torch.dtype) -> bool:
    """Tell whether this CPU multiplies matrices of a 16-bit dtype without detours."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


class Packer:
    """Turns layers into projections.

    Args:
        dtype: the dtype of the weights.
        device: where they lie.
        rows: sequences that are decoded at once, on average.
        copy: False refers to the model's own tensors and costs no memory; True makes a fused copy
            in the layout that is fastest for `rows`, where there is one.
        sharded: the tensors vanish after reading, so what is kept must be copied.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device, rows: int, copy: bool, sharded: bool
    ) -> None:
        self.copy = copy
        self._sharded = sharded
        self.dtype = dtype
        self._one_row = rows == 1
        self._reordered = copy and device.type == "cpu" and torch.backends.mkldnn.is_available()
        # A CPU without 16-bit matrix units is faster with fp32 activations. For one row the
        # weights stay in 16 bits, as the time is that of reading them.
        widen = self._reordered and dtype != torch.float32 and not _native_on_cpu(dtype)
        self._half = (
            widen and self._one_row and "fbgemm" in torch.backends.quantized.supported_engines
        )
        if widen and (self._half or not self._one_row):
            self.dtype = torch.float32

    def tensor(self, tensor: Tensor) -> Tensor:
        """A tensor that outlives the gathering, in the decoder's dtype."""
        return tensor.detach().to(self.dtype, copy=self._sharded)

    def linear(self, *modules: Any) -> Projection:
        """One projection for several linear layers with the same input, outputs side by side."""
        weights = [effective_weight(module) for module in modules]
        biases = [_bias(module) for module in modules]
        if not self.copy:
            pairs = list(zip(weights, biases, strict=True))
            if len(pairs) == 1:
                return lambda x: F.linear(x, *pairs[0])
            return lambda x: torch.cat([F.linear(x, w, b) for w, b in pairs], dim=-1)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None
        if any(b is not None for b in biases):
            full = [
                w.new_zeros(len(w)) if b is None else b
                for w, b in zip(weights, biases, strict=True)
            ]
            bias = torch.cat(full).to(self.dtype)
        if self._half and _fits_half(weight):
            packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
            return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)
        weight = weight.to(self.dtype)
        if self._reordered and not self._one_row:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
            pointwise = torch.ops.mkldnn._linear_pointwise
            return lambda x: pointwise(x, packed, bias, "none", [], "")
        if self._reordered and self.dtype == torch.float32:
            # One row: a vector times a matrix streams a transposed copy at memory speed.
            transposed = weight.t().contiguous()
            if bias is None:
                return lambda x: x @ transposed
            return lambda x: (x @ transposed).add_(bias)
        if self._sharded and len(weights) == 1:
            weight = weight.clone()
        return lambda x: F.linear(x, weight, bias)


def _fits_half(weight: Tensor) -> bool:
    """bf16 has more range than fp16; weights beyond it would become infinite."""
    return bool(weight.abs().max() < torch.finfo(torch.float16).max)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attention of new tokens over all tokens so far, key/value heads shared by query heads.

    Args:
        query: `(rows, heads, new, head size)`.
        keys: `(rows, key heads, length, head size)`.
        values: like `keys`.
        mask: added to the scores, `(rows or 1, 1, new, length)`; None is causal without padding.
        scale: factor on the scores.

    Returns:
        `(rows, new, heads * head size)`.
    """
    rows, heads, new, size = query.shape
    groups = heads // keys.shape[1]
    if new == 1:
        # Query heads that share keys stand as queries of one head: no copy of the keys.
        out = F.scaled_dot_product_attention(
            query.reshape(rows, keys.shape[1], groups, size), keys, values, mask, scale=scale
        )
        return out.reshape(rows, 1, heads * size)
    if groups > 1:
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    out = F.scaled_dot_product_attention(
        query, keys, values, mask, is_causal=mask is None, scale=scale
    )
    return out.transpose(1, 2).reshape(rows, new, heads * size)


def additive_mask(
    attention_mask: Tensor | None, new: int, length: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """The mask that `attend` needs for `new` tokens at the end of `length`.

    A token may always look at itself, so that padding too has finite scores.

    Args:
        attention_mask: 1 on tokens, 0 on padding, `(rows, length)`; None without padding.
    """
    if attention_mask is None and (new == 1 or new == length):
        return None
    if new == 1:
        assert attention_mask is not None
        allowed = attention_mask.bool()[:, None, None, :]
    else:
        position = torch.arange(length, device=device)
        query = position[length - new :, None]
        allowed = (position <= query)[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :] | (position == query)
    return torch.zeros(allowed.shape, dtype=dtype, device=device).masked_fill_(
        ~allowed, torch.finfo(dtype).min
    )


class _Layer:
    """One block: cached attention over a fused projection, and a feed-forward network."""

    def __init__(self, layer: Any, layout: PackedLayout, packer: Packer) -> None:
        attention = layer.get_submodule(layout.attention)
        self.heads = attention.config.num_attention_heads
        self.key_heads = self.heads // getattr(attention, "num_key_value_groups", 1)
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.qkv = packer.linear(*map(attention.get_submodule, layout.qkv))
        self.out = packer.linear(attention.get_submodule(layout.out))
        self.up = packer.linear(*map(layer.get_submodule, layout.up))
        self.down = packer.linear(layer.get_submodule(layout.down))
        self.gated = len(layout.up) == 2
        self.activation = layer.get_submodule(layout.activation).forward
        self.norm_first = getattr(layer, "do_layer_norm_before", True)
        self.attention_norm = _norm(layer.get_submodule(layout.attention_norm), packer)
        self.norm = _norm(layer.get_submodule(layout.mlp_norm), packer)
        self.head_norms: tuple[Projection, Projection] | None = None
        if hasattr(attention, "q_norm"):
            self.head_norms = _norm(attention.q_norm, packer), _norm(attention.k_norm, packer)

    def __call__(
        self, x: Tensor, index: int, cache: KeyValueCache, mask: Tensor | None, rotary: Any
    ) -> Tensor:
        if self.norm_first:
            x = x + self.attention(self.attention_norm(x), index, cache, mask, rotary)
            return x + self.feed_forward(self.norm(x))
        x = self.attention_norm(x + self.attention(x, index, cache, mask, rotary))
        return self.norm(x + self.feed_forward(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(self.activation(self.up(x)))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up)

    def attention(
        self, x: Tensor, index: int, cache: KeyValueCache, mask: Tensor | None, rotary: Any
    ) -> Tensor:
        rows, new, _ = x.shape
        qkv = self.qkv(x).view(rows, new, self.heads + 2 * self.key_heads, self.head_size)
        query_key, value = qkv.split((self.heads + self.key_heads, self.key_heads), dim=2)
        if self.head_norms is not None:
            query, key = query_key.split((self.heads, self.key_heads), dim=2)
            query_key = torch.cat((self.head_norms[0](query), self.head_norms[1](key)), dim=2)
        if rotary is not None:
            cosine, signed_sine = rotary
            rolled = query_key.roll(self.head_size // 2, dims=-1)
            query_key = torch.addcmul(query_key * cosine, rolled, signed_sine)
        query, key = query_key.transpose(1, 2).split((self.heads, self.key_heads), dim=1)
        keys, values = cache.update(index, key, value.transpose(1, 2))
        return self.out(attend(query, keys, values, mask, self.scale))


def _norm(module: Any, packer: Packer) -> Projection:
    weight = None if module.weight is None else packer.tensor(module.weight)
    if hasattr(module, "variance_epsilon"):
        width, rms_epsilon = module.weight.shape, module.variance_epsilon
        return lambda x: F.rms_norm(x, width, weight, rms_epsilon)
    bias = None if module.bias is None else packer.tensor(module.bias)
    shape, epsilon = module.normalized_shape, module.eps
    return lambda x: F.layer_norm(x, shape, weight, bias, epsilon)


class PackedDecoder:
    """A forward for generation over weights in a layout of its own.

    Args:
        model: a causal language model of transformers for which `unsupported_reason` has none.
            Its weights may be sharded by ZeRO-3 (all ranks must then build at once) and carry LoRA
            adapters. They must not change while the decoder is in use.
        rows: sequences that are decoded at once, on average.
        copy: see `Packer`; needed for sharded weights.

    Raises:
        UnsupportedModel: see `unsupported_reason`.
    """

    def __init__(self, model: Any, rows: int, copy: bool = True) -> None:
        reason = unsupported_reason(model)
        layout = family_of(model.config.model_type).packed
        if reason is not None or layout is None:
            raise UnsupportedModel(reason)
        first = next(model.parameters())
        packer = Packer(first.dtype, first.device, rows, copy, hasattr(first, "ds_id"))
        self.dtype = packer.dtype
        self.device = first.device
        reading = _Reading()
        with torch.no_grad():
            self._read_decoder(model.get_submodule(layout.decoder), layout, packer, reading)
            self._read_embeddings(model, packer, reading)
        reading.finish()

    def _read_decoder(
        self, decoder: Any, layout: PackedLayout, packer: Packer, read: _Reading
    ) -> None:
        self.layers: list[Any] = []
        for layer in decoder.layers:
            self.layers.append(read(lambda module: _Layer(module, layout, packer), layer))
            if read.error is not None:
                # The gathers that are left need memory.
                self.layers.clear()
        self.project_in, self.project_out = (
            None if module is None else read(packer.linear, module)
            for module in (getattr(decoder, f"project_{way}", None) for way in ("in", "out"))
        )
        final_norm = getattr(decoder, layout.final_norm)
        self.norm = None
        if final_norm is not None:
            self.norm = read(lambda module: _norm(module, packer), final_norm)
        self.positions = None
        self.rotary_rows: tuple[Tensor, Tensor] | None = None
        if layout.learned_positions is None:
            # The method and not the module: a call would run into ZeRO-3's hooks.
            self.rotary = decoder.rotary_emb.forward
        else:
            table = decoder.get_submodule(layout.learned_positions)
            self.positions = read(lambda module: packer.tensor(effective_weight(module)), table)
            self.position_offset = table.offset

    def _read_embeddings(self, model: Any, packer: Packer, read: _Reading) -> None:
        # In one gather, as both may be the same parameter.
        both = read(
            lambda embedding, head: (
                packer.tensor(effective_weight(embedding)),
                packer.linear(head),
            ),
            model.get_input_embeddings(),
            model.get_output_embeddings(),
        )
        if both is not None:
            self.embedding, self.head = both

    def _rotary(self, positions: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of positions `(rows, new)` below `end`."""
        if self.rotary_rows is None or len(self.rotary_rows[0]) < end:
            known = torch.arange(max(256, 2 * end), device=self.device).unsqueeze(0)
            cosine, sine = self.rotary(torch.empty(0, dtype=self.dtype, device=self.device), known)
            half = sine.shape[-1] // 2
            signed = torch.cat((-sine[..., :half], sine[..., half:]), dim=-1)
            self.rotary_rows = (cosine[0], signed[0])
        cosine, signed = self.rotary_rows
        return cosine[positions].unsqueeze(2), signed[positions].unsqueeze(2)

    def step(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        cache: KeyValueCache,
    ) -> Tensor:
        """See `engine.generation.decode.Decoder`."""
        new = input_ids.shape[1]
        length = cache.length + new
        x = F.embedding(input_ids, self.embedding)
        if self.project_in is not None:
            x = self.project_in(x)
        rotary = None
        if self.positions is not None:
            x = x + F.embedding(positions + self.position_offset, self.positions)
        else:
            rotary = self._rotary(positions, length)
        mask = additive_mask(attention_mask, new, length, self.dtype, self.device)
        for index, layer in enumerate(self.layers):
            x = layer(x, index, cache, mask, rotary)
        cache.advance(new)
        x = x[:, -1]
        if self.norm is not None:
            x = self.norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        return self.head(x)


def unsupported_reason(model: Any) -> str | None:
    """Tell why a causal language model has no packed decoder; None if it has one."""
    config, name = model.config, type(model).__name__
    layout = family_of(config.model_type).packed
    if layout is None or name != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        return f"{name} has no packed layout"
    if layout.learned_positions is not None:
        return None
    rope = model.get_submodule(layout.decoder).rotary_emb.rope_type
    if "dynamic" in rope or rope == "longrope":
        return f"rope type {rope} depends on the length"
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if windows or (config.model_type == "mistral" and config.sliding_window is not None):
        return "sliding-window attention"
    return None
