"""What is rendered for Kubernetes keeps the rules that no schema has: it starts, and drains."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.cluster_profile import Target
from deploy.kuberay import cluster_objects, job_objects
from orchestrator.spec.errors import SpecError
from tests.unit.deploy_profiles import JOB, KUBERNETES, OPEN, profile_of
from tests.unit.kubernetes_rules import cluster_spec, faults, templates

KUBERNETES_TARGETS: tuple[Target, ...] = ("kuberay", "rayjob")


def documents(text: str, target: Target = "kuberay") -> list[dict[str, Any]]:
    profile = profile_of(text, target)
    return job_objects(profile, JOB) if target == "rayjob" else cluster_objects(profile)


def problems(text: str, target: Target = "kuberay") -> str:
    with pytest.raises(SpecError) as caught:
        profile_of(text, target)
    return str(caught.value)


def with_group(more: str) -> str:
    return KUBERNETES.replace("min: 2\n    max: 16", f"min: 2\n    max: 16\n    {more}").replace(
        "    tolerations: [{key: nvidia.com/gpu, effect: NoSchedule}]\n", ""
    )


@pytest.mark.parametrize("target", KUBERNETES_TARGETS)
@pytest.mark.parametrize("text", [KUBERNETES, OPEN], ids=["example", "open"])
def test_what_is_rendered_keeps_the_rules_beyond_the_schemas(target: Target, text: str) -> None:
    assert faults(documents(text, target)) == []


@pytest.mark.parametrize(
    ("sizes", "least"), [("min: 2", {"lab-h100": 1}), ("min: 1", {}), ("min: 0", {})]
)
def test_a_drain_may_always_take_a_node_and_no_more_than_one_of_the_fewest(
    sizes: str, least: dict[str, int]
) -> None:
    made = documents(KUBERNETES.replace("min: 2", sizes))
    budgets = [d for d in made if d["kind"] == "PodDisruptionBudget"]
    assert {d["metadata"]["name"]: d["spec"]["minAvailable"] for d in budgets} == least
    # One that never starts holds no node.
    assert all(d["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow" for d in budgets)
    assert faults(made) == []


def test_the_scaler_of_the_nodes_leaves_pods_that_train_where_they_are() -> None:
    spec = next(d for d in documents(KUBERNETES) if d["kind"] == "RayCluster")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        noted = group["template"]["metadata"]["annotations"]
        assert noted["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert noted["karpenter.sh/do-not-disrupt"] == "true"


KEYS = st.none() | st.sampled_from(["dedicated", "nvidia.com/gpu", "a,b", "-x"])
VALUES = st.none() | st.sampled_from(["training", "a:b", "@", "x" * 64])
OPERATORS = st.none() | st.sampled_from(["Exists", "Equal"])


@settings(max_examples=50, deadline=None)
@given(key=KEYS, value=VALUES, operator=OPERATORS)
def test_a_toleration_is_what_kubernetes_takes_or_is_refused(
    key: str | None, value: str | None, operator: str | None
) -> None:
    given_words = {"key": key, "value": value, "operator": operator}
    words = ", ".join(f'{k}: "{v}"' for k, v in given_words.items() if v is not None)
    text = with_group(f"tolerations: [{{{words}}}]")
    try:
        made = documents(text)
    except SpecError as error:
        assert "tolerations[0]" in str(error)
    else:
        assert faults(made) == []


def test_a_value_makes_a_toleration_equal_as_everywhere_in_kubernetes() -> None:
    made = documents(with_group("tolerations: [{key: dedicated, value: training}, {key: gpu}]"))
    spec = next(d for d in made if d["kind"] == "RayCluster")["spec"]
    assert spec["workerGroupSpecs"][0]["template"]["spec"]["tolerations"] == [
        {"key": "dedicated", "operator": "Equal", "value": "training"},
        {"key": "gpu", "operator": "Exists"},
    ]


@pytest.mark.parametrize(("target", "longest"), [("kuberay", 53), ("rayjob", 38)])
def test_a_name_that_the_operator_would_refuse_is_refused_here(
    target: Target, longest: int
) -> None:
    fits = KUBERNETES.replace("name: lab\n", f"name: {'a' * longest}\n")
    assert faults(documents(fits, target)) == []
    told = problems(fits.replace("name: a", "name: aa"), target)
    assert f"is too long for {target}" in told
    assert f"{longest} characters" in told


def test_each_job_is_a_rayjob_of_its_own_and_the_same_text_the_same() -> None:
    profile = profile_of(KUBERNETES, "rayjob")

    def made(job: str) -> tuple[str, str, str]:
        ray_job = job_objects(profile, job)[-1]
        command = templates(ray_job)[0][0]["spec"]["containers"][0]["args"][0]
        home = re.search(r"deploy.serve (\S+)", command)
        assert home is not None
        assert f"deploy.job_runner {home[1]} " in ray_job["spec"]["entrypoint"]
        namespace = cluster_spec(ray_job)["gcsFaultToleranceOptions"]["externalStorageNamespace"]
        return ray_job["metadata"]["name"], home[1], namespace

    first, second = made(JOB), made(JOB + "training: {steps: 7}\n")
    assert made(JOB) == first
    # Neither name, nor the controller's home, nor Ray's tables are another job's.
    assert not {*first} & {*second}
    assert first[1].startswith("/octavo/home/lab-")


def test_no_capability_is_given_that_an_ordinary_user_would_not_have_anyway() -> None:
    for document in documents(KUBERNETES)[-1:]:
        for template, _ in templates(document):
            (container,) = template["spec"]["containers"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_heads_shared_memory_leaves_it_the_most_of_its_own() -> None:
    for memory, size in (("32Gi", "4096Mi"), ("8Gi", "2048Mi")):
        made = documents(KUBERNETES.replace("memory: 32Gi", f"memory: {memory}"))[-1]
        volumes = templates(made)[0][0]["spec"]["volumes"]
        assert {"medium": "Memory", "sizeLimit": size} in [v.get("emptyDir") for v in volumes]
    assert "head.memory" in problems(KUBERNETES.replace("memory: 32Gi", "memory: 2Gi"))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("max: 16", "max: 16\n    labels: {rack: 'a,b=c'}", "labels.rack"),
        ("max: 16", "max: 16\n    labels: {'ray.io/x': a}", "labels"),
        ("nvidia.com/gpu.product: NVIDIA", "'nvidia.com/gpu:product': NVIDIA", "node_selector"),
        ("max: 16", "max: 16\n    gpu_resource: gpu", "gpu_resource"),
        ("rdma/hca_shared_devices_a", "rdma/hca:a", "rdma_resource"),
        (", rdma_resource: rdma/hca_shared_devices_a", "", "rdma_resource: is missing"),
        ("rdma: infiniband", "rdma: none", "rdma_resource"),
        ('gpu: "registry.example.com/octavo:0.1.0-gpu", ', "", "image.gpu: is missing"),
        ("name: h100\n", "name: headgroup\n", "is what Ray calls the head's"),
        ("security:", "kubernetes: {namespace: a.b}\nsecurity:", "kubernetes.namespace"),
        ("home: {size: 20Gi}", "home: {path: /octavo/jobs}", "storage.jobs.path"),
        ("jobs: {claim: octavo-jobs}", "jobs: {claim: Octavo_Jobs}", "name of a Kubernetes object"),
        (
            "jobs: {claim: octavo-jobs}",
            "jobs: {storage_class: 'a b'}",
            "storage.jobs.storage_class",
        ),
        ("security: {", "security: {allow_namespaces: [research], ", "lets nobody in"),
        ("security: {", "security: {plain_http: true, tls_secret: x, ", "contradicts the TLS"),
        ("home: {size: 20Gi}", "home: {path: '/a:b'}", "storage.home.path"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused_with_its_key(
    old: str, new: str, told: str
) -> None:
    assert old in KUBERNETES
    assert told in problems(KUBERNETES.replace(old, new))
