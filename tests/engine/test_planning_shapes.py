"""Parameter counts against the models themselves and against published counts."""

import json

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from engine.planning import ModelShape

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OPT = {
    "model_type": "opt",
    "vocab_size": 96,
    "hidden_size": 32,
    "ffn_dim": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "pad_token_id": 0,
}
TINY = {
    "llama": {"model_type": "llama", **LLAMA},
    "llama with biases": {
        "model_type": "llama",
        **LLAMA,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama with wide heads": {"model_type": "llama", **LLAMA, "head_dim": 16},
    "qwen2": {"model_type": "qwen2", **LLAMA},
    "qwen3": {"model_type": "qwen3", **LLAMA, "head_dim": 16},
    "qwen3 with biases": {
        "model_type": "qwen3",
        **LLAMA,
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"model_type": "mistral", **LLAMA},
    "gemma3": {"model_type": "gemma3_text", **LLAMA, "head_dim": 16},
    "smollm3": {"model_type": "smollm3", **LLAMA},
    "opt": OPT,
    "opt projected": {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "opt without biases": {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False},
    "opt untied": {**OPT, "tie_word_embeddings": False},
    "gpt2": GPT2,
    "gpt2 inner": {**GPT2, "n_inner": 48},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 72,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    },
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 96,
        "hidden_size": 32,
        "n_layer": 3,
        "n_head": 4,
        "pad_token_id": 0,
    },
}
LLAMA_2_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 4096,
}
PUBLISHED = {
    "opt-350m": (
        331_196_416,
        {
            "model_type": "opt",
            "vocab_size": 50272,
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "opt-1.3b": (
        1_315_758_080,
        {
            "model_type": "opt",
            "vocab_size": 50272,
            "hidden_size": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 2048,
        },
    ),
    "llama-2-7b": (6_738_415_616, LLAMA_2_7B),
    "smollm2-135m": (
        134_515_008,
        {
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3-3b": (
        3_075_098_624,
        {
            "model_type": "smollm3",
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "max_position_embeddings": 65536,
        },
    ),
    "qwen2.5-0.5b": (
        494_032_768,
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3-0.6b": (
        596_049_920,
        {
            "model_type": "qwen3",
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": True,
        },
    ),
    "mistral-7b": (
        7_241_732_096,
        {
            "model_type": "mistral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32768,
        },
    ),
    "gemma-3-1b": (
        999_885_952,
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "max_position_embeddings": 32768,
        },
    ),
    "gpt2": (
        124_439_808,
        {
            "model_type": "gpt2",
            "vocab_size": 50257,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_positions": 1024,
        },
    ),
    "pythia-160m": (
        162_322_944,
        {
            "model_type": "gpt_neox",
            "vocab_size": 50304,
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 2048,
        },
    ),
    "bloom-560m": (
        559_214_592,
        {
            "model_type": "bloom",
            "vocab_size": 250880,
            "n_embed": 1024,
            "n_layer": 24,
            "num_attention_heads": 16,
        },
    ),
}


def build(config: dict, head: str = "lm") -> torch.nn.Module:
    """The real model of a config.json's content."""
    options = dict(config)
    made = transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    torch.manual_seed(0)
    if head == "score":
        made.num_labels = 1
        return transformers.AutoModelForSequenceClassification.from_config(made)
    return transformers.AutoModelForCausalLM.from_config(made)


@pytest.mark.parametrize("name", TINY)
def test_counts_equal_the_real_model(name):
    shape = ModelShape.from_config(TINY[name])
    model, critic = build(TINY[name]), build(TINY[name], "score")
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.parameters_with("score") == sum(p.numel() for p in critic.parameters())
    tables = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    assert shape.embedding_parameters == sum(table.weight.numel() for table in tables)


@pytest.mark.parametrize("name", TINY)
def test_layers_are_those_of_the_real_model(name):
    real = {
        path: module.weight.numel()
        for path, module in build(TINY[name]).named_modules()
        if type(module).__name__ in ("Linear", "Conv1D")
    }
    head = real.pop("lm_head")
    shape = ModelShape.from_config(TINY[name])
    assert {layer.name: layer.weights for layer in shape.linear_layers()} == real
    assert shape.matmul_parameters == sum(real.values()) + head


@pytest.mark.parametrize(
    ("name", "pattern"), [("llama", "v_proj$"), ("opt", "fc"), ("gpt2", "attn")]
)
def test_lora_counts_equal_peft(name, pattern):
    shape = ModelShape.from_config(TINY[name])
    layers = shape.lora_layers([pattern])
    adapted = get_peft_model(
        build(TINY[name]),
        LoraConfig(r=4, target_modules=[layer.name for layer in layers]),
    )
    trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert shape.lora_parameters(4, [pattern]) == trainable
    assert 0 < trainable < shape.lora_parameters(4)


def test_lora_pattern_without_a_match_is_refused():
    shape = ModelShape.from_config(TINY["llama"])
    with pytest.raises(ValueError, match=r"decoder\\?\.layers.*q_proj"):
        shape.lora_parameters(4, ["decoder.layers"])


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    count, config = PUBLISHED[name]
    assert ModelShape.from_config(config).parameters == count


def test_reads_a_saved_folder(tmp_path):
    model = build(TINY["qwen3"])
    model.save_pretrained(tmp_path)
    assert ModelShape.from_folder(tmp_path).parameters == model.num_parameters()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ValueError, match="t5"):
        ModelShape.from_folder(tmp_path)


def test_missing_size_is_named():
    with pytest.raises(ValueError, match="ffn_dim"):
        ModelShape.from_config({"model_type": "opt", "hidden_size": 8})
