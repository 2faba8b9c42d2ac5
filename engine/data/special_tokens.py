"""Tokenising text that spells special tokens: it stays text, while real ones stay special."""

from __future__ import annotations

import copy
import functools
import re
import secrets
from collections.abc import Callable, Iterable

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from engine.data.files import DataError

# Two planes of code points without any character: they have no case, and no one writes them. One
# numbers the special tokens; from the other come the names, which share no character with them.
_NUMBERS = 0xF0000
_NAMES = range(0x100000, 0x10FFFE)


class SpecialTokens:
    """Keeps special tokens that a template writes apart from those spelled in user text.

    Those spelled in text go through the template under other names. Afterwards the template's own
    special tokens get other names, and a copy of the tokenizer, which knows those and ignores the
    true ones, reads the whole text at once. Tokenised in pieces it would lose merges at the seams,
    and SentencePiece would put a space before each piece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        # Tokenizers written in Python may not set this flag on special tokens.
        named = set(tokenizer.all_special_ids)
        added = tokenizer.added_tokens_decoder
        tokens = {i: token for i, token in added.items() if token.special or i in named}
        self._spelled = _any_of(token.content for token in tokens.values())
        own, hidden, self._break = _new_names(3)
        self._own = {t.content: own + chr(_NUMBERS + i) for i, t in enumerate(tokens.values())}
        self._hidden = {name: hidden + own_name[-1] for name, own_name in self._own.items()}
        self._hidden_names = {hidden_name: name for name, hidden_name in self._hidden.items()}
        self._torn = re.compile(f"[{hidden}]")
        if tokenizer.is_fast:
            stand_ins = [
                AddedToken(
                    self._own[token.content],
                    single_word=token.single_word,
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                )
                for token in tokens.values()
            ]
            self._copy = copy.deepcopy(tokenizer)
            self._copy.add_tokens([*stand_ins, AddedToken(self._break, normalized=False)])
            stand_in_id = self._copy.convert_tokens_to_ids
        else:
            names = [*self._own.values(), self._break]
            stand_in_id = {name: -1 - i for i, name in enumerate(names)}.__getitem__
        self._ids = {name: stand_in_id(name) for name in (*self._own.values(), self._break)}
        self._real = {self._ids[self._own[token.content]]: i for i, token in tokens.items()}
        # Unknown characters become <unk> anywhere.
        self._never_text = tokens.keys() - {tokenizer.unk_token_id}

    def spelled(self, text: str) -> bool:
        """Whether a text spells a special token."""
        return self._spelled.search(text) is not None

    def hide(self, text: str) -> str:
        """The text with other names for the special tokens that it spells, for `encode`."""
        return self._spelled.sub(lambda found: self._hidden[found[0]], text)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text: hidden special tokens are text, all others are special.

        Raises:
            DataError: the chat template tore apart what `hide` put in.
        """
        marked = self._spelled.sub(lambda found: self._own[found[0]], text)
        ids = self._stand_in_ids(self._shown(marked, lambda name: name))
        if not self._never_text.isdisjoint(ids):
            # Unigram and word-level vocabularies also contain the special tokens as words.
            broken = self._shown(marked, lambda name: name[0] + self._break + name[1:])
            ids = self._stand_in_ids(broken)
        return [self._real.get(i, i) for i in ids if i != self._ids[self._break]]

    def _shown(self, text: str, spelling: Callable[[str], str]) -> str:
        hidden = _any_of(self._hidden_names)
        text = hidden.sub(lambda found: spelling(self._hidden_names[found[0]]), text)
        if self._torn.search(text):
            raise DataError(
                "the tokenizer's chat template cuts a turn in the middle of a text that spells a "
                "special token; set data.template=human_assistant"
            )
        return text

    def _stand_in_ids(self, text: str) -> list[int]:
        if self._tokenizer.is_fast:
            return _plain_ids(self._copy, text)
        # Tokenizers written in Python tokenise text between special tokens separately anyway.
        ids: list[int] = []
        for piece in re.split(f"({_any_of(self._ids).pattern})", text):
            if piece in self._ids:
                ids.append(self._ids[piece])
            elif piece:
                ids += _plain_ids(self._tokenizer, piece)
        return ids


special_tokens = functools.lru_cache(maxsize=8)(SpecialTokens)
"""The `SpecialTokens` of a tokenizer, made once."""


def _plain_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids


def _new_names(number: int) -> list[str]:
    """Names that no text has, drawn anew in each process, without a character in common."""
    length = 6
    drawn = "".join(map(chr, secrets.SystemRandom().sample(_NAMES, number * length)))
    return [drawn[i * length : (i + 1) * length] for i in range(number)]


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the names, the longest that fits; never matches where there are none."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
