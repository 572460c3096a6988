"""What is rendered: as it was when somebody last looked, and what must hold however it looks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.cluster_profile import TARGETS, Target
from deploy.rendered import Rendered, differences, write
from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT
from tests.unit.deploy_profiles import GOLDEN, OPEN, WITH_REDIS, rendered


@pytest.mark.parametrize("target", TARGETS)
def test_it_is_what_was_reviewed(target: Target) -> None:
    """`python -m tests.unit.deploy_profiles` renders them anew."""
    files = rendered(target)
    assert differences(files, GOLDEN / target) == []
    assert sorted(p.name for p in (GOLDEN / target).iterdir()) == sorted(f.name for f in files)


def ray_cluster(text: str | None = None, target: Target = "kuberay") -> dict[str, Any]:
    (file,) = rendered(target, text)
    for document in yaml.safe_load_all(file.text):
        if document["kind"] == "RayCluster":
            return dict(document["spec"])
        if document["kind"] == "RayJob":
            return dict(document["spec"]["rayClusterSpec"])
    raise AssertionError("there is one")


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("text", [None, OPEN], ids=["example", "open"])
def test_no_pod_is_root_and_none_can_become_it(text: str | None) -> None:
    for pod in pods(ray_cluster(text)):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert {"livenessProbe", "readinessProbe", "startupProbe"} <= container.keys()


def test_tokens_and_passwords_are_references_everywhere() -> None:
    for target in TARGETS:
        for file in rendered(target):
            for line in file.text.splitlines():
                given = re.search(r"(?i)(?<!account)(token|password|api_key)\s*[=:]\s*(\S.*)", line)
                # A path, a name, or nothing: never a value.
                if given is not None:
                    value = given[2].strip("'\"{}")
                    assert value.startswith(("/", "~", "%d/", "$HOME/", "lab-", "run ")), line
    for pod in pods(ray_cluster()):
        for variable in pod["containers"][0]["env"]:
            if re.search("(?i)password|key|token", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"]


def test_the_head_has_no_slot_and_workers_have_their_groups() -> None:
    spec = ray_cluster(OPEN)
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "--num-cpus=0 --num-gpus=0" in pods(spec)[0]["containers"][0]["args"][0]
    gpu, small = spec["workerGroupSpecs"]
    assert gpu["rayStartParams"] == {"num-cpus": "128", "num-gpus": "8"}
    assert (gpu["replicas"], gpu["minReplicas"], gpu["maxReplicas"]) == (4, 4, 4)
    assert gpu["labels"] == {"rack": "r1"}
    # Where it scales an apply must not set back what the autoscaler has made.
    assert "replicas" not in small
    assert (small["minReplicas"], small["maxReplicas"]) == (0, 8)
    assert gpu["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    shm = [v for v in gpu["template"]["spec"]["volumes"] if v["name"] == "shared-memory"]
    assert shm[0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "512Gi"}


def test_nobody_but_the_cluster_gets_in_unless_the_profile_says_so() -> None:
    def policy(text: str | None) -> list[dict[str, Any]]:
        (file,) = rendered("kuberay", text)
        documents = yaml.safe_load_all(file.text)
        found = next(d for d in documents if d["kind"] == "NetworkPolicy")
        return list(found["spec"]["ingress"])

    closed, opened = policy(None), policy(OPEN)
    assert [p["port"] for rule in closed for p in rule.get("ports", ())] == [8265]
    assert [p["port"] for rule in opened for p in rule.get("ports", ())] == [8265, 8443]
    command = pods(ray_cluster())[0]["containers"][0]["args"][0]
    assert "--listen 127.0.0.1" in command
    assert "--dashboard-host=127.0.0.1" in command
    named = [p["name"] for p in pods(ray_cluster())[0]["containers"][0]["ports"]]
    assert "octavo" not in named
    head = pods(ray_cluster(OPEN))[0]["containers"][0]
    assert "--listen 0.0.0.0 --tls-cert" in head["args"][0]
    assert "octavo" in [p["name"] for p in head["ports"]]


def test_a_rayjob_carries_its_job_file_and_a_second_try_finds_the_job() -> None:
    (file,) = rendered("rayjob")
    documents = {d["kind"]: d for d in yaml.safe_load_all(file.text)}
    config, job = documents["ConfigMap"], documents["RayJob"]["spec"]
    assert yaml.safe_load(config["data"]["job.yaml"])["name"] == "toy"
    assert f"--key {config['metadata']['name']}" in job["entrypoint"]
    volumes = pods(job["rayClusterSpec"])[0]["volumes"]
    named = [v["configMap"]["name"] for v in volumes if "configMap" in v]
    assert named == [config["metadata"]["name"]]


def test_the_settings_that_decide_when_a_node_is_dead_are_those_of_a_cluster_by_hand() -> None:
    for target in TARGETS:
        if target == "container":
            continue
        text = "\n".join(file.text for file in rendered(target))
        for name in CLUSTER_ENVIRONMENT:
            # KubeRay sets the one about tokens itself.
            assert name in text or (name, target) in {
                ("RAY_AUTH_MODE", "kuberay"),
                ("RAY_AUTH_MODE", "rayjob"),
            }


def test_ranks_run_on_the_clouds_groups_alone() -> None:
    (file,) = rendered("aws")
    found = yaml.safe_load(file.text)
    types = found["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0}
    assert types["h100"]["resources"] == {"CPU": 192, "GPU": 8}
    assert (types["h100"]["min_workers"], types["h100"]["max_workers"]) == (0, 4)
    assert types["h100"]["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert types["cpu"]["min_workers"] == types["cpu"]["max_workers"] == 2
    assert found["max_workers"] == 6


def test_a_host_finds_its_group_by_its_address() -> None:
    import subprocess

    (file,) = rendered("on-prem")
    command = yaml.safe_load(file.text)["worker_start_ray_commands"][-1]
    # The group's case alone, with the addresses given and the start shown instead of run.
    case = command[command.index("case ") :].replace("exec ", "echo ")
    for address, group in (("10.0.0.3", "--num-gpus=8"), ("10.0.0.4", "--num-gpus=0")):
        shown = f'hostname() {{ echo "{address} 172.17.0.1"; }}; RAY_HEAD_IP=10.0.0.1; {case}'
        done = subprocess.run(["bash", "-c", shown], capture_output=True, text=True)
        assert group in done.stdout
    other = f'hostname() {{ echo "10.0.0.33"; }}; {case}'
    done = subprocess.run(["bash", "-c", other], capture_output=True, text=True)
    assert done.returncode == 1
    assert "in no node group" in done.stderr


def test_a_redis_is_asked_for_by_the_head_alone() -> None:
    head, *nodes = rendered("systemd", WITH_REDIS)
    assert "EnvironmentFile=/etc/octavo/redis" in head.text
    assert "Environment=RAY_REDIS_ADDRESS=10.0.0.9:6379" in head.text
    assert all("REDIS_ADDRESS" not in node.text for node in nodes)
    assert "--head -- " in head.text


def test_a_unit_takes_rays_token_from_where_the_profile_says() -> None:
    for text, path in (
        (WITH_REDIS, "/etc/octavo/ray-token"),
        (
            WITH_REDIS.replace("security: {", "security: {ray_token_file: /srv/token, "),
            "/srv/token",
        ),
    ):
        for unit in rendered("systemd", text):
            assert f"LoadCredential=ray-token:{path}\n" in unit.text


def test_files_that_are_the_same_are_not_written_again(tmp_path: Path) -> None:
    files = [Rendered("a", "1\n"), Rendered("b.sh", "2\n", executable=True)]
    assert [d.name for d in differences(files, tmp_path)] == ["a", "b.sh"]
    assert len(write(files, tmp_path)) == 2
    assert write(files, tmp_path) == []
    assert differences(files, tmp_path) == []
    assert (tmp_path / "b.sh").stat().st_mode & 0o111
    (tmp_path / "a").write_text("old\n")
    (found,) = differences(files, tmp_path)
    assert (found.name, found.new) == ("a", False)
    assert "-old" in found.lines
    assert "+1" in found.lines
