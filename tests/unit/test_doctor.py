"""What the doctor says of machines: each finding where its fact is there, and not elsewhere."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launch import machine_facts
from launch.machine_facts import Interface, MachineFacts, Probe, gather
from launch.machine_probes import storage, wandb
from orchestrator.cli.main import call
from orchestrator.cluster.local import Host
from orchestrator.doctor import nodes as doctor_nodes
from orchestrator.doctor.checks import (
    Level,
    MachineFinding,
    examine,
    gpu_links,
)
from orchestrator.doctor.comparison import NodeAnswer, compare
from orchestrator.doctor.nodes import ClusterUnreachableError, ask, read

H100 = {"name": "NVIDIA H100", "capability": [9, 0], "memory_bytes": 80 << 30}
ENGINE = {"version": "2.20.2", "problem": "", "unsupported": {"mxfp8": "needs 10.0"}}
NVLINK = """\
\tGPU0\tGPU1\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tSYS\t0-47
GPU1\tNV18\t X \tPIX\t0-47
NIC0\tSYS\tPIX\t X \t
"""

GPU = MachineFacts(
    host="n1",
    clock=1000.0,
    python="3.11.7",
    packages={"octavo": "0.1.0", "torch": "2.13.0", "deepspeed": "0.19.8", "ray": "2.60.0"},
    devices={"cuda": "12.8", "nccl": "2.27.3", "devices": [H100, H100], "engine": ENGINE},
    driver="570.86",
    driver_cuda="12.8",
    driver_error="",
    topology=NVLINK,
    interfaces=(Interface("eth0", True, 100_000, ("10.0.0.2",)),),
    rdma=("mlx5_0",),
    environment={},
    memory_bytes=1 << 40,
    shm_bytes=1 << 39,
    open_files=-1,
    locked_memory=-1,
    processes=-1,
    clock_synchronised=True,
    token_file="/root/.ray/auth_token",
    token_mode=0o600,
    storage={"folder": "/jobs", "seen": True, "mb_s": 900.0, "free_bytes": 1 << 42},
    wandb={"url": "https://api.wandb.ai", "mode": "", "key": True},
    seconds=1.0,
)
CPU = replace(GPU, devices={"cuda": "", "devices": [], "nccl": ""}, driver="", topology="", rdma=())


def worse(found: Sequence[MachineFinding]) -> list[tuple[str, str]]:
    return [(f.check, f.level.value) for f in found if f.level is not Level.ok]


@pytest.mark.parametrize("facts", [GPU, CPU], ids=["gpu", "cpu"])
def test_a_machine_that_is_right_has_no_warning(facts: MachineFacts) -> None:
    assert worse(examine(facts)) == []


@pytest.mark.parametrize(
    ("change", "check", "level", "told"),
    [
        ({"python": "3.10.1"}, "python", "error", "3.10.1"),
        ({"packages": {"torch": "2", "ray": "2"}}, "deepspeed", "error", "not installed"),
        ({"driver_error": "no devices were found"}, "driver", "error", "no devices"),
        ({"driver": "470.57"}, "driver", "error", "too old for torch's CUDA 12.8"),
        ({"devices": {"error": "no answer in 90 s"}}, "cuda", "error", "no answer in 90 s"),
        ({"devices": {"cuda": "", "devices": []}}, "cuda", "error", "one for CPUs"),
        ({"devices": {"cuda": "12.8", "devices": []}}, "cuda", "error", "sees no device"),
        (
            {"devices": {**GPU.devices, "cuda": "11.8"}},
            "cuda",
            "error",
            "torch is built for CUDA 11.8",
        ),
        (
            {"devices": {**GPU.devices, "devices": [{**H100, "capability": [8, 0]}]}},
            "devices",
            "warning",
            "no FP8 in hardware",
        ),
        (
            {"devices": {**GPU.devices, "devices": [H100, {**H100, "name": "A"}]}},
            "devices",
            "warning",
            "differ",
        ),
        (
            {"devices": {**GPU.devices, "engine": {**ENGINE, "version": "", "problem": "no CUDA"}}},
            "transformer-engine",
            "warning",
            "no CUDA",
        ),
        ({"topology": NVLINK.replace("NV18", "SYS")}, "topology", "warning", "by SYS"),
        (
            {"environment": {"NCCL_SOCKET_IFNAME": "ib0"}},
            "network",
            "error",
            "NCCL_SOCKET_IFNAME=ib0, which is not up here; there are eth0",
        ),
        ({"interfaces": ()}, "network", "warning", "one machine alone"),
        ({"rdma": ()}, "network", "warning", "no RDMA adapter"),
        ({"shm_bytes": 64 << 20}, "shared-memory", "error", "0.0671 GB"),
        ({"shm_bytes": 16 << 30}, "shared-memory", "warning", "17.2 GB of 1.1e+03 GB"),
        ({"open_files": 512}, "limits", "error", "512 open files"),
        ({"open_files": 20000}, "limits", "warning", "20000 open files"),
        ({"processes": 1000}, "limits", "warning", "1000 processes"),
        ({"locked_memory": 65536}, "limits", "error", "RDMA locks"),
        ({"clock_synchronised": False}, "clock", "warning", "not held"),
        ({"storage": {"folder": "/jobs", "error": "Read-only"}}, "storage", "error", "Read-only"),
        ({"storage": {**GPU.storage, "seen": False}}, "storage", "error", "is another one here"),
        ({"storage": {**GPU.storage, "mb_s": 3.0}}, "storage", "warning", "3 MB/s"),
        ({"storage": {**GPU.storage, "free_bytes": 1}}, "storage", "warning", "free"),
        ({"token_mode": 0o644}, "ray-token", "error", "can be read by others (0644)"),
        ({"wandb": {**GPU.wandb, "error": "timed out"}}, "wandb", "warning", "timed out"),
        ({"wandb": {**GPU.wandb, "key": False}}, "wandb", "warning", "no key"),
    ],
)
def test_each_fault_is_told_once_with_what_to_do(
    change: dict[str, Any], check: str, level: str, told: str
) -> None:
    found = [f for f in examine(replace(GPU, **change)) if f.level is not Level.ok]
    assert (check, level) in [(f.check, f.level.value) for f in found]
    (finding,) = [f for f in found if told in f.message]
    assert finding.remedy


def test_links_are_those_between_gpus_alone() -> None:
    assert gpu_links(NVLINK) == {"NV18"}
    assert gpu_links("") == set()
    assert gpu_links("\x1b[4mGPU0\x1b[0m\nGPU0 X") == set()


def answer(node: str, facts: MachineFacts | None = GPU, **more: Any) -> NodeAnswer:
    return NodeAnswer(node, "h100", facts, 1000.0, 1000.2, **more)


def test_nodes_that_are_alike_have_no_warning() -> None:
    found = compare([answer("10.0.0.1"), answer("10.0.0.2")])
    assert worse(found) == []
    assert any(f.message == "ray 2.60.0 on all 2 nodes" for f in found)


def test_what_differs_between_nodes_is_told_with_their_addresses() -> None:
    other = replace(GPU, packages={**GPU.packages, "ray": "2.59.0"}, python="3.12.1")
    found = compare([answer("10.0.0.1"), answer("10.0.0.2", other)])
    told = [f.message for f in found if f.level is Level.error]
    assert told == [
        "python differs: 3.11.7 on 10.0.0.1; 3.12.1 on 10.0.0.2",
        "ray differs: 2.60.0 on 10.0.0.1; 2.59.0 on 10.0.0.2",
    ]
    fewer = replace(GPU, devices={**GPU.devices, "devices": [H100]})
    (finding,) = [f for f in compare([answer("a"), answer("b", fewer)]) if f.level is Level.error]
    assert "group h100 differ" in finding.message


def test_a_node_without_an_answer_and_one_with_a_wrong_clock_are_errors() -> None:
    late = replace(GPU, clock=1060.0)
    found = compare([answer("a"), answer("b", late), answer("c", None, error="nothing in 150 s")])
    told = {(f.node, f.check): f.message for f in found if f.level is Level.error}
    assert told[("b", "clock")].startswith("its clock is +59.")
    assert told[("c", "node")] == "no answer: nothing in 150 s"


def test_facts_survive_the_way_between_processes() -> None:
    rows = [asdict(answer("a")), asdict(answer("b", None, error="x"))]
    assert read(json.loads(json.dumps(rows))) == [answer("a"), answer("b", None, error="x")]


def test_this_machine_is_looked_at_without_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch takes seconds to import: what it says has a test of its own where there is a GPU.
    monkeypatch.setattr(machine_facts, "DEVICES_S", 0.01)
    facts = gather(str(tmp_path / "not" / "yet"), wandb=False)
    assert facts.python and facts.packages["ray"] and facts.memory_bytes
    assert facts.devices == {"error": "no answer in 0 s"}
    assert facts.storage["tried"] == str(tmp_path)
    assert facts.storage["mb_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_hangs_is_left_behind_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder is a FIFO's: whoever opens the mark waits for a writer that never comes.
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "__init__.py").touch()
    hang = f"import os, time\nopen({str(tmp_path / 'began')!r}, 'w').write(str(os.getpid()))\n"
    (tmp_path / "launch" / "machine_probes.py").write_text(hang + "time.sleep(600)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    probe = Probe("storage", ("/",), 1.0)
    deadline = time.monotonic() + 30
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert probe.answer() == {"error": "no answer in 1 s"}
    pid = int((tmp_path / "began").read_text())
    while Path(f"/proc/{pid}").exists() and "zombie" not in _state(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "zombie"


def test_a_folder_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert storage(str(file / "jobs"))["error"] == "Not a directory"
    assert storage(str(tmp_path), str(tmp_path / "mark"))["seen"] is False
    assert list(tmp_path.iterdir()) == [file]


def test_the_key_of_wandb_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789")
    monkeypatch.setenv("WANDB_MODE", "offline")
    found = wandb()
    assert found["key"] is True
    assert "0123456789" not in json.dumps(found)
    monkeypatch.setenv("WANDB_MODE", "")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert wandb()["error"]


def test_the_command_tells_its_findings_and_exits_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found(*_: Any, **__: Any) -> MachineFacts:
        return GPU

    monkeypatch.setattr(machine_facts, "gather", found)
    assert call(["doctor", "-o", "json", "--home", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["error"] == 0
    monkeypatch.setattr(machine_facts, "gather", lambda *_, **__: replace(GPU, shm_bytes=1))
    assert call(["doctor", "--home", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "error: shared-memory: /dev/shm has 1e-09 GB" in shown
    assert "--ipc=host" in shown


def test_nodes_of_no_cluster_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert call(["doctor", "--group", "all", "--home", str(tmp_path)]) == 3
    said = capsys.readouterr().err
    assert "no controller" in said and "--address HOST:6379" in said


def test_an_address_alone_means_every_node_there_and_never_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def ask_there(address: str, group: str | None, *_: Any, **__: Any) -> list[NodeAnswer]:
        asked.append((address, group))
        return []

    monkeypatch.setattr(machine_facts, "gather", lambda *_, **__: pytest.fail("looked here"))
    monkeypatch.setattr(doctor_nodes, "ask", ask_there)
    assert call(["doctor", "--address", "10.0.0.1:6379", "--home", str(tmp_path)]) == 0
    assert asked == [("10.0.0.1:6379", None)]
    assert call(["doctor", "--address", "10.0.0.1", "--home", str(tmp_path)]) == 2
    assert "'10.0.0.1' is no HOST:PORT" in capsys.readouterr().err


def test_a_controller_on_one_machine_has_that_machine_and_no_groups(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(machine_facts, "gather", lambda *_, **__: GPU)
    created = psutil.Process().create_time()
    host = Host(os.getpid(), created, str(tmp_path), 4, "http://127.0.0.1:1")
    (tmp_path / "host.json").write_text(json.dumps(asdict(host)))
    assert call(["doctor", "--group", "all", "--home", str(tmp_path)]) == 0
    assert "Python" in capsys.readouterr().out
    assert call(["doctor", "--group", "h10", "--home", str(tmp_path)]) == 102
    said = capsys.readouterr().err
    assert "no group 'h10'" in said and "this machine alone" in said and "6379" not in said


def test_a_group_that_no_node_is_of_is_told_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho \'{"answers": [], "groups": ["cpu", "h100"]}\'\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
        asked = ["doctor", "--group", "h10", "--address", address, "--home", str(tmp_path)]
        assert call(asked) == 102
    said = capsys.readouterr().err
    assert "'h10': did you mean 'h100'? there are cpu, h100" in said


def test_a_cluster_that_is_not_there_or_says_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(ClusterUnreachableError, match="nothing listens at"):
        ask(address, None, "/jobs", "")
    with pytest.raises(ClusterUnreachableError, match="nothing listens at"):
        ask("here", None, "/jobs", "")
    monkeypatch.setattr(doctor_nodes, "TOGETHER_S", 0.5)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(ClusterUnreachableError, match="did not answer in"),
    ):
        ask(f"127.0.0.1:{silent.getsockname()[1]}", None, "/jobs", "")
