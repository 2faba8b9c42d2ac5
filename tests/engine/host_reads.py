"""Counts how often the host would wait for the device, on a machine that has none."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode


class HostReads(TorchFunctionMode):
    """Counts the calls that make the host wait for the device, by their names.

    Args:
        libraries: what their own forward reads is not counted.
    """

    NAMES = (
        *("__bool__", "__float__", "__index__", "__int__", "item", "tolist"),
        *("cpu", "numpy", "masked_select", "nonzero"),
    )

    def __init__(self, *libraries: nn.Module) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._paused = False
        for module in libraries:
            module.register_forward_pre_hook(lambda *_: self._pause(True))
            module.register_forward_hook(lambda *_: self._pause(False))

    def _pause(self, paused: bool) -> None:
        self._paused = paused

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.__name__ in self.NAMES and not self._paused:
            self.counts[function.__name__] += 1
        return function(*args, **(kwargs or {}))
