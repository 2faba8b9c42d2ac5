"""Floating-point operations and bytes moved by a model, counted by its matrix products.

A product of `(m, k)` and `(k, n)` is `2 m n k` operations (a multiplication and an addition).
Per block that gives `2 tokens weights` for the linear layers and `4 queries keys heads head_size`
for attention's scores and values; the backward pass is two such products for each of the forward
pass (Narayanan et al. 2021, arXiv 2104.04473, appendix; Kaplan et al. 2020, 2001.08361, 2.1).
Attention counts the full square in training and prefill, as the kernels with a padding mask
compute it. Element-wise work (norms, softmax, activations) is left out, as in those papers.

Where a trainer may ask, the shape may be None, for a family that the planner does not know: the
result is nan then, so that sums and rates of it are not known either.
"""

from __future__ import annotations

import math

from engine.planning.shapes import Head, ModelShape


def forward_flops(
    shape: ModelShape | None,
    batch: int,
    seq: int,
    head: Head = "lm",
    logits_tokens: int | None = None,
) -> float:
    """Operations of one forward pass over `(batch, seq)` tokens.

    `logits_tokens` is the number of positions per row that the head is applied to; None: all.
    """
    if shape is None:
        return math.nan
    return (
        _linear(shape, batch * seq)
        + _attention(shape, batch, seq, seq)
        + _head(shape, batch * (seq if logits_tokens is None else logits_tokens), head)
    )


def training_flops(
    shape: ModelShape | None,
    batch: int,
    seq: int,
    checkpointing: bool = False,
    frozen_base: bool = False,
    head: Head = "lm",
) -> float:
    """Operations of a forward and a backward pass over `(batch, seq)` tokens.

    The backward pass takes two products for each of the forward pass: the gradient of the input
    and that of the weight. With `frozen_base` (LoRA alone) the weights' gradients fall away, those
    of attention, whose operands are both activations, do not; the adapters themselves are not
    counted. `checkpointing` runs the blocks' forward pass once more; the head is not recomputed.
    """
    if shape is None:
        return math.nan
    linear = _linear(shape, batch * seq)
    attention = _attention(shape, batch, seq, seq)
    head_cost = _head(shape, batch * seq, head)
    weights_factor = 2 if frozen_base else 3
    # A score head trains even where the base is frozen; the language-model head does not.
    head_factor = 3 if head == "score" else weights_factor
    total = weights_factor * linear + 3 * attention + head_factor * head_cost
    return total + (linear + attention if checkpointing else 0)


def generation_flops(
    shape: ModelShape | None, batch: int, prompt: int, answer: int, cache: bool = True
) -> float:
    """Operations of generating `answer` tokens after `prompt` tokens, for `batch` rows.

    The pass over the prompt yields the first new token; each further one takes a pass over one
    token, whose attention reads all tokens before it and itself. The last one is never read.
    Without a `cache` each pass runs over all tokens so far.
    """
    if shape is None:
        return math.nan
    if answer == 0:
        return 0
    total = 0
    for length in range(prompt, prompt + answer):
        first = length == prompt
        queries = length if first or not cache else 1
        total += _linear(shape, batch * queries)
        total += _attention(shape, batch, queries, length)
        total += _head(shape, batch, "lm")
    return total


def weight_bytes_read_per_token(shape: ModelShape | None, bytes_per_parameter: int) -> float:
    """Bytes of weights that one decoding step must read, whatever its batch.

    All matrices, biases and norms, the head also where it is tied; of the embedding tables only a
    row a token is read, which is left out.
    """
    if shape is None:
        return math.nan
    without_tables = shape.backbone_parameters - shape.embedding_parameters
    return bytes_per_parameter * (without_tables + shape.vocabulary * shape.head_inputs)


def kv_cache_bytes(shape: ModelShape, batch: int, tokens: int, bytes_per_value: int) -> int:
    """Bytes of the keys and values of `(batch, tokens)`, all layers; what a decoding step reads."""
    values = 2 * shape.layers * shape.key_value_heads * shape.head_size
    return values * batch * tokens * bytes_per_value


def _linear(shape: ModelShape, tokens: int) -> int:
    return 2 * tokens * shape.backbone_weights


def _attention(shape: ModelShape, batch: int, queries: int, keys: int) -> int:
    return 4 * shape.layers * batch * shape.heads * shape.head_size * queries * keys


def _head(shape: ModelShape, tokens: int, head: Head) -> int:
    return 2 * tokens * shape.head_inputs * (shape.vocabulary if head == "lm" else 1)
