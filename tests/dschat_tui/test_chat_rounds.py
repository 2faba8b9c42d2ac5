"""Long conversations: session and generator together on a tiny random model."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dschat_tui.chat.commands import respond
from dschat_tui.chat.events import Answer, Note
from dschat_tui.chat.session import Session
from dschat_tui.chat.settings import Settings
from engine.generation.chat import ChatGenerator


@pytest.fixture(scope="module")
def parts():
    """A model of 512 tokens with random weights, and a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<eos>", "<pad>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    return LlamaForCausalLM(config).eval(), tokenizer


def test_fifty_rounds_with_kept_cache_answer_as_computed_afresh(parts) -> None:
    generator = ChatGenerator(*parts, "tiny")
    afresh = ChatGenerator(*parts, "afresh")
    session = Session(generator, Settings(max_new_tokens=16))
    cuts = kept = 0
    for number in range(50):
        line = f"Question {number}?"
        if number in (20, 35):
            line = "/retry"
        if number in (21, 36):
            assert len(list(respond(session, "/undo"))) == 1
        if number == 30:
            list(respond(session, "clear"))
        events = list(respond(session, line))
        (answer,) = (event for event in events if isinstance(event, Answer))
        cuts += any(isinstance(e, Note) and "no longer sees" in e.text for e in events)
        kept += answer.statistics.kept_tokens
        afresh.session.truncate(0)
        conversation = session.visible()[:-1]
        assert answer.text == "".join(afresh.stream(conversation, max_new_tokens=16))
        assert afresh.usage.kept_tokens == 0
        assert "Human:" not in answer.text
    assert cuts >= 2
    assert kept > 50 * 100
