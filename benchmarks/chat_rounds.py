"""Time to the first token over fifty rounds of chat, with the kept cache and without.

    python benchmarks/chat_rounds.py [--path embedded:tiny-llama]

A round's time is the median of itself and its two neighbours on each side, so that one busy
moment, or one cut of the history, does not decide. Beside the time on the clock stands the CPU
time of this process (`OMP_NUM_THREADS=1` makes it comparable), which others' work disturbs less.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field
from statistics import median

import torch

from dschat_tui.chat.events import Answer, Note, Token
from dschat_tui.chat.session import Session
from dschat_tui.chat.settings import Settings
from engine.generation.chat import ChatGenerator
from engine.models.names import resolve_model

ROUNDS, EARLY, LATE = 50, 5, 40
CONTEXT = 512


@dataclass
class Rounds:
    """Seconds to the first token of each round, cuts of the history, and answers that leak."""

    clock: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cuts: int = 0
    leaks: int = 0


def converse(generator: ChatGenerator, keep: bool) -> Rounds:
    """Fifty rounds, with the kept cache or computed afresh."""
    session = Session(generator, Settings(max_new_tokens=24))
    rounds = Rounds()
    for number in range(ROUNDS):
        if not keep:
            generator.session.truncate(0)
        begin, spent = time.process_time(), None
        for event in session.ask(f"What is {number} plus {number + 1}?"):
            if isinstance(event, (Token, Answer)) and spent is None:
                spent = time.process_time() - begin
                rounds.cpu.append(spent)
            if isinstance(event, Answer):
                rounds.clock.append(event.statistics.first_token_seconds)
                rounds.leaks += "Human:" in event.text
            rounds.cuts += isinstance(event, Note) and "no longer sees" in event.text
    return rounds


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
    converse(generator, keep=True)
    print(f"{arguments.path}, context {generator.context} tokens, {ROUNDS} rounds")
    for keep, name in ((True, "cache kept"), (False, "computed afresh")):
        rounds = converse(generator, keep)
        print(f"{name}: cuts {rounds.cuts}, answers with 'Human:' {rounds.leaks}")
        for what, times in (("clock", rounds.clock), ("CPU", rounds.cpu)):
            early, late = around(times, EARLY), around(times, LATE)
            print(
                f"  {what:5} round {EARLY}: {1000 * early:6.1f} ms, round {LATE}: "
                f"{1000 * late:6.1f} ms, ratio {late / early:.2f}"
            )


if __name__ == "__main__":
    main()
