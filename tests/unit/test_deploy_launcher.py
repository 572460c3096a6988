"""What is rendered for a cloud starts there: as Ray's own launcher reads it, down to the commands
that it would run on a machine."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cluster_profile import Target
from orchestrator.spec.errors import SpecError
from tests.unit.deploy_profiles import CLOUD_TARGETS, PROFILES, rendered

BOTH_IMAGES = (
    'image: {gpu: "registry.example.com/octavo:1"}',
    'image: {gpu: "registry.example.com/octavo:1-gpu", cpu: "registry.example.com/octavo:1-cpu"}',
)


def launcher(target: Target, *changed: tuple[str, str]) -> dict[str, Any]:
    text = PROFILES[target]
    for old, new in changed:
        assert old in text
        text = text.replace(old, new)
    (file,) = rendered(target, text)
    return dict(yaml.safe_load(file.text))


def problems(target: Target, *changed: tuple[str, str]) -> str:
    with pytest.raises(SpecError) as caught:
        launcher(target, *changed)
    return str(caught.value)


class Machine:
    """A process runner of Ray's that keeps what it would run there."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def check_call(self, command: list[str], *_: Any, **__: Any) -> None:
        self.commands.append(command[-1])

    def check_output(self, command: list[str], *_: Any, **__: Any) -> bytes:
        self.commands.append(command[-1])
        for asked, said in {
            "command -v docker": b"/usr/bin/docker",
            ".State.Running": b"",
            ".Config.Env": b'["PATH=/usr/bin", "HOME=/home/octavo"]',
            ".Runtimes": b"map[runc:{}]",
        }.items():
            if asked in command[-1]:
                return said
        return b""


def started(document: dict[str, Any], node_type: str) -> str:
    """The `docker run` of a machine of a type, by the code of the launcher that makes it."""
    from ray.autoscaler._private.command_runner import DockerCommandRunner

    class Provider:
        def internal_ip(self, _: str) -> str:
            return "10.0.0.1"

        external_ip = internal_ip

    docker = dict(document["docker"])
    head = node_type == document["head_node_type"]
    if not head:
        # As `AutoscalingConfig.get_docker_config` does; of the head's type nothing is looked at.
        docker |= document["available_node_types"][node_type].get("docker", {})
    machine = Machine()
    runner = DockerCommandRunner(
        docker,
        log_prefix="",
        node_id="n",
        provider=Provider(),
        auth_config={"ssh_user": "ubuntu"},
        cluster_name=document["cluster_name"],
        process_runner=machine,
        use_internal_ip=True,
    )
    mounts = dict.fromkeys(document["file_mounts"], os.devnull)
    runner.run_init(as_head=head, file_mounts=mounts, sync_run_yet=True)
    (command,) = [c for c in machine.commands if "docker run" in c]
    return command


@pytest.mark.parametrize("target", CLOUD_TARGETS)
def test_each_machine_starts_a_container_of_its_own_kind(target: Target) -> None:
    document = launcher(target, BOTH_IMAGES)
    head, gpu, cpu = (started(document, name) for name in ("head", "h100", "cpu"))
    for command in (head, gpu, cpu):
        assert "/octavo/jobs:/octavo/jobs" in command
        assert "/home/octavo/.ray/auth_token" in command
        assert "/dev/infiniband" not in command
        assert command.count("--shm-size") == 1
    assert ":1-cpu" in head and ":1-gpu" in gpu and ":1-cpu" in cpu
    # A GPU that Docker can't hand over is an error, not a container without it.
    assert "--gpus=all" in gpu
    assert "--gpus" not in head + cpu
    assert "/octavo/home:/octavo/home" in head
    assert "/octavo/home:" not in gpu + cpu
    assert "--shm-size=524288m" in gpu


def test_the_image_has_what_the_launcher_expects_of_it() -> None:
    for target in CLOUD_TARGETS:
        for file in rendered("container", f"target: {target}\n{PROFILES[target]}"):
            if not file.name.startswith("Containerfile"):
                continue
            text = re.sub(r"\\\n", " ", file.text)
            # Ray looks into the image for it, and mounts the token there.
            assert "ENV HOME=/home/octavo" in text
            assert "-d -m 700 -o octavo -g octavo /home/octavo/.ray" in text
            assert re.search("apt-get install [^&]*rsync +openssh-client", text)
            # Of the head's autoscaler.
            asked = f".[{target}]" if file.name.endswith("cpu") else f"/tmp {target}"
            assert asked in text


@pytest.mark.parametrize("target", CLOUD_TARGETS)
def test_a_machine_image_and_a_shared_folder_are_asked_for(target: Target) -> None:
    image = re.search(r"image: \S+,", PROFILES[target].split("cloud:\n")[1])
    assert image is not None
    assert "cloud.image: is missing" in problems(target, (image[0], ""))
    assert "cloud.image: 'x:y'" in problems(target, (image[0], "image: 'x:y',"))
    alone = problems(
        target, ('nfs: "10.0.0.9:/jobs"', "size: 1Ti"), (", prepare: [sudo touch /prepared]", "")
    )
    assert "storage.jobs.nfs: is missing" in alone
    assert "would be each machine's own disk" in alone


@pytest.mark.parametrize("target", CLOUD_TARGETS)
@pytest.mark.parametrize("word", ["infiniband", "roce", "efa"])
def test_a_network_that_the_launcher_gives_no_machine_is_refused(target: Target, word: str) -> None:
    told = problems(target, ("cloud:\n", f"network: {{rdma: {word}}}\ncloud:\n"))
    assert f"network.rdma: '{word}': can't be had at {target}" in told
    assert "Kubernetes" in told


def test_what_else_a_cloud_can_not_do_is_refused_with_its_key() -> None:
    tls = "security: {tls_cert: /etc/api.pem, tls_key: /etc/api.key, listen: 0.0.0.0}\ncloud:\n"
    told = problems("aws", ("cloud:\n", tls))
    assert "security.tls_cert: '/etc/api.pem': is not in the container" in told
    assert "node_groups[0].instance" in problems("gcp", ("a3-highgpu-8g", "n2-standard-8"))
    long = ("name: cloud\n", f"name: {'c' * 50}\n")
    assert "is too long for gcp" in problems("gcp", long)
    assert "is too long for azure" in problems("azure", long)
    assert launcher("aws", long)["cluster_name"] == "c" * 50
    assert "is what Ray calls the head's" in problems("aws", ("name: h100", "name: head"))


def test_a_machine_has_a_disk_that_the_image_fits_on_and_a_system_that_boots() -> None:
    (mapping,) = launcher("aws")["available_node_types"]["h100"]["node_config"][
        "BlockDeviceMappings"
    ]
    assert mapping["DeviceName"] == "/dev/sda1"
    assert mapping["Ebs"]["VolumeSize"] == 300
    (disk,) = launcher("gcp")["available_node_types"]["h100"]["node_config"]["disks"]
    assert disk["initializeParams"]["sourceImage"].startswith("projects/")
    assert disk["initializeParams"]["diskSizeGb"] == 300
    azure = launcher("azure")["available_node_types"]["h100"]["node_config"]["azure_arm_parameters"]
    assert azure["osDiskSize"] == 300
    assert (azure["imagePublisher"], azure["imageVersion"]) == ("microsoft-dsvm", "latest")


def test_gcps_machines_are_moved_for_maintenance_where_they_can_be() -> None:
    types = launcher("gcp")["available_node_types"]
    assert "scheduling" not in types["head"]["node_config"]
    scheduling = types["h100"]["node_config"]["scheduling"]
    assert scheduling == [{"onHostMaintenance": "TERMINATE"}, {"preemptible": True}]


@pytest.mark.parametrize("target", CLOUD_TARGETS)
def test_the_parameters_of_azure_and_the_rest_are_those_of_rays_templates(target: Target) -> None:
    document = launcher(target)
    if target == "azure":
        import json

        import ray.autoscaler._private as private

        template = Path(private.__path__[0]) / "_azure" / "azure-vm-template.json"
        known = json.loads(template.read_text())["parameters"]
        for node_type in document["available_node_types"].values():
            assert node_type["node_config"]["azure_arm_parameters"].keys() <= known.keys()
    assert document["provider"].get("cache_stopped_nodes", False) is False


def prepared(folder: Path, commands: list[str], **said: str) -> subprocess.CompletedProcess[str]:
    """Initialization commands, one after another as the launcher runs them, with stand-ins for
    what asks of the machine or changes it; ``sudo`` says what it was told."""
    tools = folder / "bin"
    tools.mkdir()
    known = {"id": "echo 1000", "sudo": 'echo "sudo $*"', "stat": "echo 7"}
    for name, text in {**known, **said}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    script = "\n".join(f"( {command} ) || exit $?" for command in commands)
    bash = shutil.which("bash") or "/bin/bash"
    return subprocess.run(
        [bash, "-c", script],
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


def test_a_machine_is_prepared_for_the_containers_user_and_the_shared_folder(
    tmp_path: Path,
) -> None:
    commands = launcher("aws")["initialization_commands"]
    apart = 'case "$3" in /) echo 1;; *) echo 2;; esac'
    done = prepared(tmp_path, commands, stat=apart, mountpoint="exit 1")
    assert (done.returncode, done.stderr) == (0, "")
    told = done.stdout.splitlines()
    assert any("mount -t nfs" in line and "10.0.0.9:/jobs /octavo/jobs" in line for line in told)
    assert any(line.endswith("-o 1000 -g 1000 -m 700 /octavo/home") for line in told)
    # What the user wants done comes first.
    assert told[0] == "sudo touch /prepared"


def test_a_machine_whose_folder_is_its_own_or_whose_user_is_another_is_refused(
    tmp_path: Path,
) -> None:
    commands = launcher("aws")["initialization_commands"]
    done = prepared(tmp_path, commands, mountpoint="exit 0")
    assert done.returncode == 1
    assert "/octavo/jobs is this machine's own disk" in done.stderr
    shutil.rmtree(tmp_path / "bin")
    done = prepared(tmp_path, commands, id="echo 1001")
    assert done.returncode == 1
    assert "kubernetes.user_id: 1001" in done.stderr
