"""What is rendered is valid by the schemas of those who read it, and shells and units by their own
checkers. KubeRay's are those of its release 1.7 (Apache-2.0), without descriptions, pod templates,
which Kubernetes' own schema is for, and parts that nothing here renders.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.unit.deploy_profiles import OPEN, TWO_GROUPS, rendered

DATA = Path(__file__).parent / "data"
KUBERNETES_VERSION = "1.34"
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
    "shellcheck"
)


def strict(schema: Any) -> Any:
    """An OpenAPI schema as a JSON Schema that refuses unknown keys."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(value) for key, value in schema.items()}
    properties = found.get("properties")
    if found.get("type") == "object" and isinstance(properties, dict):
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            found.setdefault("additionalProperties", False)
        defaults = {k for k, v in properties.items() if isinstance(v, dict) and "default" in v}
        found["required"] = [k for k in found.get("required", ()) if k not in defaults]
    return found


CRDS = strict(json.loads((DATA / "kuberay-v1.json").read_text()))


def documents(target: Any, text: str | None = None) -> list[dict[str, Any]]:
    return [d for f in rendered(target, text) for d in yaml.safe_load_all(f.text)]


def check_crd(document: dict[str, Any]) -> None:
    jsonschema.validate(document, CRDS | CRDS[document["kind"]])


def cluster_spec(document: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]
    return spec["rayClusterSpec"] if document["kind"] == "RayJob" else spec


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = cluster_spec(document)
    return [g["template"] for g in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


def check_core(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def check_pod(template: dict[str, Any]) -> None:
    pod = {"metadata": {"name": "x", **template.get("metadata", {})}, "spec": template["spec"]}
    check_core({"apiVersion": "v1", "kind": "Pod", **pod})


@pytest.mark.parametrize("target", ["kuberay", "rayjob"])
@pytest.mark.parametrize("text", [None, OPEN], ids=["example", "open"])
def test_kubernetes_objects_are_valid(target: str, text: str | None) -> None:
    kinds = []
    for document in documents(target, text):
        kinds.append(document["kind"])
        if document["apiVersion"] == "ray.io/v1":
            check_crd(document)
            for template in templates(document):
                check_pod(template)
        else:
            check_core(document)
    wanted = {"NetworkPolicy", "PodDisruptionBudget", "PersistentVolumeClaim"}
    wanted.add("RayCluster" if target == "kuberay" else "RayJob")
    assert wanted <= set(kinds)


def test_the_schemas_refuse_a_typo_at_every_depth() -> None:
    document = next(d for d in documents("kuberay") if d["kind"] == "RayCluster")
    for path in (("spec", "rayVersoin"), ("spec", "gcsFaultToleranceOptions", "redisAdress")):
        wrong = copy.deepcopy(document)
        at = wrong
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = "x"
        with pytest.raises(jsonschema.ValidationError):
            check_crd(wrong)
    template = copy.deepcopy(templates(document)[0])
    template["spec"]["containers"][0]["imagePulPolicy"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        check_pod(template)


def launcher_schema() -> Any:
    import ray.autoscaler

    return json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())


@pytest.mark.parametrize("target", ["aws", "gcp", "azure", "on-prem"])
def test_launcher_files_are_what_rays_launcher_takes(target: str) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    (document,) = documents(target)
    jsonschema.validate(document, launcher_schema())
    prepared = prepare_config(copy.deepcopy(document))
    # With its own defaults filled in too, and no command of ours replaced by one of them.
    validate_config(prepared)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        assert prepared[key] == document[key]


def test_rays_schema_refuses_a_typo() -> None:
    (document,) = documents("aws")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "head_start_ray_command": []}, launcher_schema())


def scripts() -> list[tuple[str, str]]:
    """Every text that a shell reads."""
    found = [("slurm", rendered("slurm")[0].text), ("two", rendered("slurm", TWO_GROUPS)[0].text)]
    for target in ("aws", "gcp", "azure", "on-prem"):
        (document,) = documents(target)
        for key in (key for key in document if key.endswith("_commands")):
            for i, command in enumerate(document[key]):
                found.append((f"{target}-{key}-{i}", f"#!/bin/bash\n{command}\n"))
    for text in (None, OPEN):
        for document in documents("kuberay", text):
            if document["kind"] == "RayCluster":
                for i, template in enumerate(templates(document)):
                    (word,) = template["spec"]["containers"][0]["args"]
                    found.append((f"pod-{bool(text)}-{i}", f"#!/bin/bash\n{word}\n"))
    return found


SCRIPTS = scripts()


def test_bash_can_read_every_script() -> None:
    for name, text in SCRIPTS:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), name


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    assert SHELLCHECK is not None
    files = []
    for name, text in SCRIPTS:
        (tmp_path / f"{name}.sh").write_text(text)
        files.append(f"{name}.sh")
    # Variables that the launcher, Kubernetes and the shell itself set; $POD_IP is one word.
    quiet = "--exclude=SC2086,SC2046,SC2088,SC2154"
    done = subprocess.run([SHELLCHECK, quiet, *files], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == ""
    (tmp_path / "slurm.sh").write_text(dict(SCRIPTS)["slurm"])
    done = subprocess.run([SHELLCHECK, "slurm.sh"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == ""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_can_read_every_unit(tmp_path: Path) -> None:
    names = []
    for file in rendered("systemd"):
        # It looks whether the programs are there, which these are.
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", file.text)
        (tmp_path / file.name).write_text(re.sub(r"(?m)^User=.*", "User=root", text))
        names.append(str(tmp_path / file.name))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True
    )
    told = [
        line for line in done.stderr.splitlines() if str(tmp_path) in line or ".service" in line
    ]
    assert told == []


def container_faults(text: str) -> list[str]:
    """Rules as hadolint's, as far as these files can break them."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line for line in joined.splitlines() if line and not line.startswith("#")]
    words = [line.split(None, 1) for line in lines]
    found = []
    bases = [rest for verb, rest in words if verb == "FROM"]
    found += [f"{b}: no pinned tag" for b in bases if ":" not in b or b.endswith(":latest")]
    found += ["ADD, where COPY will do" for verb, _ in words if verb == "ADD"]
    users = [rest for verb, rest in words if verb == "USER"]
    if not users or users[-1].split(":")[0] in ("root", "0"):
        found.append("runs as root")
    for verb, rest in words:
        if verb == "WORKDIR" and not rest.startswith("/"):
            found.append(f"WORKDIR {rest} is not absolute")
        if verb in ("CMD", "ENTRYPOINT") and not rest.startswith("["):
            found.append(f"{verb} goes through a shell, which gets the signals")
        if verb in ("ENV", "ARG") and re.search("(?i)token|password|secret|key", rest):
            found.append(f"{verb} {rest}: a secret stays in the layers")
        if verb == "RUN":
            installs = re.findall(r"pip install[^&]*", rest)
            found += [f"{i}: a cache stays" for i in installs if "--no-cache-dir" not in i]
            found += [f"{i}: not pinned" for i in installs if " -c " not in i]
            if "apt-get install" in rest and "rm -rf /var/lib/apt/lists" not in rest:
                found.append("apt's lists stay")
            if "apt-get install" in rest and "--no-install-recommends" not in rest:
                found.append("apt installs what is only recommended")
            if "sudo " in rest or ("|" in rest and "pipefail" not in joined):
                found.append(f"RUN {rest}")
    return found


@pytest.mark.parametrize("name", ["Containerfile.gpu", "Containerfile.cpu"])
def test_container_files_keep_the_rules(name: str) -> None:
    text = next(f.text for f in rendered("container") if f.name == name)
    assert container_faults(text) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("FROM python", "no pinned tag"),
        ("USER root", "runs as root"),
        ("CMD octavo", "goes through a shell"),
        ("ENV TOKEN=x", "a secret stays"),
        ("RUN pip install x", "not pinned"),
    ],
)
def test_the_rules_find_what_breaks_them(line: str, told: str) -> None:
    text = next(f.text for f in rendered("container") if f.name == "Containerfile.cpu")
    assert any(told in fault for fault in container_faults(f"{text}{line}\n"))
