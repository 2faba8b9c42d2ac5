"""Argument lists and environments of the launcher."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from dschat_tui.runs import launch
from dschat_tui.runs.folder import RunFolder
from engine.config.loading import resolve
from engine.config.schema import RunConfig
from engine.config.steps import STEPS


def command(step_number: int = 1, **launch_options) -> list[str]:
    config = resolve({"launch": launch_options}, "test")
    step = STEPS[step_number - 1]
    return launch.step_command(config, RunFolder(Path("/runs/a b")), step, 12345, {})


def after(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


@pytest.mark.parametrize(("number", "name"), [(1, "sft"), (2, "reward"), (3, "ppo")])
def test_a_step_is_a_module_with_configuration_and_output(number, name):
    arguments = command(number)
    assert after(arguments, "--module") == f"engine.steps.{name}"
    assert after(arguments, "--config") == "/runs/a b/run.yaml"
    assert after(arguments, "--output") == "/runs/a b"
    assert after(arguments, "--master_port") == "12345"


def test_the_launcher_is_the_one_of_this_environment():
    assert Path(command()[0]) == Path(sys.executable).parent / "deepspeed"


def test_one_node_takes_as_many_ranks_as_asked_and_obeys_no_hostfile_of_the_machine():
    arguments = command(deployment="single_node", num_accelerators=4)
    assert after(arguments, "--num_gpus") == "4"
    assert not Path(after(arguments, "--hostfile")).is_file()


def test_several_nodes_take_as_many_of_their_hostfile_as_asked():
    arguments = command(deployment="multi_node", hostfile="/hosts", num_nodes=3, num_accelerators=8)
    assert after(arguments, "--hostfile") == "/hosts"
    assert after(arguments, "--num_nodes") == "3"
    assert after(arguments, "--num_gpus") == "8"
    # One node of several is still another machine, to be reached by ssh.
    assert "--force_multi" in arguments


def test_other_nodes_get_what_a_rank_needs_and_no_secrets(tmp_path):
    from deepspeed.launcher.runner import DEEPSPEED_ENVIRONMENT_NAME

    environment = {"OMP_NUM_THREADS": "4", "HF_HOME": "/models", "HF_TOKEN": "secret", "PATH": "/"}
    launch.write_node_environment(tmp_path, environment)
    (file,) = tmp_path.iterdir()
    assert file.name == DEEPSPEED_ENVIRONMENT_NAME
    assert file.read_text().split() == ["OMP_NUM_THREADS=4", "HF_HOME=/models"]


def test_the_real_launcher_understands_the_arguments():
    from deepspeed.launcher.runner import fetch_hostfile, parse_args

    parsed = parse_args(command(2, num_accelerators=2, deployment="single_node")[1:])
    assert parsed.module
    assert parsed.user_script == "engine.steps.reward"
    assert parsed.user_args == ["--config", "/runs/a b/run.yaml", "--output", "/runs/a b"]
    assert parsed.num_gpus == 2
    assert fetch_hostfile(parsed.hostfile) is None


def test_visible_gpus_are_kept(monkeypatch):
    monkeypatch.setattr(launch, "visible_gpus", lambda environment: ["3", "5"])
    arguments = command()
    assert after(arguments, "--include") == "localhost:3"
    assert "--num_gpus" not in arguments


def test_the_environment_is_cleaned_of_other_launchers_and_screens():
    outer = {"RANK": "3", "MASTER_PORT": "1", "COLUMNS": "80", "TEXTUAL_DRIVER": "x", "HOME": "/h"}
    made = launch.step_environment(RunConfig(), outer)
    assert made["HOME"] == "/h"
    assert not {"RANK", "MASTER_PORT", "COLUMNS", "TEXTUAL_DRIVER"} & set(made)
    assert made["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_threads_are_shared_between_ranks_unless_the_person_says():
    two = resolve({"launch": {"num_accelerators": 2, "deployment": "single_node"}}, "test")
    many = resolve({"launch": {"num_accelerators": 10_000}}, "test")
    cores = launch.usable_cores()
    assert int(launch.step_environment(RunConfig(), {})["OMP_NUM_THREADS"]) == cores
    assert int(launch.step_environment(two, {})["OMP_NUM_THREADS"]) * 2 <= max(2, cores)
    assert launch.step_environment(many, {})["OMP_NUM_THREADS"] == "1"
    assert launch.step_environment(two, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_a_free_port_can_be_bound():
    with socket.socket() as server:
        server.bind(("127.0.0.1", launch.free_port()))
