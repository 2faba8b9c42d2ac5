"""The system tab: memory, processors, disk, GPUs, and the processes of the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from textual import work

from dschat_tui.dashboard.screens.run.model import Every, RunModel
from dschat_tui.dashboard.screens.run.tab import RunTab
from dschat_tui.dashboard.widgets.bars import Line
from dschat_tui.dashboard.widgets.rows import Row
from dschat_tui.machine import GIB, NoAnswer, has_nvidia_smi, query_gpus
from dschat_tui.text import ASCII, Glyphs, clean

_GPU_FIELDS = "index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
REFRESH_SECONDS = 2.0
# quitting waits for it
_GPU_SECONDS = 2.0
_BAR_CELLS = 20
PROCESSES_SHOWN = 12


class SystemTab(Line, RunTab):
    """The state of the machine, read again every two seconds."""

    tab_name = "system"
    letter = "s"

    def __init__(self) -> None:
        super().__init__(id=self.tab_name)
        self._refresh = Every(REFRESH_SECONDS)

    def update(self, run: RunModel) -> None:
        """Read the state of the machine where it is due."""
        if self._refresh.is_due():
            self._read(run.source.path, run.processes())

    def reset(self) -> None:
        """Read it now."""
        self._refresh.reset()

    @work(thread=True, exclusive=True, exit_on_error=False, group="system")
    def _read(self, folder: Path, leaders: list[int]) -> None:
        self.app.call_from_thread(self.show, *system_rows(folder, leaders, self.glyphs))


def system_rows(folder: Path, leaders: list[int], glyphs: Glyphs) -> list[Row]:
    """Rows about the machine now; `leaders` are the pids of the run's supervisor and steps."""
    # here, not above: the first picture comes first
    import psutil

    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    rows = [
        _gauge("memory", memory.used, memory.total, glyphs),
        _gauge("swap", swap.used, swap.total, glyphs),
        _share(
            "CPU", psutil.cpu_percent() / 100, f"{psutil.cpu_count()} cores, load {load}", glyphs
        ),
    ]
    try:
        disk = shutil.disk_usage(folder if folder.is_dir() else folder.parent)
        rows.append(_gauge("disk", disk.used, disk.total, glyphs))
    except OSError as error:
        rows.append([("disk    ", "strong"), (str(error.strerror), "warn")])
    rows += [*_gpu_rows(glyphs), *_process_rows(leaders, glyphs)]
    return rows


def _gauge(label: str, used: float, total: float, glyphs: Glyphs) -> Row:
    text = f"{used / GIB:.1f} of {total / GIB:.1f} GiB"
    return _share(label, used / total if total else 0.0, text, glyphs)


def _share(label: str, share: float, text: str, glyphs: Glyphs) -> Row:
    filled = round(min(max(share, 0.0), 1.0) * _BAR_CELLS)
    bar = glyphs.parts[0] * filled + glyphs.parts[2] * (_BAR_CELLS - filled)
    style = "bad" if share > 0.95 else "line0"
    return [(f"{label:<8}", "strong"), (bar, style), (f" {share:>4.0%}  {text}", "text")]


def _gpu_rows(glyphs: Glyphs) -> list[Row]:
    if not has_nvidia_smi():
        return [[("GPU     ", "strong"), ("none (no nvidia-smi)", "muted")]]
    try:
        found = query_gpus(_GPU_FIELDS, _GPU_SECONDS)
    except NoAnswer as error:
        return [[("GPU     ", "strong"), (clean(str(error)), "warn")]]
    rows: list[Row] = []
    for parts in found:
        index, name, busy, used, total, temperature, power = parts
        share = _number(used) / (_number(total) or 1.0)
        text = f"{used}/{total} MiB, {busy} % busy, {temperature} C, {power} W  {name}"
        rows.append(_share(f"GPU {index}", share, clean(text, glyphs is ASCII), glyphs))
    return rows


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _process_rows(leaders: list[int], glyphs: Glyphs) -> list[Row]:
    import psutil

    found: dict[int, psutil.Process] = {}
    for pid in leaders:
        try:
            leader = psutil.Process(pid)
            for process in [leader, *leader.children(recursive=True)]:
                found[process.pid] = process
        except psutil.Error:
            continue
    rows: list[Row] = []
    for process in found.values():
        try:
            memory = process.memory_info().rss / GIB
            command = clean(" ".join(process.cmdline()) or process.name(), glyphs is ASCII)
            rows.append(
                [(f"{process.pid:>8}", "strong"), (f"  {memory:5.1f} GiB  {command}", "text")]
            )
        except psutil.Error:
            continue
    if rows:
        rows.insert(0, [("processes of the run", "muted")])
    return rows[: PROCESSES_SHOWN + 1]
