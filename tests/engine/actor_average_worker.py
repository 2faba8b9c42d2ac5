"""One rank of `test_actor_average.py`: all cases, one after another in one process."""

from __future__ import annotations

import sys
from pathlib import Path

from actor_average_run import CASES, check

from engine.distributed import process_group, rank


def main(folder: Path, model: str) -> None:
    with process_group():
        for index, case in enumerate(CASES):
            check(case, model, folder / str(index))
            if rank() == 0:
                with (folder / "passed").open("a") as file:
                    file.write(f"{case}\n")


if __name__ == "__main__":
    main(Path(sys.argv[-2]), sys.argv[-1])
