"""Random order that is the same in every process, Python and numpy version."""

from __future__ import annotations

import hashlib

import numpy as np


def shuffled(count: int, *key: object) -> np.ndarray:
    """A permutation of `range(count)`, int64 `(count,)`, determined by the key.

    Sorts the indices by a hash (the finaliser of SplitMix64, Steele et al. 2014): library
    generators may change their streams between versions.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    with np.errstate(over="ignore"):
        x = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.uint64(int.from_bytes(digest, "little"))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable")
