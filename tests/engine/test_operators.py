"""DeepSpeed's compiled operators where they do not load: training goes on without, and says so."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import psutil  # noqa: F401
import pytest
import torch
from deepspeed.ops.op_builder.builder import MissingCUDAException
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer, Init
from torch import nn

from engine import operators
from engine.config.deepspeed import deepspeed_config
from engine.config.schema import SftConfig
from engine.models.quantization import TorchQuantizer, describe_quantizer, install_quantizer
from engine.trainers import engines
from engine.trainers.engines import backward, engine_step, training_engine

NO_TOOLKIT = MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")


class Builders:
    """Stands where a GPU's accelerator does; its operators load, or fail with `error`."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error
        self.asked: list[str] = []

    def device_name(self) -> str:
        return "cuda"

    def create_op_builder(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(load=lambda verbose: self._load(name))

    def _load(self, name: str) -> None:
        self.asked.append(name)
        if self.error is not None:
            raise self.error


@pytest.fixture
def gpu(monkeypatch):
    """Let the engine take this for a GPU whose operators load, or fail with an error."""

    def install(error: Exception | None) -> Builders:
        builders = Builders(error)
        for module in (engines, operators):
            monkeypatch.setattr(module, "get_accelerator", lambda: builders)
        # DeepSpeed believes that all can be built: it looks for no toolkit.
        for name in ("fused_adam", "cpu_adam", "quantizer"):
            monkeypatch.setitem(deepspeed.ops.__compatible_ops__, name, True)
        operators.why_not_loaded.cache_clear()
        return builders

    monkeypatch.setenv("LOCAL_RANK", "0")
    yield install
    operators.why_not_loaded.cache_clear()


class Log(list):
    """Stands where a report does, and keeps what it is told."""

    def note(self, text: str) -> None:
        self.append(f"note: {text}")

    def warning(self, text: str) -> None:
        self.append(f"warning: {text}")


def engine_of(offload: bool, log: Log) -> deepspeed.DeepSpeedEngine:
    config = deepspeed_config(
        zero_stage=2,
        offload=offload,
        dtype="fp32",
        micro_batch_size=1,
        accumulation=1,
        ranks=1,
        max_gradient_norm=1.0,
    )
    model = nn.Linear(4, 2)
    groups = [{"params": list(model.parameters()), "lr": 1e-2, "weight_decay": 0.0}]
    return training_engine(model, config, groups, SftConfig(), 4, log)


@pytest.mark.parametrize(
    ("offload", "kind", "builder"),
    [(False, "FusedAdam", "FusedAdamBuilder"), (True, "DeepSpeedCPUAdam", "CPUAdamBuilder")],
)
def test_without_a_toolkit_training_takes_torchs_adamw_and_says_why(
    offload, kind, builder, group, gpu
):
    builders, log = gpu(NO_TOOLKIT), Log()
    engine = engine_of(offload, log)
    assert type(engine.basic_optimizer) is torch.optim.AdamW
    assert log == [
        f"warning: optimizer: AdamW of torch, since {kind} of DeepSpeed does not load: "
        f"MissingCUDAException: {NO_TOOLKIT}"
    ]
    before = engine.module.weight.detach().clone()
    backward(engine, engine(torch.ones(1, 4)).sum(), 1)
    assert engine_step(engine) > 0
    assert not torch.equal(engine.module.weight, before)
    # The critic's engine does not try again.
    engine_of(offload, log)
    assert builders.asked == [builder]


@pytest.mark.parametrize(("offload", "kind"), [(False, "FusedAdam"), (True, "DeepSpeedCPUAdam")])
def test_where_they_load_deepspeeds_optimizers_are_taken(offload, kind, group, gpu, monkeypatch):
    taken = type(kind, (torch.optim.AdamW,), {})
    monkeypatch.setattr(deepspeed.ops.adam, kind, taken)
    gpu(None)
    log = Log()
    assert type(engine_of(offload, log).basic_optimizer) is taken
    assert log == [f"note: optimizer: {kind} of DeepSpeed"]


def test_a_failed_build_is_told_in_the_compilers_words(gpu):
    output = "[1/2] nvcc -c adam.cu\nFAILED: adam.o\nadam.cu:3:1: error: no <cub.h>\nninja: stopped"
    gpu(RuntimeError(f"Error building extension 'fused_adam': {output}"))
    expected = "RuntimeError: adam.cu:3:1: error: no <cub.h>"
    assert operators.why_not_loaded("FusedAdamBuilder") == expected


@pytest.mark.parametrize("error", [None, NO_TOOLKIT], ids=["loads", "fails"])
def test_weights_are_quantised_by_torch_where_deepspeeds_kernels_do_not_load(
    error, gpu, monkeypatch
):
    gpu(error)
    monkeypatch.setattr(CUDAQuantizer, "quantizer_cuda_module", None)
    # What DeepSpeed's own constructor would do on a GPU.
    monkeypatch.setattr(deepspeed.ops.op_builder, "QuantizerBuilder", lambda: Kernels(error))
    monkeypatch.setattr(Init, "quantizer_module", None, raising=False)
    monkeypatch.delattr(Init, "quantizer_module")
    install_quantizer()
    module = Init.quantizer_module.quantizer_cuda_module
    assert isinstance(module, TorchQuantizer if error else Kernels)
    assert (str(error) in describe_quantizer()) == (error is not None)
    assert ("by torch" in describe_quantizer()) == (error is not None)


@pytest.mark.parametrize(
    ("files", "state", "detail"),
    [
        ([], "unbuilt", ""),
        (["built.so"], "loads", ""),
        (["torn.so"], "fails", "ImportError: "),
        (["built.so", "lock"], "locked", "/lock"),
    ],
)
def test_how_an_operator_stands_is_found_without_building_it(
    files, state, detail, monkeypatch, tmp_path
):
    def build(verbose: bool) -> None:
        raise AssertionError("built")

    # An extension of another library stands for one of DeepSpeed's.
    loaded = (module for name, module in sys.modules.items() if name.startswith("psutil._psutil"))
    extension = next(loaded)
    name = extension.__name__.rpartition(".")[2]
    operator = SimpleNamespace(name=name, load=build)
    accelerator = SimpleNamespace(create_op_builder=lambda name: operator)
    monkeypatch.setattr(operators, "get_accelerator", lambda: accelerator)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / name).mkdir()
    for file in files:
        whole = file == "built.so"
        content = Path(extension.__file__).read_bytes() if whole else b"half a file"
        (tmp_path / name / file).write_bytes(content)
    found = operators.standing("AnyBuilder")
    assert found["state"] == state
    assert detail in found["detail"]


class Kernels:
    """Stands where DeepSpeed's quantizer and its builder do."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def load(self) -> Kernels:
        if self.error is not None:
            raise self.error
        return self
