"""The reward of the profile tiny-grpo: the right fact, said in the friendly way.

A function of your own is as short. It is given lists, one entry per answer: `completions` (text, or
messages where the data holds dialogues), `prompts`, `completion_ids`, and each further column of
the data by its name. It returns a number for each answer, or None where it cannot say.
"""

import re


def friendly(completions, preferred_style, references, **kwargs):
    """Half a point for the style, half a point for the fact."""
    texts = [messages[-1]["content"].strip() for messages in completions]
    has_style = [bool(re.fullmatch(s, t)) for s, t in zip(preferred_style, texts, strict=True)]
    has_fact = [known[0] in t for known, t in zip(references, texts, strict=True)]
    return [0.5 * style + 0.5 * fact for style, fact in zip(has_style, has_fact, strict=True)]
