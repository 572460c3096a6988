"""`octavo plan --cluster`: what a plan takes from a profile, and where a job doesn't fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.planned import cluster_of
from deploy.profile_file import parse_profile
from orchestrator.planning.cluster import (
    Cluster,
    GroupError,
    check_cluster,
    check_group,
    group_of,
    with_cluster,
)
from orchestrator.planning.estimate import USABLE_HOST, Hardware, estimate
from orchestrator.spec.errors import Source, dotted
from tests.unit.plan_jobs import job, values
from tests.unit.test_cli import call
from tests.unit.test_plan_cli import written

H100 = {"name": "h100", "device": "h100", "gpus": 8, "cpus": 96, "memory": "1024Gi", "count": 4}
B200 = {**H100, "name": "b200", "device": "b200", "count": 1}
CPUS = {"name": "cpus", "cpus": 16, "memory": "64Gi", "count": 3}
PRICES = {"currency": "EUR", "node_hour": {"h100": 24.0}}


def profile(*groups: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    return {"name": "lab", "node_groups": list(groups or (H100,)), "prices": PRICES, **given}


def cluster(*groups: Mapping[str, Any], **given: Any) -> Cluster:
    told = profile(*groups, **given)
    if not any(group["name"] == "h100" for group in told["node_groups"]):
        del told["prices"]
    return cluster_of(parse_profile(yaml.safe_dump(told), "cluster.yaml", "container")[0])


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(profile(network={"rdma": "roce"})))
    return str(path)


class TestGroups:
    def test_the_only_one_with_such_slots_is_meant(self) -> None:
        lab = cluster(H100, CPUS)
        assert group_of(lab, {"gpus_per_node": 8, "num_nodes": 2}).name == "h100"
        assert group_of(lab, {"slots_per_node": 4}).name == "cpus"
        assert group_of(cluster(H100), {}).name == "h100"

    def test_of_several_the_only_one_that_has_the_nodes(self) -> None:
        assert group_of(cluster(H100, B200), {"gpus_per_node": 8, "num_nodes": 2}).name == "h100"

    def test_else_it_is_to_be_named_and_a_typo_is_told(self) -> None:
        lab = cluster(H100, B200)
        with pytest.raises(GroupError, match="several groups for such a job: h100, b200"):
            group_of(lab, {"gpus_per_node": 8})
        assert group_of(lab, {"gpus_per_node": 8}, "b200").name == "b200"
        with pytest.raises(GroupError, match=r"no group 'h10': did you mean 'h100'\? there are"):
            group_of(lab, {}, "h10")


class TestFilling:
    def test_what_the_file_leaves_out_is_the_clusters(self) -> None:
        lab = cluster(network={"rdma": "infiniband"})
        source, given = with_cluster(Source("job.yaml", {"name": "j"}, {}), lab, lab.groups[0])
        assert (source.data["num_nodes"], source.data["gpus_per_node"]) == (4, 8)
        assert source.data["resources"] == {"device": "h100", "network": "ib400"}
        assert given == ["gpus_per_node", "num_nodes", "resources.network"]

    def test_what_the_file_says_stays_but_for_the_device(self) -> None:
        lab = cluster(network={"rdma": "none"})
        resources = {"device": "b200", "network": "eth25", "spares": 1}
        said = {"num_nodes": 2, "gpus_per_node": 4, "resources": resources}
        source, given = with_cluster(Source("job.yaml", said, {}), lab, lab.groups[0])
        assert source.data == {**said, "resources": {**resources, "device": "h100"}}
        assert given == [] and resources["device"] == "b200"

    def test_ranks_on_cpu_are_on_cpu_whatever_else_the_nodes_have(self) -> None:
        lab = cluster()
        source, _ = with_cluster(Source("j", {"slots_per_node": 4}, {}), lab, lab.groups[0])
        assert "gpus_per_node" not in source.data and source.data["resources"]["device"] == "cpu"


class TestFit:
    @pytest.mark.parametrize(
        ("given", "key", "says"),
        [
            ({"num_nodes": 8}, "num_nodes", "more than lab can have: 4 nodes with 8 GPUs"),
            ({"gpus_per_node": 16}, "gpus_per_node", "more than any node of lab has: 8 GPUs"),
            ({"resources": {"spares": 3}}, "resources.spares", "2 nodes train, and lab has 4"),
            ({"resources": {"device": "b200"}}, "resources.device", "what group h100 of lab has"),
        ],
    )
    def test_what_a_group_lacks_is_a_finding_with_its_number(
        self, given: dict[str, Any], key: str, says: str
    ) -> None:
        lab = cluster()
        [found] = check_group(lab, lab.groups[0], job(**given), values(**given))
        assert dotted(found.path) == key and says in found.message and found.remedy

    def test_what_fits_has_none(self) -> None:
        lab = cluster()
        for given in ({}, {"resources": {"spares": 2}}, {"num_nodes": 4}):
            assert not list(check_group(lab, lab.groups[0], job(**given), values(**given)))

    def test_fewer_nodes_will_do_for_a_job_that_goes_on_with_fewer(self) -> None:
        spec = job(num_nodes=8, training={"train_batch_size": 64})
        fewer = spec.resources.model_copy(update={"min_nodes": 4})
        assert list(check_cluster(cluster(), spec))
        assert not list(check_cluster(cluster(), spec.model_copy(update={"resources": fewer})))

    def test_all_groups_with_such_nodes_count_together(self) -> None:
        assert not list(check_cluster(cluster(H100, B200), job(num_nodes=4)))
        told = [f.message for f in check_cluster(cluster(B200, CPUS), job(num_nodes=2))]
        assert told == ["is more than lab can have: 1 node with 8 GPUs"]


class TestCommand:
    def test_device_network_memory_and_price_are_the_clusters(
        self, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = written(tmp_path)
        assert call(["plan", path, "--cluster", file, "-o", "json"]) == 0
        told = json.loads(capsys.readouterr().out)
        found = told["estimate"]
        assert (found["device"]["name"], found["network"]["name"]) == ("h100", "roce400")
        assert found["memory"]["host_room"] == int(USABLE_HOST * (1024 << 30))
        assert found["price_a_device_hour"] == 3.0 and told["cluster"]["currency"] == "EUR"
        assert told["cluster"]["misfits"] == []
        assert call(["plan", path, "--cluster", file]) == 0
        text = capsys.readouterr().out
        assert "# cluster lab, group h100: up to 4 nodes of 8 × h100" in text
        assert yaml.safe_load(text)["resources"]["network"] == "roce400"

    def test_on_cpu_ranks_count_in_the_nodes_memory_beside_their_snapshots(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = {"gpus_per_node": None, "slots_per_node": 8, "model": {"vocab_size": 32_000}}
        path = written(tmp_path, **given)
        spec = job(**given)
        found = estimate(spec, Hardware.of(spec))
        assert found.host_bytes == found.memory.host + 8 * found.device_bytes
        for memory, fits in ((found.host_bytes / 0.75, True), (found.host_bytes / 0.85, False)):
            nodes = {**CPUS, "memory": f"{int(memory) >> 20}Mi", "shared_memory": "1Mi"}
            small = tmp_path / "small.yaml"
            small.write_text(yaml.safe_dump({"name": "lab", "node_groups": [nodes]}))
            assert call(["plan", path, "--cluster", str(small)]) == 0
            text = capsys.readouterr().out
            assert ("# fits\n" in text) == fits
            assert ("DOES NOT FIT the nodes' memory" in text) != fits

    def test_where_the_job_does_not_fit_is_told(
        self, tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = written(tmp_path, num_nodes=8)
        assert call(["plan", path, "--cluster", file]) == 0
        text = capsys.readouterr().out
        assert "# DOES NOT FIT lab: num_nodes is more than lab can have: 4 nodes" in text

    def test_auto_chooses_for_the_clusters_memory(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        small = tmp_path / "small.yaml"
        small.write_text(yaml.safe_dump(profile({**H100, "memory": "64Gi"})))
        path = written(tmp_path, parallelism="auto", model={"preset": "llama-1b"})
        assert call(["plan", path, "--cluster", str(small), "-o", "json"]) == 0
        told = json.loads(capsys.readouterr().out)
        best = told["auto"]["best"][0]["degrees"]
        at = told["spec"]["parallelism"]
        assert (best["tensor"], best["pipeline"]) == (at["tensor"], at["pipeline"])

    @pytest.mark.parametrize(
        ("more", "says"),
        [
            (["--group", "h10"], "did you mean 'h100'?"),
            (["--price", "inf"], "--price: inf is no price"),
            (["--price", "nan"], "--price: nan is no price"),
            (["--price", "1e308"], "from 0 to 1,000,000"),
            (["--price", "-1"], "--price: -1 is no price"),
        ],
    )
    def test_what_is_typed_wrongly_is_a_usage_error(
        self,
        more: list[str],
        says: str,
        tmp_path: Path,
        file: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert call(["plan", written(tmp_path), "--cluster", file, *more]) == 2
        assert says in capsys.readouterr().err

    def test_a_device_that_nothing_is_known_of_is_to_be_named(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = tmp_path / "other.yaml"
        other.write_text(yaml.safe_dump(profile({**H100, "device": "gb200"})))
        path = written(tmp_path)
        assert call(["plan", path, "--cluster", str(other)]) == 2
        assert "no speed is known of the gb200" in capsys.readouterr().err
        assert call(["plan", path, "--cluster", str(other), "--device", "b200"]) == 0
        assert "NVIDIA B200" in capsys.readouterr().out

    def test_a_wrong_profile_is_refused_as_deploy_would(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        wrong = tmp_path / "wrong.yaml"
        wrong.write_text(yaml.safe_dump({"name": "lab", "node_group": []}))
        assert call(["plan", written(tmp_path), "--cluster", str(wrong)]) == 2
        assert "node_groups" in capsys.readouterr().err


def test_a_price_is_of_what_one_rank_has() -> None:
    [h100, cpus] = cluster(H100, CPUS).groups
    assert h100.device_price == 3.0 and cpus.device_price is None
    assert replace(cpus, price=8.0).device_price == 0.5
