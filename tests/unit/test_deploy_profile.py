"""A cluster profile that is wrong is refused with all that is wrong in it, each with its place."""

from __future__ import annotations

import re

import pytest

from deploy.cluster_profile import Target
from deploy.profile_file import parse_profile
from deploy.profile_values import slurm_seconds
from orchestrator.spec.errors import SpecError
from tests.unit.deploy_profiles import KUBERNETES, OWN_HOSTS, PROFILES, WITH_REDIS

GROUP = "{name: a, device: h100, gpus: 8, cpus: 96, memory: 1Ti, count: 2}"


def problems(text: str, target: Target | None = None) -> list[str]:
    with pytest.raises(SpecError) as caught:
        parse_profile(text, "cluster.yaml", target)
    return [str(problem) for problem in caught.value.problems]


def test_typos_at_any_depth_come_with_the_right_name_and_their_line() -> None:
    text = """\
name: lab
target: kubray
netwrk: {interface: eth0}
node_groups:
  - name: a
    devise: h100
    memory: 64Gi
    cpus: 8
    count: 1
    tolerations: [{kee: gpu}]
"""
    told = "\n".join(problems(text))
    assert "cluster.yaml:2: target: 'kubray'" in told
    assert "did you mean 'kuberay'?" in told
    assert "cluster.yaml:3: netwrk" in told
    assert "did you mean 'network'?" in told
    assert "cluster.yaml:6: node_groups[0].devise" in told
    assert "did you mean 'device'?" in told
    assert "node_groups[0].tolerations[0].kee" in told
    assert "did you mean 'key'?" in told


@pytest.mark.parametrize(
    ("group", "told"),
    [
        ("{name: a, cpus: 8, memory: 64Gi}", "count: is missing"),
        ("{name: a, cpus: 8, memory: 64Gi, count: 1, max: 2}", "count: 1: is given with min"),
        ("{name: a, cpus: 8, memory: 64Gi, min: 3, max: 2}", "min: 3: is more than max 2"),
        ("{name: a, cpus: 8, memory: 64GB, count: 1}", "is no amount of memory"),
        ("{name: a, cpus: 8, memory: 16Gi, count: 1}", "is all of the node's memory"),
        ("{name: a, cpus: 8, memory: 64Gi, count: 1, gpus: 8}", "device: does not go with gpus"),
        ("{name: a, cpus: 8, memory: 64Gi, count: 1, device: h100}", "gpus: does not go with"),
        ("{name: a, cpus: true, memory: 64Gi, count: 1}", "is a yes-or-no value"),
        ("{name: A, cpus: 8, memory: 64Gi, count: 1}", "doesn't match"),
        (f"{GROUP}, {GROUP}", "is another group's name too"),
        ("", "is empty"),
    ],
)
def test_a_group_that_contradicts_itself_is_refused(group: str, told: str) -> None:
    text = f"name: lab\ntarget: slurm\nnode_groups: [{group}]\n"
    assert any(told in problem for problem in problems(text)), problems(text)


def test_what_a_target_needs_is_said_before_anything_is_rendered() -> None:
    bare = f"name: lab\nnode_groups: [{GROUP}]\n"
    assert any("target: is missing" in p for p in problems(bare))
    assert any("image.gpu: is missing" in p for p in problems(bare, "kuberay"))
    assert any("cloud.region: is missing" in p for p in problems(bare, "aws"))
    assert any("cloud.project: is missing" in p for p in problems(bare, "gcp"))
    assert any("cloud.resource_group: is missing" in p for p in problems(bare, "azure"))
    assert any("node_groups[0].instance: is missing" in p for p in problems(bare, "aws"))
    told = problems(bare, "on-prem")
    assert any("head.address: is missing" in p for p in told)
    assert any("names 0 hosts, and the group has 2" in p for p in told)
    assert any("one size" in p for p in problems(KUBERNETES, "slurm"))
    none = bare.replace("count: 2", "count: 0")
    assert any("count: 0: is no allocation of Slurm" in p for p in problems(none, "slurm"))
    assert any("redis: {" in p and "is not used by" in p for p in problems(WITH_REDIS, "on-prem"))
    twice = OWN_HOSTS.replace("10.0.0.4", "10.0.0.3")
    assert any("is named twice" in p for p in problems(twice, "systemd"))


def test_a_price_of_no_group_is_a_typo() -> None:
    wrong = KUBERNETES.replace("node_hour: {h100:", "node_hour: {h10:")
    assert any("there is no such group; there are h100" in p for p in problems(wrong))


@pytest.mark.parametrize("target", ["kuberay", "slurm", "on-prem", "aws"])
def test_beyond_the_loopback_there_is_tls_or_a_word(target: Target) -> None:
    lines = [line for line in PROFILES[target].splitlines() if not line.startswith("security:")]
    opened = "\n".join([*lines, "security: {listen: 0.0.0.0}"])
    told = "is beyond the loopback without TLS"
    assert any(told in problem for problem in problems(opened, target))
    parse_profile(opened.replace("0.0.0.0}", "0.0.0.0, plain_http: true}"), "c.yaml", target)


def test_a_secret_that_is_written_where_its_name_belongs_is_not_repeated() -> None:
    text = f"name: lab\nnode_groups: [{GROUP}]\nsecurity: {{wandb_secret: SECRET_abc123}}\n"
    told = "\n".join(problems(text, "kuberay"))
    assert "security.wandb_secret: ***: is no name of a Kubernetes secret" in told
    assert "abc123" not in told


@pytest.mark.parametrize("value", ["%h", "x; rm -rf /", "$(id)", "a b", "a'b", "a\\nb"])
def test_nothing_that_a_shell_would_read_otherwise_gets_into_a_profile(value: str) -> None:
    for key, told in (("interface", "may have letters"), ("rdma_resource", "is no key")):
        text = f'name: lab\nnode_groups: [{GROUP}]\nnetwork: {{{key}: "{value}"}}\n'
        assert any(told in p for p in problems(text, "slurm"))


@pytest.mark.parametrize(
    "address",
    [
        "rediss://user:hunter2@10.0.0.9:6379",
        "redis://:hunter2@10.0.0.9:6379",
        "user:hunter2@10.0.0.9:6379",
        "10.0.0.9:6379?password=hunter2",
    ],
)
@pytest.mark.parametrize("beside", ["", "netwrk: {}\n"])
def test_a_password_in_the_address_of_the_redis_is_refused_and_not_repeated(
    address: str, beside: str
) -> None:
    targets: tuple[Target, ...] = ("systemd", "kuberay")
    for target in targets:
        written = re.sub(r'address: "[^"]+"', f'address: "{address}"', PROFILES[target])
        told = "\n".join(problems(beside + written, target))
        assert "redis.address: ***: " in told
        assert "hunter2" not in told


@pytest.mark.parametrize(
    ("line", "secret"),
    [
        ("sudo mount -t cifs //a.example.com/s /octavo/jobs -o user=a,password=hunter2", True),
        ("curl https://me:hunter2@example.com/setup.sh", True),
        ("export HF_TOKEN=hunter2", True),
        ("sudo mount -t cifs //a.example.com/s /octavo/jobs -o credentials=/etc/cifs", False),
        ("export HF_TOKEN=$(cat /etc/token)", False),
        ("docker login --password-stdin < /etc/password", False),
        ("gcloud secrets versions access latest --secret=mine > /etc/token", False),
        ("export AWS_SECRET_ACCESS_KEY=hunter2", True),
    ],
)
def test_a_secret_in_a_command_is_refused_and_a_file_that_has_it_is_not(
    line: str, secret: bool
) -> None:
    text = PROFILES["aws"].replace("sudo touch /prepared", f"'{line}'")
    if not secret:
        parse_profile(text, "cluster.yaml", "aws")
        return
    told = "\n".join(problems(text, "aws"))
    assert "cloud.prepare[0]: ***: has a secret in it" in told
    assert "hunter2" not in told


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("security: {ray_token_file: token}", "must be a path from / or ~/"),
        ("prices: {currency: usd}", "is no currency, which is three capitals as USD"),
        ("slurm: {time: forever}", "is no time of Slurm, which is as 90 (minutes)"),
        ('slurm: {time: "4:00"}', "is no longer than notice_s, 300 s"),
    ],
)
def test_a_value_that_is_wrong_comes_with_what_such_a_value_looks_like(
    section: str, told: str
) -> None:
    found = "\n".join(problems(f"name: lab\nnode_groups: [{GROUP}]\n{section}\n", "slurm"))
    assert told in found
    assert "lower-case" not in found


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("5:30", 330), ("12:00:00", 43200), ("2-12", 216000), ("1-00:00:01", 86401)],
)
def test_slurms_ways_to_write_a_time_are_read(time: str, seconds: int) -> None:
    assert slurm_seconds(time) == seconds


def test_an_image_without_a_tag_of_its_own_is_refused() -> None:
    for image in ("octavo", "octavo:latest", "registry.example.com:5000/octavo"):
        text = f'name: lab\nnode_groups: [{GROUP}]\nimage: {{gpu: "{image}"}}\n'
        assert any("needs a tag of its own" in p for p in problems(text, "kuberay")), image


@pytest.mark.parametrize("target", sorted(PROFILES))
def test_the_tests_own_profiles_are_right(target: Target) -> None:
    assert parse_profile(PROFILES[target], "cluster.yaml", target)[1] == target
