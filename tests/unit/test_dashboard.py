"""The Grafana dashboard asks only for metrics that the gateway has, with labels that they have."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from disagg.engine.simulated_settings import simulated_model_info
from disagg.front.metrics import Metrics
from disagg.serving.coordinator import Coordinator
from disagg.serving.pool import Pool
from disagg.types import Role
from tests.builders import ROOT, sim_topology

DASHBOARD = json.loads((Path(ROOT) / "cluster/grafana/disagg.json").read_text())


def known() -> dict[str, set[str]]:
    """Sample name -> label names, also of families that have no sample yet."""
    topology = sim_topology()
    model = simulated_model_info(topology.simulated(Role.PREFILL), topology.model)
    pool = Pool(topology, model)
    metrics = Metrics(topology, pool, Coordinator(pool, topology, model))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition()[1].decode()):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        for end in ends:
            labels = {label for sample in family.samples for label in sample.labels}
            found[family.name + end] = labels | {"slo_class", "role", "worker", "error", "phase", "outcome", "le"}
    return found


def expressions() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_name_exists() -> None:
    names = known()
    asked = {name for expr in expressions() for name in re.findall(r"disagg_\w+", expr)}
    assert asked - names.keys() == set()
    assert len(asked) > 25


def test_every_metric_is_shown() -> None:
    shown = " ".join(expressions())
    families = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in known()}
    assert {name for name in families if name not in shown} == {"disagg_gateway_info"}


def test_it_can_be_imported() -> None:
    assert {"title", "uid", "panels", "schemaVersion", "templating"} <= DASHBOARD.keys()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids)) > 10
    for panel in DASHBOARD["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["fieldConfig"]["defaults"]["unit"]
