"""The files for `ray up` and KubeRay are what those tools accept, and fit the topologies that they are for."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.config import load_topology
from disagg.launch.placement import Host, place

CLUSTER = Path(__file__).parents[2] / "cluster"
RAY_FILES = sorted((CLUSTER / "ray").glob("*.yaml"))
TWO_NODES = load_topology(CLUSTER / "topologies" / "two-nodes.yaml")


@pytest.mark.parametrize("file", RAY_FILES, ids=lambda file: file.stem)
def test_ray_accepts_it(file: Path) -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load(file.read_text())
    util.validate_config(util.prepare_config(config))


def test_ray_would_refuse_a_wrong_one() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load(RAY_FILES[0].read_text()) | {"setup_comands": []}
    with pytest.raises(Exception, match="setup_comands"):
        util.validate_config(util.prepare_config(config))


@pytest.mark.parametrize("file", RAY_FILES, ids=lambda file: file.stem)
def test_its_hosts_offer_what_two_nodes_asks_for(file: Path) -> None:
    config = yaml.safe_load(file.read_text())
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    offered = [json.loads(found) for command in commands for found in re.findall(r"--resources='(.*?)'", command)]
    hosts = [Host(f"host-{i}", tuple({"CPU": 96.0, "GPU": 8.0, **each}.items())) for i, each in enumerate(offered)]
    assert len({placed.host for placed in place(TWO_NODES, hosts)}) == 2


def test_kuberay_pods_fit_two_nodes_and_our_ray() -> None:
    cluster = yaml.safe_load((CLUSTER / "kuberay" / "raycluster.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["rayVersion"] == importlib.metadata.version("ray")
    assert f"ray:{spec['rayVersion']}-" in (CLUSTER / "kuberay" / "Dockerfile").read_text()
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    hosts = [_pod_as_host(index, group) for index, group in enumerate(groups)]
    assert len({placed.host for placed in place(TWO_NODES, hosts)}) == 2
    ports = {port["name"]: port["containerPort"] for port in groups[0]["template"]["spec"]["containers"][0]["ports"]}
    assert ports["disagg"] == TWO_NODES.gateway.port


def _pod_as_host(index: int, group: dict[str, Any]) -> Host:
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    # The operator passes the parameter through a shell, hence the second layer of quotes.
    named = json.loads(json.loads(group["rayStartParams"]["resources"]))
    return Host(f"pod-{index}", tuple({"CPU": float(limits["cpu"]), "GPU": float(limits["nvidia.com/gpu"]), **named}.items()))


@pytest.mark.parametrize("file", [*RAY_FILES, CLUSTER / "README.md", CLUSTER / "kuberay" / "raycluster.yaml"], ids=lambda file: file.name)
def test_files_that_are_named_exist(file: Path) -> None:
    for name in re.findall(r"cluster/[\w./-]+\.(?:yaml|md)", file.read_text()):
        assert (CLUSTER.parent / name).is_file(), name
