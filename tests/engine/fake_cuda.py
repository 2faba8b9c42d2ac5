"""A CUDA device that is not there: which tensor lies where is tracked, the CPU computes.

Inside `fake_cuda()` tensors made for or moved to `cuda` are real CPU tensors whose storage is
marked, so that they have values, autograd and views as always. `tensor.device` says `cuda:0` of
them, and DeepSpeed sees an accelerator called cuda: our code and DeepSpeed's take the paths that
they take on a GPU, through real engines and, on several ranks, real collectives (gloo).
An error comes where CUDA has one:

- an operation mixes tensors of the device and of the host (0-dimensional host tensors and indices
  on the host are allowed, as CUDA allows them), or a kernel of the CPU alone (oneDNN, fbgemm) gets
  a tensor of the device;
- a collective gets a tensor of the host, since NCCL has none;
- a generator of one device draws for the other, or takes a state from the device;
- numpy gets a tensor of the device; a gradient and its parameter lie apart;
- dtypes do not fit, as on a CPU.

A checkpoint keeps the mark, so `torch.load` without `map_location` puts tensors back on the device.

What it cannot see: CUDA's kernels (dtypes that one of them lacks, their rounding, their speed),
DeepSpeed's own kernels (FusedAdam, CPUAdam, quantizer, async_io do not build here), streams and
everything asynchronous, NCCL, memory, and several devices in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.ops.op_builder.cpu import NotImplementedBuilder
from deepspeed.runtime.zero import partition_parameters
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.operators import why_not_loaded

_CUDA = torch.device("cuda", 0)
_CPU = torch.device("cpu")
# These read or write across devices.
_COPIES = {"copy_", "_to_copy", "_foreach_copy_", "lift_fresh"}
# CUDA takes indices from the host.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# CUDA takes 0-dimensional tensors of the host wherever a scalar could stand, but not here.
_NO_SCALARS = {"cat", "stack", "gather", "scatter", "scatter_", "isin", "searchsorted"}
_CPU_NAMESPACES = {"mkldnn", "onednn", "mkl", "quantized", "_quantized", "mkldnn_prepacked"}


class WrongDevice(RuntimeError):
    """What CUDA would refuse."""


class _Marks:
    """The storages that lie on the device."""

    def __init__(self) -> None:
        # A weak reference keeps the address from being used again, so that it is a safe key.
        self._known: dict[int, StorageWeakRef] = {}
        self._sweep_at = 1024

    @staticmethod
    def key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def put(self, storage: torch.UntypedStorage) -> None:
        self._known[storage._cdata] = StorageWeakRef(storage)
        if len(self._known) > self._sweep_at:
            self._known = {k: ref for k, ref in self._known.items() if not ref.expired()}
            self._sweep_at = 2 * len(self._known) + 1024

    def drop(self, storage: torch.UntypedStorage) -> None:
        self._known.pop(storage._cdata, None)

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._known

    def on_device(self, tensor: Tensor) -> bool:
        if _real_device(tensor).type != "cpu" or tensor.layout != torch.strided:
            return False
        return self.has(tensor.untyped_storage())


_real_device: Callable[[Tensor], torch.device] = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_real_to, _real_type = torch.Tensor.to, torch.Tensor.type
_real_numpy, _real_array = torch.Tensor.numpy, torch.Tensor.__array__
_grad = torch.Tensor.grad
_RealGenerator = torch.Generator
_marks = _Marks()
_generators: dict[int, torch.device] = {}


def _device_of(value: Any) -> torch.device | None:
    """A device from what torch takes for one; a bare `cuda` is the first."""
    if value is None:
        return None
    if isinstance(value, int):
        return _CUDA
    found = torch.device(value)
    return _CUDA if found.type == "cuda" else found


class _Dispatch(TorchDispatchMode):
    """Looks at every operation, also those of autograd, and marks what comes out of it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, namespace = func._schema.name.partition("::")[2], func.namespace
        inputs = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        asked = kwargs.get("device")
        to_device = asked is not None and asked.type == "cuda"
        if to_device:
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        on_device = [_marks.on_device(each) for each in inputs]
        self._check(func, name, namespace, inputs, on_device, args)
        self._check_generator(func, args, kwargs, to_device or any(on_device))
        outputs = func(*args, **kwargs)
        # The bindings fill in `cpu` of their own accord: only `cuda` says something.
        if to_device or (any(on_device) and name != "copy_"):
            known = {_marks.key(each) for each in inputs if _real_device(each).type == "cpu"}
            for each in tree_leaves(outputs):
                strided = isinstance(each, Tensor) and each.layout == torch.strided
                if strided and _real_device(each).type == "cpu" and _marks.key(each) not in known:
                    _marks.put(each.untyped_storage())
        return outputs

    @staticmethod
    def _check(
        func: Any,
        name: str,
        namespace: str,
        inputs: list[Tensor],
        on_device: list[bool],
        args: tuple[Any, ...],
    ) -> None:
        if namespace == "c10d":
            if "barrier" not in name and not all(on_device):
                raise WrongDevice(f"{func}: NCCL has no collective for tensors of the host")
            return
        if not any(on_device):
            return
        if namespace in _CPU_NAMESPACES or name.startswith("mkldnn"):
            raise WrongDevice(f"{func} is a kernel of the CPU alone")
        if all(on_device) or name in _COPIES:
            return
        checked = list(zip(inputs, on_device, strict=True))
        if name in _INDEXING:
            indices = {id(each) for each in tree_leaves(args[1]) if isinstance(each, Tensor)}
            checked = [pair for pair in checked if id(pair[0]) not in indices]
        for each, there in checked:
            if not there and _real_device(each).type == "cpu":
                if each.dim() == 0 and name not in _NO_SCALARS:
                    continue
                raise WrongDevice(
                    f"{func} got tensors of both cuda:0 and cpu; on the cpu: {tuple(each.shape)}, "
                    f"{each.dtype}"
                )

    @staticmethod
    def _check_generator(func: Any, args: Any, kwargs: Any, on_device: bool) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, _RealGenerator):
                of_device = _generators.get(each._cdata, _CPU).type == "cuda"
                if of_device != on_device:
                    raise WrongDevice(f"{func}: generator and tensor lie on different devices")


class _Generator(_RealGenerator):
    """A CPU generator that says it is the device's."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, _CPU)
        _generators[made._cdata] = _device_of(device) or _CPU
        return made

    @property
    def device(self) -> torch.device:
        return _generators[self._cdata]

    def set_state(self, state: Tensor) -> _Generator:
        if _marks.on_device(state):
            raise WrongDevice("the state of a generator must be a tensor of the host")
        return super().set_state(state)


def _to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`Tensor.to`: a copy where the device changes."""
    args_left, target = list(args), kwargs.pop("device", None)
    other = kwargs.pop("other", None)
    if args_left and isinstance(args_left[0], Tensor):
        other = args_left.pop(0)
    if other is not None:
        target = other.device
        kwargs.setdefault("dtype", other.dtype)
    elif args_left and not isinstance(args_left[0], torch.dtype):
        target = args_left.pop(0)
    # What is left is positional: dtype, non_blocking, copy.
    names = ("dtype", "non_blocking", "copy")
    kwargs |= dict(zip(names, args_left, strict=False))
    device = _device_of(target)
    here = _marks.on_device(self)
    if device is None or device.type not in ("cpu", "cuda") or (device.type == "cuda") == here:
        if device is not None and device.type not in ("cpu", "cuda"):
            return _real_to(self, device, **kwargs)
        return _real_to(self, **kwargs) if kwargs else self
    moved = _real_to(self, **(kwargs | {"dtype": kwargs.get("dtype") or self.dtype, "copy": True}))
    if device.type == "cuda":
        _marks.put(moved.untyped_storage())
    else:
        _marks.drop(moved.untyped_storage())
    return moved


def _numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _marks.on_device(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
    return _real_numpy(self, *args, **kwargs)


def _array(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _marks.on_device(self):
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
    return _real_array(self, *args, **kwargs)


def _type(self: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _real_type(self, *args, **kwargs)
    if isinstance(found, str) and _marks.on_device(self):
        return found.replace("torch.", "torch.cuda.", 1)
    return found


def _set_grad(self: Tensor, grad: Tensor | None) -> None:
    if grad is not None and _marks.on_device(grad) != _marks.on_device(self):
        raise WrongDevice("a gradient and its tensor lie on different devices")
    _grad.__set__(self, grad)  # type: ignore[attr-defined]


def _placed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor` and `torch.as_tensor`: torch asks a real device which one a bare `cuda` is."""

    def placed(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        made = make(data, *args, **kwargs)
        return made if device is None else _to(made, device)

    return placed


class _Stream:
    """A stream whose work is always done."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait_stream = wait_event = record_event = record = wait = _nothing

    def query(self) -> bool:
        return True


class _Accelerator(CPU_Accelerator):
    """DeepSpeed's CPU accelerator under the name cuda, with streams."""

    def __init__(self) -> None:
        super().__init__()
        self._name = "cuda"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return "cuda:0"

    def device(self, device_index: int | None = None) -> torch.device:
        return _CUDA

    def device_count(self) -> int:
        return 1

    @property
    def Stream(self) -> type[_Stream]:
        return _Stream

    @property
    def Event(self) -> type[_Stream]:
        return _Stream

    def current_stream(self, device_index: int | None = None) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @property
    def FloatTensor(self) -> Any:
        return partial(torch.tensor, dtype=torch.float32, device="cuda")

    @property
    def ByteTensor(self) -> Any:
        return partial(torch.tensor, dtype=torch.uint8, device="cuda")

    def get_op_builder(self, class_name: str) -> Any:
        """None builds: their kernels would be those of the CPU."""
        return NotImplementedBuilder

    def on_accelerator(self, tensor: Tensor) -> bool:
        return _marks.on_device(tensor)

    def is_fp16_supported(self) -> bool:
        return True


def _location(storage: Any) -> str | None:
    untyped = getattr(storage, "_untyped_storage", storage)
    return "cuda:0" if _marks.has(untyped) else None


def _restored(storage: Any, location: str) -> Any:
    if not location.startswith("cuda"):
        return None
    _marks.put(getattr(storage, "_untyped_storage", storage))
    return storage


@contextmanager
def fake_cuda() -> Iterator[None]:
    """The device, inside; models and tensors from outside are the host's."""
    patch, before = pytest.MonkeyPatch(), get_accelerator()
    for name, value in {
        "device": property(lambda self: _CUDA if _marks.on_device(self) else _real_device(self)),
        "is_cuda": property(lambda self: _marks.on_device(self)),
        "grad": property(_grad.__get__, _set_grad, _grad.__delete__),  # type: ignore[attr-defined]
        "to": _to,
        "cpu": lambda self, **_: _to(self, _CPU),
        "cuda": lambda self, *_, **__: _to(self, _CUDA),
        "get_device": lambda self: 0 if _marks.on_device(self) else -1,
        "numpy": _numpy,
        "__array__": _array,
        "type": _type,
        "pin_memory": lambda self, *_: self,
        "is_pinned": lambda self, *_: not _marks.on_device(self),
        "record_stream": lambda self, _: None,
    }.items():
        patch.setattr(torch.Tensor, name, value, raising=False)
    patch.setattr(torch, "Generator", _Generator)
    # Of these `with torch.device(...)` chooses the device.
    constructors = torch.utils._device._device_constructors()
    wrappers = {name: _placed(getattr(torch, name)) for name in ("tensor", "as_tensor")}
    for name, wrapper in wrappers.items():
        patch.setattr(torch, name, wrapper)
    # DeepSpeed puts back what it saw when it was imported.
    patch.setattr(partition_parameters, "_orig_torch_tensor", torch.tensor)
    for name, result in {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "current_device": 0,
        "device_count": 1,
        "get_device_capability": (9, 0),
        "synchronize": None,
        "empty_cache": None,
    }.items():
        patch.setattr(torch.cuda, name, lambda *_, _result=result, **__: _result)
    # Objects are sent as tensors of the device that the backend works on.
    patch.setattr(
        torch.distributed.distributed_c10d, "_get_object_coll_device", lambda *_: "cuda:0"
    )
    with ExitStack() as stack:
        stack.callback(patch.undo)
        constructors.update(wrappers.values())
        stack.callback(constructors.difference_update, wrappers.values())
        registered = [(0, _location, _restored), *torch.serialization._package_registry]
        patch.setattr(torch.serialization, "_package_registry", registered)
        # Makes `torch.tensor` move what it read by an operation that modes can see.
        torch._C._set_only_lift_cpu_tensors(True)
        stack.callback(torch._C._set_only_lift_cpu_tensors, False)
        # What one accelerator's operators are, the other must not remember.
        why_not_loaded.cache_clear()
        stack.callback(why_not_loaded.cache_clear)
        set_accelerator(_Accelerator())
        stack.callback(set_accelerator, before)
        stack.enter_context(_Dispatch())
        yield
