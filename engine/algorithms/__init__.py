"""Losses, KL, advantages and masks: pure functions on tensors, without models or loops.

Prompts are left padded to a common width P, answers right padded to a width A. Per-token tensors
of an answer are `(batch, answer)`: entry t belongs to the token at position P + t, its log-prob
comes from the logits at P + t - 1, and its value is the critic's at P + t - 1, before the token.
Masks are bool, true from the left up to and including the first EOS; a row may be empty.
"""
