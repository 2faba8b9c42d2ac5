"""Answers from language models: plain generation, the decode loop, the hybrid engine.

Prompts come left padded `(batch, prompt)` with an attention mask; answers leave right padded.
"""
