"""A user of their own: no test reads or writes the caches and settings of whoever runs them."""

from __future__ import annotations

import gc
import os

import pytest

# Before torch is imported, which reads it once. Only with one thread do results repeat: the first
# torch.tanh that two threads of a process share is now and then wrong by 1e-4, the second never,
# which seems a race in how MKL sets its accuracy.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session", autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory):
    """Point caches and settings at a temporary folder, for children too."""
    home = tmp_path_factory.mktemp("home")
    patch = pytest.MonkeyPatch()
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME"):
        patch.setenv(name, str(home / name.lower()))
    yield home
    patch.undo()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker waits for another at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.name != "test_pipeline.py", item.path not in slow))


def pytest_collection_finish() -> None:
    """Take what the imports left, some million objects, out of garbage collection.

    DeepSpeed collects several times for each engine it builds, and would walk over all of it.
    """
    gc.freeze()
