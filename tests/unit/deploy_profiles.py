"""Cluster profiles of the tests, and what they were rendered to when somebody last looked.

python -m tests.unit.deploy_profiles        renders them anew; look at the difference, commit it
"""

from __future__ import annotations

import re
from pathlib import Path

from deploy.cluster_profile import TARGETS, ClusterProfile, Target
from deploy.profile_file import parse_profile
from deploy.rendered import Rendered, write
from deploy.targets import render

GOLDEN = Path(__file__).parent / "data" / "deploy"
JOB = "name: toy\nmodel: {hidden_size: 64, num_layers: 2, num_heads: 4}\n"

KUBERNETES = (Path(__file__).parents[2] / "deploy" / "cluster.yaml").read_text()

OPEN = """\
name: open
node_groups:
  - {name: h200, device: h200, gpus: 8, cpus: 128, memory: 2Ti, shared_memory: 512Gi, count: 4,
     labels: {rack: r1}}
  - {name: small, cpus: 16, memory: 64Gi, min: 0, max: 8}
image: {gpu: "registry.example.com/octavo:1", pull_secret: registry}
security:
  {listen: 0.0.0.0, tls_secret: octavo-tls, allow_namespaces: [research]}
kubernetes: {namespace: training, priority_class: high}
"""

CLOUD = """\
name: cloud
image: {gpu: "registry.example.com/octavo:1"}
head: {cpus: 8, memory: 32Gi, instance: HEAD}
node_groups:
  - {name: h100, device: h100, gpus: 8, cpus: 192, memory: 2Ti, shared_memory: 512Gi, instance: GPU,
     min: 0, max: 4, spot: true, labels: {tier: spot}}
  - {name: cpu, cpus: 16, memory: 64Gi, instance: CPU, count: 2}
storage: {jobs: {nfs: "10.0.0.9:/jobs"}}
cloud:
  {region: REGION, zone: ZONE, image: IMAGE, prepare: [sudo touch /prepared]}
"""

OWN_HOSTS = """\
name: lab
head: {address: 10.0.0.1}
node_groups:
  - {name: a100, device: a100, gpus: 8, cpus: 128, memory: 1Ti, count: 2,
     hosts: [10.0.0.2, 10.0.0.3], labels: {rack: r1}}
  - {name: cpu, cpus: 32, memory: 128Gi, count: 1, hosts: [10.0.0.4]}
network: {interface: eth0}
security: {listen: 10.0.0.1, tls_cert: /etc/octavo/api.pem, tls_key: /etc/octavo/api.key}
"""

WITH_REDIS = f"""\
{OWN_HOSTS}
redis: {{address: "10.0.0.9:6379", password_file: /etc/octavo/redis}}
"""

SLURM = """\
name: lab
node_groups: [{name: h100, device: h100, gpus: 8, cpus: 96, memory: 1Ti, count: 4}]
network: {interface: ib0, rdma: infiniband}
slurm: {partition: gpu, account: llm, time: "2-00:00:00"}
storage: {home: {path: /shared/octavo/home}, jobs: {path: /shared/octavo/jobs}}
"""

TWO_GROUPS = """\
name: mixed
node_groups:
  - {name: h100, device: h100, gpus: 8, cpus: 96, memory: 1Ti, count: 2, partition: gpu}
  - {name: cpu, cpus: 64, memory: 256Gi, count: 2, partition: cpu}
"""


def cloud(**words: str) -> str:
    """``CLOUD`` with one cloud's names of things."""
    text = CLOUD
    for word, name in words.items():
        text = re.sub(rf"\b{word}\b", name, text)
    return text


CLOUD_TARGETS: tuple[Target, ...] = ("aws", "gcp", "azure")
PROFILES: dict[Target, str] = {
    "kuberay": KUBERNETES,
    "rayjob": KUBERNETES,
    "aws": cloud(
        HEAD="m7i.2xlarge",
        GPU="p5.48xlarge",
        CPU="m7i.4xlarge",
        REGION="us-east-1",
        ZONE="us-east-1a",
        IMAGE="ami-0123456789abcdef0",
    ),
    "gcp": cloud(
        HEAD="n2-standard-8",
        GPU="a3-highgpu-8g",
        CPU="n2-standard-16",
        REGION="us-central1",
        ZONE="us-central1-a, project: my-project",
        IMAGE="projects/deeplearning-platform-release/global/images/family/common-cu124",
    ),
    "azure": cloud(
        HEAD="Standard_D8s_v5",
        GPU="Standard_ND96isr_H100_v5",
        CPU="Standard_D16s_v5",
        REGION="eastus",
        ZONE='"1", resource_group: octavo, subscription: 01234567-89ab',
        IMAGE="microsoft-dsvm:ubuntu-hpc:2204:latest",
    ),
    "on-prem": OWN_HOSTS,
    "slurm": SLURM,
    "systemd": WITH_REDIS,
    "container": KUBERNETES,
}


def profile_of(text: str, target: Target) -> ClusterProfile:
    return parse_profile(text, "cluster.yaml", target)[0]


def rendered(target: Target, text: str | None = None) -> list[Rendered]:
    """Of the target's own profile, or of another."""
    return render(profile_of(text or PROFILES[target], target), target, JOB)


def main() -> None:
    for target in TARGETS:
        for path in write(rendered(target), GOLDEN / target):
            print(path)


if __name__ == "__main__":
    main()
