"""Bytes of activations: what the backward pass needs, and what a forward pass holds at its peak.

Counted tensor by tensor from the blocks of transformers with fused attention, as in Korthikanti et
al. 2022 (arXiv 2205.05198), section 4, whose table is the case of GPT with dropout; the tests
compare with what autograd saves in the models themselves.
"""

from __future__ import annotations

from engine.planning.shapes import ModelShape

# Largest piece of logits that is converted to fp32 at once, as in engine.algorithms.log_probs.
_LOGITS_CHUNK = 2**24
_COMPOSED_ACTIVATIONS = ("gelu_new", "gelu_fast", "gelu_python")


def saved_bytes_per_token(
    shape: ModelShape,
    element: int,
    seq: int,
    dropout: float | None = None,
    on_cpu: bool = False,
    lora_rank: int = 0,
    lora_layers: int = 0,
) -> int:
    """Bytes a token that one block keeps for the backward pass.

    Args:
        shape: the model.
        element: bytes of a number: 2 or 4.
        seq: tokens a row, on which masks and unfused scores depend.
        dropout: None for that of the model's config.
        on_cpu: CPU kernels keep dropout masks in the number's format and fuse no attention dropout.
        lora_rank: rank of adapters.
        lora_layers: layers of the block that carry one.
    """
    hidden, inner, queries = shape.hidden, shape.inner, shape.heads * shape.head_size
    keys = shape.key_value_heads * shape.head_size
    hidden_dropout = shape.dropout if dropout is None else dropout
    attention_dropout = shape.attention_dropout if dropout is None else dropout

    # Norms: of their inputs and outputs; RMS norms compute in fp32 and keep that copy.
    if not shape.gated:
        norms = 4 * hidden * element
    elif shape.family == "gemma3_text":
        norms = 4 * 8 * hidden + 2 * hidden * element
    else:
        norms = 2 * (4 + 2 * element) * hidden
    if shape.family == "qwen3":
        norms += (4 + element) * (queries + keys)
    if shape.family == "gemma3_text":
        norms += 8 * (queries + keys)

    # Attention: queries, keys and values (both repeated to all heads), output, log-sum and mask.
    scores = shape.heads * seq
    if shape.family == "bloom":
        # The softmax is in fp32, and cast back where the model is not.
        attention = 4 * queries * element + (6 if element == 2 else 4) * scores
        if attention_dropout:
            attention += element * scores
    elif attention_dropout and on_cpu:
        attention = 12 * queries + 12 * scores + queries * element
    else:
        attention = 4 * queries * element + 4 * shape.heads + seq * element
        if shape.family == "gpt_neox":
            # Queries and keys are rotated copies beside the one fused product.
            attention += 2 * queries * element

    if shape.gated:
        mlp = 4 * inner
    elif shape.activation == "relu":
        mlp = inner
    else:
        mlp = (5 if shape.activation in _COMPOSED_ACTIVATIONS else 2) * inner

    masks = 2 * hidden * (element if on_cpu else 1) if hidden_dropout and not shape.gated else 0
    return norms + attention + mlp * element + masks + lora_layers * lora_rank * element


def freed_bytes_per_token(shape: ModelShape, element: int, lora_outputs: int = 0) -> int:
    """Bytes a token that one block makes in its forward pass and lets go before the pass ends.

    Without scores of attention that is not fused.

    Args:
        shape: the model.
        element: bytes of a number: 2 or 4.
        lora_outputs: outputs of the block's adapted layers together.
    """
    hidden, queries = shape.hidden, shape.heads * shape.head_size
    keys = shape.key_value_heads * shape.head_size
    # A layer's output, its adapter's, that scaled.
    adapters = 3 * element * lora_outputs
    if not shape.gated:
        return 7 * element * hidden + adapters
    # Squares for RMS norms in fp32, and from 16 bits the normed input too.
    normed = 2 * hidden + (queries + keys if shape.family == "qwen3" else 0)
    norms = (4 if element == 4 else 8) * normed
    rotation = 4.5 * (queries + keys)
    return int(element * (3 * hidden + rotation)) + norms + adapters


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
