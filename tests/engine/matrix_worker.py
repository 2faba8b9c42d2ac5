"""One rank of `test_matrix.py`: cells of the matrix, one after another in one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matrix_run import Cell, run_cell

from engine.distributed import process_group, rank


def main(folder: Path) -> None:
    with process_group():
        for entry in json.loads((folder / "plan.json").read_text()):
            cell = Cell(**entry["cell"])
            result = run_cell(cell, entry["model"], folder / cell.name, "launch.num_accelerators=2")
            if rank() == 0:
                with (folder / "results.jsonl").open("a") as file:
                    file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))
