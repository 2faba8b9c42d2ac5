"""The hosts of a multi_node run: what is wrong with each is told before anything starts."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest
from fake_cluster import write_programs
from typer.testing import CliRunner

from dschat_tui.cli.main import app
from dschat_tui.runs import hosts
from dschat_tui.runs.preflight import Refusal, prepare
from engine.config.loading import resolve
from engine.config.schema import LaunchConfig


def answer(gpus: int = 0, sees_folder: bool = True, **versions: str) -> str:
    """The shell's words for a host with these versions in place of this machine's."""
    told = json.dumps([{**hosts.versions(), **versions}, gpus, sees_folder])
    return f"echo {shlex.quote(told)}; exit 0"


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """A folder for runs on a machine whose ssh reaches hosts of all kinds, by their names."""
    programs = write_programs(
        tmp_path / "bin",
        old=answer(torch="1.13.1"),
        other=answer(dschat="0.0.1", Python="3.9.1"),
        gpus2=answer(gpus=2),
        gpus8=answer(gpus=8),
        blind=answer(sees_folder=False),
        locked="echo 'Permission denied (publickey).' >&2; exit 255",
        bare="echo 'sh: python: not found' >&2; exit 127",
        chatty="echo Welcome; exit 0",
        hangs="exec sleep 30",
    )
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def launch(folder: Path, *names: str, slots: int = 2, **options: object) -> LaunchConfig:
    hostfile = folder / "hosts"
    hostfile.write_text("".join(f"{name} slots={slots}\n" for name in names))
    return LaunchConfig(deployment="multi_node", hostfile=str(hostfile), **options)


def refused(folder: Path, *names: str, **options) -> list[str]:
    return hosts.refusals(launch(folder, *names, **options), folder / "run")


def test_hosts_with_the_same_environment_may_run(cluster):
    assert refused(cluster, "node1", "node2", num_accelerators=2) == []
    # What was put there to be seen is gone again.
    assert {file.name for file in cluster.iterdir()} == {"bin", "hosts"}


@pytest.mark.parametrize(
    ("host", "word"),
    [
        ("old", "torch 1.13.1"),
        ("other", "dschat 0.0.1"),
        ("other", "Python 3.9.1"),
        ("blind", "does not see"),
        ("locked", "Permission denied"),
        ("bare", "not found"),
        ("chatty", "Welcome"),
    ],
)
def test_the_host_at_fault_is_named_with_what_is_wrong(cluster, host, word):
    (reason,) = refused(cluster, "node1", host, "node3")
    assert f"host {host} " in reason
    assert word in reason


def test_all_hosts_at_fault_are_named_at_once(cluster):
    told = refused(cluster, "old", "node1", "locked")
    assert [reason.split()[1] for reason in told] == ["old", "locked"]


def test_a_host_that_hangs_is_given_up(cluster, monkeypatch):
    monkeypatch.setattr(hosts, "ANSWER_SECONDS", 0.3)
    told = "\n".join(refused(cluster, "hangs"))
    assert "host hangs cannot be used: no answer" in told


def test_fewer_nodes_than_asked_for_are_refused_without_asking_any(cluster):
    (reason,) = refused(cluster, "locked", "node2", num_nodes=3)
    assert "2 hosts (locked, node2), fewer than the 3" in reason
    assert "launch.num_nodes=2" in reason


def test_only_the_first_hosts_are_asked_where_fewer_are_wanted(cluster):
    assert refused(cluster, "node1", "locked", num_nodes=1) == []


def test_slots_and_gpus_must_be_enough_on_every_node(cluster):
    (reason,) = refused(cluster, "node1", "node2", slots=1, num_nodes=1, num_accelerators=2)
    assert "node1 has slots=1" in reason
    (reason,) = refused(cluster, "gpus8", "gpus2", slots=8, num_accelerators=4)
    assert "host gpus2 has 2 GPUs" in reason
    (reason,) = refused(cluster, "gpus8", "node2", slots=8, num_accelerators=4)
    assert "host node2 has 0 GPUs" in reason


def test_programs_that_start_the_nodes_must_be_there(cluster, monkeypatch):
    (cluster / "bin/pdsh").unlink()
    monkeypatch.setenv("PATH", str(cluster / "bin"))
    (reason,) = refused(cluster, "node1", "node2")
    assert "Install pdsh" in reason


def test_a_path_that_a_shell_would_take_apart_is_refused(cluster):
    (reason,) = hosts.refusals(launch(cluster, "node1"), cluster / "my run; rm")
    assert "--output" in reason


@pytest.mark.parametrize(
    "content", ["node1", "node1 slots=x", "-oProxyCommand=x slots=1", "a slots=1\na slots=2", ""]
)
def test_a_hostfile_that_cannot_be_used_is_named(cluster, content):
    options = launch(cluster, "node1")
    Path(options.hostfile).write_text(content)
    (reason,) = hosts.refusals(options, cluster / "run")
    assert options.hostfile in reason


def test_the_hosts_keep_their_order_and_comments_are_no_hosts():
    text = "# head\nb.example slots=2\n\nuser@a slots=8 # with GPUs\n"
    assert hosts.hosts_of(text) == {"b.example": 2, "user@a": 8}


def test_a_run_keeps_its_number_of_nodes(cluster):
    options = launch(cluster, "node1", "node2").model_dump()
    config = resolve({"launch": options}, "test")
    assert prepare(config, cluster / "run", None).config.launch.num_nodes == 2
    odd = resolve({"launch": options, "sft": {"batch_size": 5}}, "test")
    with pytest.raises(Refusal, match="batch-size-divides"):
        prepare(odd, cluster / "run", None)


def test_nothing_starts_while_a_host_cannot_be_reached(cluster):
    options = launch(cluster, "node1", "locked")
    result = CliRunner().invoke(
        app,
        [
            *("run", "--profile", "tiny", "--output", str(cluster / "run")),
            *(
                "--set",
                "launch.deployment=multi_node",
                "--set",
                f"launch.hostfile={options.hostfile}",
            ),
        ],
    )
    assert result.exit_code == 2
    assert "host locked cannot be used: Permission denied" in result.output
    assert not (cluster / "run").exists()
