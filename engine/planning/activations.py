"""Bytes of activations: what the backward pass needs, and what a forward pass holds at its peak.

Counted tensor by tensor from the blocks of transformers with fused attention, as in Korthikanti et
al. 2022 (arXiv 2205.05198), section 4, whose table is the case of GPT with dropout; the tests
compare with what autograd saves in the models themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.families.family import LinearLayer
from engine.planning.shapes import ModelShape

# Largest piece of logits that is converted to fp32 at once, as in engine.algorithms.log_probs.
_LOGITS_CHUNK = 2**24
_COMPOSED_ACTIVATIONS = ("gelu_new", "gelu_fast", "gelu_python")


def saved_blocks_per_token(
    shape: ModelShape,
    element: int,
    seq: int,
    dropout: float | None = None,
    on_cpu: bool = False,
    lora_rank: int = 0,
    lora_layers: int = 0,
    frozen_base: bool = False,
) -> list[int]:
    """Bytes per token of each tensor that one block keeps for the backward pass.

    Args:
        shape: the model.
        element: bytes of a number: 2 or 4.
        seq: tokens per row, on which masks and unfused scores depend.
        dropout: None for that of the model's config.
        on_cpu: CPU kernels keep dropout masks in the number's format and fuse no attention dropout.
        lora_rank: rank of adapters.
        lora_layers: layers of the block that carry one.
        frozen_base: the adapters train alone.
    """
    hidden, inner, queries = shape.hidden, shape.inner, shape.heads * shape.head_size
    keys = shape.key_value_heads * shape.head_size
    hidden_dropout = shape.dropout if dropout is None else dropout
    attention_dropout = shape.attention_dropout if dropout is None else dropout

    # Norms: of their inputs and outputs; RMS norms compute in fp32 and keep that copy. What they
    # have normalised is there for the gradient of their weight alone.
    family, weighted = shape.family, 0 if frozen_base else 1
    if family.rms_norms:
        weight = 4 if family.fp32_norm_weights else element
        norms = [4 * hidden] * family.rms_norms + [weight * hidden] * family.rms_norms * weighted
        norms += [element * hidden] * 2
        if family.head_norms:
            norms += [4 * queries, 4 * keys, *[weight * queries, weight * keys] * weighted]
    else:
        norms = [element * hidden] * 4

    # Attention: queries, keys and values (both repeated to all heads), output, log-sum and mask.
    scores = shape.heads * seq
    if not family.fused_attention:
        # The softmax is in fp32, and cast back where the model is not.
        attention = [element * queries] * 4 + [4 * scores]
        attention += [element * scores] * ((element == 2) + bool(attention_dropout))
    elif attention_dropout and on_cpu:
        attention = [4 * queries, 4 * scores] * 3 + [element * queries]
    else:
        attention = [element * queries] * 4 + [4 * shape.heads, element * seq]
        if family.fused_qkv:
            attention[:3] = [3 * element * queries]
        if family.fused_qkv and family.rotary:
            # Rotated copies of queries and keys, beside the fused product that has the values.
            attention += [element * queries] * 2

    if shape.gated:
        activations = 4
    elif shape.activation == "relu":
        activations = 1
    else:
        activations = 5 if shape.activation in _COMPOSED_ACTIVATIONS else 2
    masks = 2 if hidden_dropout and not shape.gated else 0
    return [
        *norms,
        *attention,
        *[element * inner] * activations,
        *[hidden * (element if on_cpu else 1)] * masks,
        *[element * lora_rank] * lora_layers,
    ]


def freed_blocks_per_token(
    shape: ModelShape,
    element: int,
    adapted: Iterable[LinearLayer] = (),
    frozen_base: bool = False,
) -> list[int]:
    """Bytes per token of each tensor that one block makes in its forward pass and lets go again.

    Without scores of attention that is not fused.

    Args:
        shape: the model.
        element: bytes of a number: 2 or 4.
        adapted: the block's layers with adapters.
        frozen_base: the adapters train alone.
    """
    hidden, queries = shape.hidden, shape.heads * shape.head_size
    keys = shape.key_value_heads * shape.head_size
    # A layer's output, its adapter's, that scaled.
    adapters = [element * layer.outputs for layer in adapted for _ in range(3)]
    if not shape.gated:
        # ReLU keeps its output for the backward pass, and drops its input.
        wide = shape.family.activation_temporaries or shape.activation == "relu"
        return [element * hidden] * 3 + [element * shape.inner] * wide + adapters
    # Squares for RMS norms in fp32, and from 16 bits the normed input too; what nobody keeps for
    # the gradient of a weight goes as well.
    normed = [hidden] * shape.family.rms_norms
    normed += [queries, keys] if shape.family.head_norms else []
    norms = [4 * width for width in normed] * ((1 if element == 4 else 2) + frozen_base)
    # Queries and keys: products, their halves swapped (one of them negated), what is summed.
    rotation = [element * width for width in (queries, keys)] * 4
    rotation += [element * width // 2 for width in (queries, keys)]
    return [element * hidden] * 3 + rotation + norms + adapters


def working_bytes_per_token(shape: ModelShape, element: int) -> int:
    """Bytes a token that a block holds at once besides what it keeps: forward or backward."""
    return element * ((3 if shape.gated else 2) * shape.inner + 2 * shape.hidden) + 4 * shape.hidden


def logits_training_bytes(shape: ModelShape, tokens: int, element: int, held: bool = False) -> int:
    """Most bytes that logits of `tokens` and their gradients hold in the backward pass.

    `held`: the caller keeps the logits until the end, as PPO does and SFT does not.
    """
    logits = tokens * shape.vocabulary
    chunk = min(logits, _LOGITS_CHUNK)
    kept = logits * element if held else 0
    return max(
        12 * chunk + kept,
        (4 + element) * logits + (8 if held else 4) * chunk,
        2 * element * logits + kept,
    )


def logits_scoring_bytes(
    shape: ModelShape, tokens: int, element: int, with_reference: bool = False
) -> int:
    """Bytes of logits without gradients: whole in the model's format, in fp32 piece by piece.

    `with_reference`: the reference's beside the actor's, of which the entropy is taken too.
    """
    logits = tokens * shape.vocabulary
    chunk = min(logits, _LOGITS_CHUNK)
    if not with_reference:
        return logits * element + 12 * chunk
    return logits * element + max(logits * element + 12 * chunk, 16 * chunk)
