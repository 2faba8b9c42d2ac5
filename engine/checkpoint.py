"""Save, rotate and resume the state of a step: engines, random states, position, averages."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy
import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from torch import Tensor, nn

from engine.config.layout import (
    CHECKPOINT_MANIFEST,
    CHECKPOINTS,
    STOP_REQUEST,
    Manifest,
    checkpoint_name,
    whole_checkpoints,
)
from engine.data.files import lines_of
from engine.distributed import long_waits, max_over_ranks, rank, sum_over_ranks, world_size
from engine.report import Report

_SECONDS_BETWEEN_LOOKS = 5.0
# Elements at either end of each frozen parameter by which a base model is recognised.
_SAMPLED = 256


State = TypeVar("State", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Resumed(Generic[State]):
    """Where a step resumes: after so many steps, with the state that its trainer gave then."""

    step: int
    state: State


class Checkpoints(Generic[State]):
    """The checkpoints of one step, written by all ranks together.

    One gets its name only when it is complete: a kill in the middle leaves the older ones. Frozen
    weights are not in it: they are those of the base model, from which a resumed step begins too.
    """

    def __init__(
        self,
        run: Path,
        folder: Path,
        engines: Mapping[str, DeepSpeedEngine],
        report: Report,
        interval: int | None,
        keep_last: int,
    ) -> None:
        self._stop_request = run / STOP_REQUEST
        self._step_folder = folder
        self._folder = folder / CHECKPOINTS
        self._engines = engines
        self._report = report
        self._interval = interval
        self._keep_last = keep_last

    def resume(self) -> Resumed[State] | None:
        """Load the newest whole checkpoint into the engines; None if there is no checkpoint.

        Raises:
            ValueError: it was written by another number of ranks, or with other frozen weights.
        """
        found = self.whole()
        if not found:
            return None
        folder, manifest = found[-1]
        if manifest.ranks != world_size():
            raise ValueError(
                f"{folder} was written by {manifest.ranks} ranks, and this run has {world_size()}; "
                f"set launch.num_accelerators so that there are {manifest.ranks}"
            )
        self._report.phase(f"loading the checkpoint of step {manifest.step}")
        # Tensors would otherwise be loaded onto the device that they were saved from.
        own = torch.load(folder / f"rank-{rank()}.pt", map_location="cpu", weights_only=True)
        self._check_frozen(folder, own.pop("frozen", {}))
        with long_waits():
            for name, engine in self._engines.items():
                # Frozen parameters are part of the base model and left out of a checkpoint.
                engine.load_checkpoint(str(folder / name), tag="engine", load_module_strict=False)
            _barrier()
        _set_random_states(own.pop("random"))
        if rank() == 0:
            for name in ("metrics.jsonl", "rollouts.jsonl"):
                _forget_from(self._step_folder / name, manifest.step)
        self._report.note(f"resumed after step {manifest.step}")
        return Resumed(manifest.step, own)

    def after_step(self, step: int, state: Callable[[], State], score: float | None) -> bool:
        """Write a checkpoint if one is due or a stop was asked for.

        Args:
            step: steps done so far.
            state: what the trainer needs besides its engines; tensors and plain values.
            score: of the model now, higher is better; None if nothing was measured.

        Returns:
            whether the step must stop now.
        """
        stopping = self._stop_requested()
        if stopping or (self._interval and step % self._interval == 0):
            with long_waits():
                self._save(step, state(), score)
                _barrier()
        if stopping:
            self._report.note(f"stopped on request after step {step}, with a checkpoint")
        return stopping

    def whole(self) -> list[tuple[Path, Manifest]]:
        """The complete checkpoints with their manifests, oldest first."""
        return whole_checkpoints(self._step_folder)

    def _check_frozen(self, folder: Path, digests: dict[str, str]) -> None:
        """Refuse other frozen weights than those that a checkpoint was written with."""
        for name, digest in digests.items():
            differs = digest != _frozen_digest(self._engines[name].module)
            if max_over_ranks(float(differs)) > 0:
                raise ValueError(
                    f"{folder} was trained with other frozen weights than the {name} has now, and "
                    "does not hold them; give the same base model again (models.actor or "
                    "models.reward, or the finished models.sft or models.trained_reward), or "
                    f"remove {self._folder} to begin this step anew"
                )

    def _stop_requested(self) -> bool:
        """Whether a stop was requested; the same answer on all ranks."""
        asked = rank() == 0 and self._stop_request.exists()
        return max_over_ranks(float(asked)) > 0

    def _save(self, step: int, state: State, score: float | None) -> None:
        started = time.perf_counter()
        temporary = self._folder / f".{checkpoint_name(step)}.new"
        while not self._write(temporary, state):
            self._report.warning(
                f"paused: no room for the checkpoint of step {step} on the disk of "
                f"{self._folder}; free some space there and the run continues"
            )
            if self._wait_for_room():
                self._report.warning("stop requested while the disk is full: no new checkpoint")
                return
        if rank() == 0:
            size = sum(file.stat().st_size for file in temporary.rglob("*") if file.is_file())
            manifest = Manifest(step, world_size(), score, size)
            (temporary / CHECKPOINT_MANIFEST).write_text(json.dumps(asdict(manifest)))
            target = self._folder / checkpoint_name(step)
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
            self._rotate()
        seconds = time.perf_counter() - started
        self._report.note(f"checkpoint of step {step} written in {seconds:.1f} s")

    def _write(self, temporary: Path, state: State) -> bool:
        """Write all parts; False, on all ranks, when the disk has no room for them."""
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        _barrier()
        no_room = self._expected_size(state) > shutil.disk_usage(self._folder).free
        # All ranks must take the same branch: some of what follows is collective.
        if max_over_ranks(float(no_room)) > 0:
            return False
        try:
            for name, engine in self._engines.items():
                with _frozen_left_out(engine.module):
                    engine.save_checkpoint(
                        str(temporary / name), tag="engine", exclude_frozen_parameters=True
                    )
            frozen = {name: _frozen_digest(e.module) for name, e in self._engines.items()}
            own = {**state, "random": _random_states(), "frozen": frozen}
            torch.save(own, temporary / f"rank-{rank()}.pt")
        except (OSError, RuntimeError) as error:
            # torch's writer reports a full disk as a RuntimeError.
            full = (
                getattr(error, "errno", None) == errno.ENOSPC
                or not shutil.disk_usage(self._folder).free
            )
            if not full or world_size() > 1:
                raise
            no_room = True
        return max_over_ranks(float(no_room)) == 0

    def _expected_size(self, state: State) -> int:
        """Bytes that the next checkpoint takes: those of the last one, else an estimate."""
        (of_ranks,) = sum_over_ranks(
            sum(value.nbytes for value in _flat(state) if isinstance(value, Tensor))
        )
        known = self.whole()
        if known:
            return known[-1][1].size
        # fp32 weights and two moments of what is trained, and the weights themselves.
        trained = sum(
            getattr(parameter, "ds_numel", parameter.numel()) * (12 + parameter.element_size())
            for engine in self._engines.values()
            for parameter in engine.module.parameters()
            if parameter.requires_grad
        )
        return trained + int(of_ranks)

    def _wait_for_room(self) -> bool:
        """Wait a moment; returns whether a stop was requested meanwhile."""
        time.sleep(_SECONDS_BETWEEN_LOOKS)
        return self._stop_requested()

    def _rotate(self) -> None:
        """Remove all but the newest and the best."""
        found = self.whole()
        scores = {
            folder: manifest.score
            for folder, manifest in found
            if manifest.score is not None and not math.isnan(manifest.score)
        }
        best = max(scores, key=scores.__getitem__, default=None)
        for folder, _ in found[: -self._keep_last]:
            if folder != best:
                shutil.rmtree(folder, ignore_errors=True)


def _barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def _flat(state: Mapping[str, Any]) -> Iterator[Any]:
    """The values of a state, lists flattened."""
    for value in state.values():
        yield from value if isinstance(value, list) else (value,)


@contextmanager
def _frozen_left_out(module: nn.Module) -> Iterator[None]:
    """Make `state_dict` leave out frozen parameters under all their names.

    DeepSpeed leaves out only one name of a tied parameter.
    """
    parameters = module.named_parameters(remove_duplicate=False)
    frozen = [name for name, parameter in parameters if not parameter.requires_grad]

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in frozen:
            state.pop(prefix + name, None)

    handle = module.register_state_dict_post_hook(drop)
    try:
        yield
    finally:
        handle.remove()


def _frozen_digest(module: nn.Module) -> str:
    """A digest of both ends of what this rank holds of each frozen parameter."""
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            continue
        held = _held(parameter)
        digest.update(name.encode())
        for part in (held[:_SAMPLED], held[-_SAMPLED:]):
            digest.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _held(parameter: nn.Parameter) -> Tensor:
    """What this rank holds of a parameter, flat; empty for a shard that is in a file."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.detach().reshape(-1)
    shard = parameter.ds_tensor
    if shard.final_location == OffloadDeviceEnum.nvme:
        return shard[:0]
    # The last shards end in uninitialised padding.
    return shard[: max(0, parameter.ds_numel - rank() * len(shard))]


def _random_states() -> dict[str, Any]:
    """The states of all global generators, as plain values and tensors."""
    numbers: Any = numpy.random.get_state()
    kind, keys, *rest = numbers
    version, internal, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, keys.tolist(), *rest],
        "python": [version, list(internal), gauss],
    }
    if get_accelerator().device_name() != "cpu":
        states["device"] = get_accelerator().get_rng_state()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    numpy.random.set_state(tuple(states["numpy"]))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "device" in states:
        get_accelerator().set_rng_state(states["device"])


def _forget_from(file: Path, step: int) -> None:
    """Drop the records of steps that will be repeated, and a torn line at the end."""
    if not file.exists():
        return
    kept = []
    # A torn line may end in the middle of a character.
    for line in lines_of(file.read_text(encoding="utf-8", errors="replace")):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if record.get("step", -1) < step:
            kept.append(line + "\n")
    temporary = file.with_suffix(".new")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(file)
