"""`dschat doctor`: it looks at everything, says what to do, and never fails itself."""

from __future__ import annotations

import json
import os
import re
import stat
import sys

import pytest
from typer.testing import CliRunner

from dschat_tui import doctor
from dschat_tui.cli.main import app

GPU = {"name": "NVIDIA T4", "memory": 2**34, "free": 2**33}


@pytest.fixture
def quick(monkeypatch):
    """Without the children that import torch and DeepSpeed: on a CPU, or on a GPU with CUDA."""

    def install(**ops: dict[str, str]) -> None:
        on_gpu = bool(ops)
        told = {
            "torch": {
                "version": "2",
                "cuda": "12.8" if on_gpu else None,
                "available": on_gpu,
                "devices": [GPU] if on_gpu else [],
            },
            "deepspeed": {
                "version": "0",
                "accelerator": "cuda" if on_gpu else "cpu",
                "dtypes": ["fp16" if on_gpu else "bf16"],
                "ops": ops,
            },
        }

        def answer(name, code):
            return told[name], doctor.Finding(name, name, doctor.OK, told[name]["version"])

        monkeypatch.setattr(doctor, "_ask_child", answer)

    install()
    return install


def by_id(findings):
    return {finding.id: finding for finding in findings}


def test_a_machine_without_any_program_is_told_what_it_lacks(quick, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = by_id(doctor.examine())
    for id in ("c++", "ninja", "launcher", "driver"):
        assert found[id].state != doctor.OK
        assert found[id].advice
    assert found["op_fused_adam"].state == doctor.OK
    assert found["op_fused_adam"].value == "not used on a CPU"
    assert "dtype=auto: bf16" in found["device"].value


def test_operators_are_told_as_a_run_will_find_them(quick, monkeypatch, tmp_path):
    unbuilt = {"state": "unbuilt", "detail": ""}
    quick(fused_adam=unbuilt, cpu_adam=unbuilt, quantizer=unbuilt)
    for program in ("c++", "ninja"):
        (tmp_path / program).write_text("#!/bin/sh\necho 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-toolkit"))
    found = by_id(doctor.examine())
    for name in ("fused_adam", "quantizer"):
        assert found[f"op_{name}"].state == doctor.NOTE
        assert found[f"op_{name}"].value == "cannot be built: nvcc not found"
        assert "torch" in found[f"op_{name}"].advice
    assert found["op_cpu_adam"].value.startswith("not built yet")
    assert found["device0"].value == "NVIDIA T4, 8.0 GiB free of 16.0, dtype=auto: fp16"
    (tmp_path / "c++").unlink()
    found = by_id(doctor.examine())
    assert found["op_cpu_adam"].value == "cannot be built: C++ compiler not on PATH"

    quick(
        fused_adam={"state": "loads", "detail": ""},
        cpu_adam={"state": "fails", "detail": "ImportError: undefined symbol"},
        quantizer={"state": "locked", "detail": "/cache/quantizer/lock"},
    )
    found = by_id(doctor.examine())
    assert found["op_fused_adam"].state == doctor.OK
    assert found["op_cpu_adam"].value == "does not load: ImportError: undefined symbol"
    assert found["op_quantizer"].state == doctor.PROBLEM
    assert "/cache/quantizer/lock" in found["op_quantizer"].value


def test_a_python_that_cannot_be_started_is_a_finding(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    told, finding = doctor._ask_child("torch", "print('{}')")
    assert told is None
    assert finding.state == doctor.PROBLEM
    assert str(tmp_path / "python") in finding.value
    assert "No such file" in finding.value


@pytest.mark.slow
def test_this_machines_libraries_answer():
    found = by_id(doctor.examine())
    for name in ("torch", "deepspeed", "launcher"):
        assert found[name].state == doctor.OK
    device = found.get("device0") or found["device"]
    assert re.search("dtype=auto: (bf16|fp16|fp32)$", device.value)


def test_every_finding_that_is_not_ok_says_what_to_do(quick):
    for finding in doctor.examine():
        assert finding.state == doctor.OK or finding.advice, finding


def test_a_library_that_breaks_at_its_import_is_a_finding():
    told, finding = doctor._ask_child("torch", "raise ImportError('libcudart is gone')")
    assert told is None
    assert finding.state == doctor.PROBLEM
    assert "libcudart is gone" in finding.value


@pytest.mark.parametrize(
    ("release", "state"), [("12.4", "ok"), ("12.8", "ok"), ("11.8", "problem")]
)
def test_nvcc_is_held_against_the_cuda_that_torch_was_built_with(
    monkeypatch, tmp_path, release, state
):
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V1'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert doctor._nvcc("12.8").state == state
    assert doctor._nvcc(None).state == doctor.OK


def test_hosts_are_asked_by_ssh_and_those_that_differ_are_named(monkeypatch, tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        'for word; do case "$word" in\n'
        '  good) exec sh -c "$last";;\n'
        """  old) echo '[{"Python": "3.9.0", "torch": "1.0"}, 0, true]'; exit 0;;\n"""
        "  locked) echo 'Permission denied (publickey).' >&2; exit 255;;\n"
        "esac; done\n"
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# the nodes\ngood slots=2\nold slots=2\nlocked slots=2\n")
    found = by_id(doctor._hosts(hostfile))
    assert found["host_good"].state == doctor.OK
    assert "torch 1.0 (here " in found["host_old"].value
    assert "Permission denied" in found["host_locked"].value
    assert found["host_locked"].advice


@pytest.mark.parametrize(
    "content", ["node1", "node1 slots=x", "-oProxyCommand=x slots=1", "a slots=1\na slots=1", ""]
)
def test_a_hostfile_that_says_nothing_usable_is_a_finding(tmp_path, content):
    hostfile = tmp_path / "hosts"
    hostfile.write_text(content)
    (finding,) = doctor._hosts(hostfile)
    assert finding.state == doctor.PROBLEM
    assert "slots=" in finding.advice


def test_a_problem_is_in_the_exit_code_and_json_is_one_document(quick, tmp_path, monkeypatch):
    missing = str(tmp_path / "none")
    result = CliRunner().invoke(app, ["doctor", "--json", "--hostfile", missing])
    assert result.exit_code == 1
    found = {finding["id"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert {"python", "torch", "deepspeed", "memory", "ports", "hostfile"} <= set(found)
    findings = [doctor.Finding("python", "Python", doctor.NOTE, "3.10", "Newer is faster.")]
    monkeypatch.setattr(doctor, "examine", lambda hostfile: findings)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "Python" in result.stdout
