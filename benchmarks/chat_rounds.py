"""Time to the first token over fifty rounds of chat, with the kept cache and without.

    python benchmarks/chat_rounds.py [--path embedded:tiny-llama]

A round's time is the median of itself and its two neighbours on each side, so that one busy
moment, or one cut of the history, does not decide.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch

from dschat_tui.chat.events import Answer, Note
from dschat_tui.chat.session import Session
from dschat_tui.chat.settings import Settings
from engine.generation.chat import ChatGenerator
from engine.models.folders import resolve_model

ROUNDS, EARLY, LATE = 50, 5, 40
CONTEXT = 512


def first_token_times(generator: ChatGenerator, keep: bool) -> tuple[list[float], int, int]:
    """Seconds to the first token of each round, the cuts of the history, and failures."""
    session = Session(generator, Settings(max_new_tokens=24))
    times, cuts, leaks = [], 0, 0
    for number in range(ROUNDS):
        if not keep:
            generator.session.truncate(0)
        for event in session.ask(f"What is {number} plus {number + 1}?"):
            if isinstance(event, Answer):
                times.append(event.statistics.first_token_seconds)
                leaks += "Human:" in event.text
            cuts += isinstance(event, Note) and "no longer sees" in event.text
    return times, cuts, leaks


def around(times: list[float], number: int) -> float:
    """The time of a round, counted from 1, among its neighbours."""
    return median(times[number - 3 : number + 2])


def main() -> None:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", default="embedded:tiny-llama", help="a model or its name")
    arguments = parser.parse_args()
    path = resolve_model(arguments.path)
    generator = ChatGenerator.from_pretrained(path, arguments.path, torch.float32)
    # Rotary positions go on beyond the tiny model's own context; only times matter here.
    generator.context = CONTEXT
    first_token_times(generator, keep=True)
    print(f"{arguments.path}, context {generator.context} tokens, {ROUNDS} rounds")
    for keep, name in ((True, "cache kept"), (False, "computed afresh")):
        times, cuts, leaks = first_token_times(generator, keep)
        early, late = around(times, EARLY), around(times, LATE)
        print(
            f"{name:16} round {EARLY}: {1000 * early:6.1f} ms, round {LATE}: {1000 * late:6.1f} ms,"
            f" ratio {late / early:.2f}; cuts {cuts}, answers with 'Human:' {leaks}"
        )


if __name__ == "__main__":
    main()
