"""How answers are generated: the settings, their ranges and their help."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypedDict


class Generation(TypedDict):
    """The settings of one answer, as a generator takes them."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int | None


@dataclass
class Settings:
    """Settings of a conversation; the defaults are greedy, as the original's chat was."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                self.set(each.name, str(value))

    def set(self, name: str, text: str) -> None:
        """Change one setting.

        Raises:
            ValueError: no such setting, not a number, or out of its range.
        """
        if name not in RANGES:
            raise ValueError(f"There is no setting {name!r}; there are {', '.join(RANGES)}.")
        allowed = RANGES[name]
        if name == "seed" and text == "none":
            self.seed = None
            return
        try:
            value = allowed.kind(text)
        except ValueError:
            kind = "a whole number" if allowed.kind is int else "a number"
            raise ValueError(f"{name} is {kind}, not {text!r}.") from None
        if not allowed.low <= value <= allowed.high:
            raise ValueError(f"{name} is {text}; it must be from {allowed.low} to {allowed.high}.")
        setattr(self, name, value)


@dataclass(frozen=True)
class Range:
    """The values that a setting may take."""

    kind: type[int] | type[float]
    low: float
    high: float
    help: str


RANGES = {
    "max_new_tokens": Range(int, 1, 1_000_000, "most tokens of an answer"),
    "temperature": Range(float, 0.0, 5.0, "0 always takes the likeliest token; 1 samples as is"),
    "top_p": Range(float, 0.01, 1.0, "sample from the likeliest tokens with this share; 1 is off"),
    "top_k": Range(int, 0, 1_000_000, "sample from so many likeliest tokens; 0 is off"),
    "repetition_penalty": Range(float, 0.1, 10.0, "above 1 makes used tokens less likely"),
    "seed": Range(int, 0, 2**63 - 1, "makes sampled answers repeatable; none is off"),
}
