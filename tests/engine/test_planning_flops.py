"""Operations and bytes against counts by hand and against what torch executes."""

import math

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch.utils.flop_counter import FlopCounterMode

from engine.planning import (
    ModelShape,
    forward_flops,
    generation_flops,
    kv_cache_bytes,
    training_flops,
    weight_bytes_read_per_token,
)

LLAMA = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 50,
    "hidden_size": 32,
    "ffn_dim": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 16,
    "pad_token_id": 1,
    "dropout": 0.0,
}
BATCH, SEQ = 3, 7


def build(config: dict, head: str = "lm") -> torch.nn.Module:
    options = dict(config)
    made = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    made._attn_implementation = "eager"
    torch.manual_seed(0)
    if head == "score":
        made.num_labels = 1
        return transformers.AutoModelForSequenceClassification.from_config(made)
    return transformers.AutoModelForCausalLM.from_config(made)


def executed(function) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def tokens(config: dict, batch: int = BATCH, seq: int = SEQ) -> torch.Tensor:
    return torch.randint(2, config["vocab_size"], (batch, seq))


def test_forward_by_hand():
    shape = ModelShape.from_config(LLAMA)
    # A block: q 4x4, k 4x2, v 4x2, o 4x4, gate 4x6, up 4x6, down 6x4 = 120 weights.
    assert shape.matmul_parameters == 2 * 120 + 10 * 4
    # One row of three tokens: 2 x 3 tokens x 120 x 2 blocks = 1440; attention: scores and values
    # each 2 x 3 x 3 x 2 a head, 2 heads, 2 blocks = 288; logits 2 x 3 x 4 x 10 = 240.
    assert forward_flops(shape, 1, 3) == 1440 + 288 + 240
    assert forward_flops(shape, 1, 3, logits_tokens=1) == 1440 + 288 + 80
    assert forward_flops(shape, 1, 3, head="score") == 1440 + 288 + 24
    assert forward_flops(shape, 5, 3) == 5 * forward_flops(shape, 1, 3)


def test_generation_by_hand():
    shape = ModelShape.from_config(LLAMA)
    # A prompt of 3: 1440 + 288 and one row of logits, 80. The second token: 2 x 120 x 2 = 480,
    # attention over 4 keys 4 x 4 x 2 x 2 x 2 = 128, logits 80. The third: over 5 keys, 160.
    assert generation_flops(shape, 1, 3, 1) == 1808
    assert generation_flops(shape, 1, 3, 2) == 1808 + 688
    assert generation_flops(shape, 1, 3, 3) == 1808 + 688 + 720
    assert generation_flops(shape, 4, 3, 0) == 0
    whole = [forward_flops(shape, 2, length, logits_tokens=1) for length in (3, 4, 5)]
    assert generation_flops(shape, 2, 3, 3, cache=False) == sum(whole)


def test_bytes_by_hand():
    shape = ModelShape.from_config(LLAMA)
    # 2 blocks of 120 weights and 8 norms, a final norm of 4, logits 40.
    assert weight_bytes_read_per_token(shape, 2) == 2 * (2 * 128 + 4 + 40)
    # Keys and values of one head of 2 in 2 blocks: 8 values a token.
    assert kv_cache_bytes(shape, 3, 5, 2) == 8 * 3 * 5 * 2


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("head", ["lm", "score"])
def test_forward_and_training_as_torch_executes(config, head):
    shape = ModelShape.from_config(config)
    model, rows = build(config, head), tokens(config)
    assert executed(lambda: model(rows)) == forward_flops(shape, BATCH, SEQ, head)
    assert executed(lambda: model(rows).logits.sum().backward()) == training_flops(
        shape, BATCH, SEQ, head=head
    )


def test_frozen_base_as_torch_executes():
    shape = ModelShape.from_config(OPT)
    model, rows = build(OPT).requires_grad_(False), tokens(OPT)
    embedded = model.get_input_embeddings()(rows).requires_grad_()
    measured = executed(lambda: model(inputs_embeds=embedded).logits.sum().backward())
    assert measured == training_flops(shape, BATCH, SEQ, frozen_base=True)


def test_checkpointing_adds_the_blocks_once():
    shape = ModelShape.from_config(LLAMA)
    model, rows = build(LLAMA), tokens(LLAMA)
    model.gradient_checkpointing_enable()
    model.train()
    # Left on, torch may end a block's second pass before its last product: which depends on
    # whether something in this process has loaded DeepSpeed's own linear layer (ZeRO-3 does).
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        measured = executed(lambda: model(rows).logits.sum().backward())
    assert measured == training_flops(shape, BATCH, SEQ, checkpointing=True)


@pytest.mark.parametrize("config", [LLAMA, OPT], ids=["llama", "opt"])
@pytest.mark.parametrize("cache", [True, False])
def test_generation_as_torch_executes(config, cache):
    shape = ModelShape.from_config(config)
    model, rows = build(config).eval(), tokens(config)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "use_cache": cache}
    assert executed(lambda: model.generate(rows, **options)) == generation_flops(
        shape, BATCH, SEQ, 4, cache
    )


def test_of_a_shape_that_is_not_known_no_operations_are_known():
    counts = (
        forward_flops(None, 2, 8),
        training_flops(None, 2, 8),
        generation_flops(None, 2, 8, 0),
        weight_bytes_read_per_token(None, 2),
    )
    assert all(math.isnan(count) for count in counts)
    assert ModelShape.if_known({"model_type": "phi3"}) is None
    assert ModelShape.if_known(OPT) == ModelShape.from_config(OPT)
    with pytest.raises(ValueError, match="lacks"):
        ModelShape.if_known({"model_type": "opt"})
