"""Every shipped topology loads and checks; `check` finds what is wrong."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disagg.cli import app
from disagg.config import GIB, Topology, load_topology
from disagg.errors import ConfigError
from disagg.launch import check
from disagg.launch.check import check_topology
from disagg.launch.placement import Host
from disagg.types import Mode, Role

FOLDER = Path(__file__).parents[2] / "cluster" / "topologies"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
BIG_HOST = Host("big", (("CPU", 64.0), ("GPU", 0.0), ("memory", 256.0 * GIB)))


def load(name: str, **changes: Any) -> Topology:
    return load_topology(FOLDER / f"{name}.yaml", {key.replace("__", "."): value for key, value in changes.items()})


@pytest.fixture
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing vLLM takes seconds; its argument names have a test of their own."""
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like SmolLM2-135M."""
    config = {
        "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30, "intermediate_size": 1536,
        "vocab_size": 49152, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    return tmp_path


def test_the_shipped_ones_are_there() -> None:
    assert {"cpu-1p1d", "sim-h100-4p4d", "h100-8gpu", "two-nodes", "sim-64"} <= {file.stem for file in SHIPPED}


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
@pytest.mark.parametrize("mode", [Mode.DISAGG, Mode.COLOCATED])
@pytest.mark.usefixtures("_no_vllm")
def test_each_loads_and_would_run(file: Path, mode: Mode, model: Path) -> None:
    topology = load_topology(file, {"mode": mode.value, "gateway.port": 0})
    assert topology.name == file.stem
    hosts = [BIG_HOST] if topology.ray.cores_per_host is None else None
    if topology.model == "smollm2-135m":
        topology = topology.model_copy(update={"model": str(model)})
    report = check_topology(topology, FOLDER, hosts)
    assert report.problems == ()
    assert len(report.placed) == sum(pool.count for pool in topology.active_pools().values())
    assert set(report.memory) == set(topology.active_pools())


def test_the_example_explains_every_key() -> None:
    """Each key of the schema stands in cpu-1p1d.yaml, as a setting or in a comment."""
    text = (FOLDER / "cpu-1p1d.yaml").read_text()
    keys: set[str] = set()
    for model_class in (Topology, *(field.annotation for field in Topology.model_fields.values())):
        keys |= set(getattr(model_class, "model_fields", {}))
    missing = [key for key in keys if f"{key}:" not in text and key not in ("simulated",)]
    assert missing == []


@pytest.mark.usefixtures("_no_vllm")
def test_two_nodes_puts_each_pool_on_its_own_host() -> None:
    report = check_topology(load("two-nodes"), FOLDER)
    assert {(each.spec.role, each.host) for each in report.placed} == {(Role.PREFILL, "host-0"), (Role.DECODE, "host-1")}


@pytest.mark.usefixtures("_no_vllm")
def test_too_large_for_the_gpu_names_the_degree_that_fits() -> None:
    changes = {"engine__args__tensor_parallel_size": 1, "pools__prefill__gpus": 1, "pools__decode__gpus": 1}
    report = check_topology(load("h100-8gpu", engine__args__quantization=None, **changes), FOLDER)
    assert any("141.1 GB of weights" in problem and "tensor_parallel_size 2 fits" in problem for problem in report.problems)
    assert check_topology(load("h100-8gpu", engine__args__quantization=None), FOLDER).problems == ()


@pytest.mark.usefixtures("_no_vllm")
def test_faults_that_would_show_only_when_it_runs(model: Path) -> None:
    def problems(**changes: Any) -> str:
        return "\n".join(check_topology(load("cpu-1p1d", model=str(model), gateway__port=0, **changes), FOLDER, [BIG_HOST]).problems)

    assert problems() == ""
    assert "less than max_model_len 4,096" in problems(engine__env={"VLLM_CPU_KVCACHE_SPACE": "0.05"})
    assert "kv.outbox_gib" in problems(kv__outbox_gib=200)
    assert "pools.decode.args.block_size: got 64, but prefill has 32" in problems(pools__decode__args={"block_size": 64})
    assert "kv.port: got 7001" in problems(kv__port=7001)
    assert "asks 65 x prefill (1 core)" in problems(pools__prefill__count=65)


@pytest.mark.usefixtures("_no_vllm")
def test_wrong_kv_space_is_typed(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"VLLM_CPU_KVCACHE_SPACE.*a number of GiB"):
        check_topology(load("cpu-1p1d", model=str(model), engine__env={"VLLM_CPU_KVCACHE_SPACE": "lots"}), FOLDER, [BIG_HOST])


def test_port_in_use_names_the_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        report = check_topology(load("sim-h100-4p4d", gateway__port=holder.getsockname()[1]), FOLDER)
    assert any(f"process {os.getpid()}" in problem for problem in report.problems)


@pytest.mark.real
def test_a_wrong_vllm_argument_names_the_nearest(model: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_batched_tokens'"):
        check_topology(load("cpu-1p1d", model=str(model), engine__args__max_num_batched_tokes=1), FOLDER)


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["sim-h100-4p4d", "--set", "gateway.port=0"], 0, "fits"),
    (["sim-h100-4p4d", "--set", "gateway.port=0", "--set", "kv.outbox_gib=9000"], 1, "memory of host"),
    (["sim-h100-4p4d", "--set", "gateway.prot=1"], 2, ""),
    (["sim-h100-4p4d", "--set", "nonsense"], 2, ""),
])  # fmt: skip
def test_the_command_line(arguments: list[str], code: int, words: str) -> None:
    result = CliRunner().invoke(app, ["check", str(FOLDER / f"{arguments[0]}.yaml"), *arguments[1:]])
    assert result.exit_code == code
    assert words in result.stdout
