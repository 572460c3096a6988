"""No key of a profile is dropped in silence: each is rendered, refused, or told to be of no use."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from deploy import targets
from deploy.cluster_profile import TARGETS, ClusterProfile, NodeGroup, Target
from deploy.profile_file import parse_profile
from deploy.targets import RENDERERS
from deploy.used_keys import FOR_PEOPLE, USED, unused
from tests.unit.deploy_profiles import JOB, PROFILES, rendered

GROUPS = [
    {
        "name": "g", "device": "h100", "gpus": 8, "cpus": 64, "memory": "512Gi", "count": 2,
        "shared_memory": "64Gi", "instance": "a", "hosts": ["10.0.0.2", "10.0.0.3"],
        "partition": "p", "labels": {"x": "y"}, "node_selector": {"a": "b"},
        "tolerations": [{"key": "a"}],
    },
    {"name": "c", "cpus": 4, "memory": "16Gi", "min": 0, "max": 1, "instance": "b",
     "hosts": ["10.0.0.4"]},
]  # fmt: skip
BASE: dict[str, Any] = {
    "name": "lab",
    "image": {"gpu": "r/o:1", "cpu": "r/o:2", "pull_secret": "p"},
    "head": {"cpus": 8, "memory": "32Gi", "address": "10.0.0.1", "instance": "h"},
    "node_groups": GROUPS,
    "network": {"interface": "eth0", "rdma_resource": "rdma/x"},
    "storage": {"jobs": {"nfs": "h:/e"}},
    "security": {"listen": "10.0.0.1", "allow_namespaces": ["a"]},
    "redis": {"address": "r:1", "password_secret": "s", "password_file": "/f"},
    "cloud": {"region": "r", "zone": "z", "image": "a:b:c:d", "prepare": ["true"]},
    "slurm": {"partition": "p", "account": "a"},
}
WITH_TLS = {
    "security": {
        "listen": "10.0.0.1", "tls_secret": "t", "tls_cert": "/c", "tls_key": "/k"
    }
}  # fmt: skip
OTHER: dict[str, Any] = {
    "image.pull_secret": "q", "head.cpus": 9, "head.memory": "8Gi", "head.address": "10.0.0.9",
    "node_groups[].gpus": 4, "node_groups[].cpus": 32, "node_groups[].memory": "256Gi",
    "node_groups[].shared_memory": "32Gi", "node_groups[].count": 3, "node_groups[].min": 1,
    "node_groups[].max": 9, "node_groups[].spot": True, "node_groups[].device": "h200",
    "node_groups[].hosts": ["10.0.0.7"], "node_groups[].gpu_resource": "amd.com/gpu",
    "network.rdma": "none", "network.rdma_resource": "rdma/a", "network.rdma_count": 4,
    "storage.home.size": "1Gi", "storage.jobs.size": "1Gi", "security.listen": "0.0.0.0",
    "security.port": 9999, "security.plain_http": True, "security.allow_namespaces": ["z"],
    "security.tls_cert": "/other", "security.tls_key": "/other", "storage.home.path": "/h",
    "storage.jobs.path": "/j", "security.ray_token_file": "/t", "redis.address": "z:1",
    "redis.password_file": "/z", "kubernetes.user_id": 7, "slurm.time": "99",
    "slurm.notice_s": 99, "slurm.requeue": False, "cloud.image": "d:c:b:a",
    "cloud.disk": "64Gi", "cloud.prepare": ["false"], "cloud.idle_minutes": 99,
    "hosts.environment": "/e", "image.gpu": "r/o:8", "image.cpu": "r/o:9",
    "image.gpu_base": "r/o:3", "image.cpu_base": "r/o:4", "prices.node_hour": {"g": 1.0},
    "prices.currency": "EUR",
}  # fmt: skip
TOLERATIONS, SELECTOR = [{"key": "zz"}], {"zz": "zz"}


def keys(model: type[BaseModel], above: str = "") -> Iterator[str]:
    """Every key that a profile may have."""
    for name, field in model.model_fields.items():
        within = [
            part
            for part in (field.annotation, *get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        if name == "node_groups":
            yield from keys(NodeGroup, "node_groups[].")
        elif within and name != "tolerations":
            yield from keys(within[0], f"{above}{name}.")
        else:
            yield f"{above}{name}"


def changed(data: dict[str, Any], key: str) -> dict[str, Any]:
    """With another value of the key; of the second group, which scales, where it is about that."""
    value = OTHER.get(key, "zz")
    value = TOLERATIONS if key.endswith("tolerations") else value
    value = SELECTOR if key.endswith(("node_selector", "labels")) else value
    found = copy.deepcopy(data)
    at: Any = found
    for part in key.split(".")[:-1]:
        scaling = key in ("node_groups[].min", "node_groups[].max")
        at = at["node_groups"][int(scaling)] if part == "node_groups[]" else at.setdefault(part, {})
    at[key.split(".")[-1]] = value
    return found


def text(data: dict[str, Any], target: Target) -> list[str]:
    profile = ClusterProfile.model_validate(data)
    return [file.text for file in RENDERERS[target](profile, JOB)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_key_is_rendered_just_where_it_is_said_to_be_used(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is compared needn't be read by people.
    monkeypatch.setattr(targets, "yaml_text", lambda documents, _: json.dumps(documents))
    bases = [BASE, {**BASE, **WITH_TLS}]
    before = [text(base, target) for base in bases]
    used = set()
    for key in keys(ClusterProfile):
        if key == "target" or key == "name":
            continue
        after = [text(changed(base, key), target) for base in bases]
        if after != before:
            used.add(key)
    wanted = {*USED[target]} - {"name", "target"}
    if target == "systemd":
        # How many is the number of its hosts.
        wanted -= {"node_groups[].count", "node_groups[].hosts"}
    if target == "slurm":
        # One size: refused.
        used -= {"node_groups[].min"}
    if target in ("on-prem",):
        wanted -= {"node_groups[].count"}
        used -= {"node_groups[].max", "node_groups[].count"}
    assert used == wanted


@pytest.mark.parametrize("target", TARGETS)
def test_what_has_no_effect_is_told_in_each_file_and_nothing_else_is(target: Target) -> None:
    data = yaml.safe_load(PROFILES[target])
    data["slurm"] = {"account": "zz"}
    data["head"] = {**data.get("head", {}), "node_selector": {"a": "b"}}
    written = yaml.safe_dump(data)
    profile, _ = parse_profile(written, "cluster.yaml", target)
    wanted = {
        "slurm": ["head.node_selector"],
        "kuberay": ["slurm.account"],
        "rayjob": ["slurm.account"],
        "container": [],
    }.get(target, ["head.node_selector", "slurm.account"])
    told = unused(profile, target)
    assert [key for key in told if key in ("head.node_selector", "slurm.account")] == wanted
    assert not {*told} & {*FOR_PEOPLE}
    for file in rendered(target, written):
        if target != "container":
            lines = " ".join(
                line.removeprefix("#").strip() for line in file.text.splitlines() if "#" in line
            )
            assert f"Without effect on {target}: " in lines
            assert all(key in lines for key in told)
