"""`disagg ab` as a user runs it: simulated workers on a local Ray, both arms up at once or in turn, and an interrupted run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from disagg.ab.result import read_result
from disagg.ab.rows import read_rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

CLASSES = [{"name": "chat", "ttft_ms": 5000, "tpot_ms": 1000}, {"name": "document"}]
TOPOLOGY = {
    "name": "ab-test",
    "model": "simulated",
    "engine": {"kind": "simulated", "simulated": {"speed": 20, "max_model_len": 8192}},
    "pools": {"prefill": {"count": 1, "bind_cores": False}, "decode": {"count": 1, "bind_cores": False}},
    "kv": {"outbox_gib": 0.02, "inbox_gib": 0.02},
    "slo_classes": CLASSES,
}


def command(folder: Path, duration_s: float, *more: str) -> list[str]:
    chat = {"name": "chat", "slo_class": "chat", "arrivals": {"poisson_per_s": 8}, "input_tokens": 64, "output_tokens": 16}
    document = {"name": "document", "slo_class": "document", "arrivals": {"every_s": 1}, "input_tokens": 2000, "output_tokens": 4}
    workload = {"name": "ray", "duration_s": duration_s, "timeout_s": 30, "streams": [chat, document]}
    (folder / "topology.yaml").write_text(yaml.safe_dump(TOPOLOGY))
    (folder / "workload.yaml").write_text(yaml.safe_dump(workload))
    files = [str(folder / "topology.yaml"), "--workload", str(folder / "workload.yaml"), "--out", str(folder / "out"), *more]
    return [sys.executable, "-c", "from disagg.cli import app; app()", "ab", *files]


def left_behind(mark: str) -> list[str]:
    """Command lines of processes that inherited this test's environment."""
    return [line for _, line in marked(mark)]


def marked(mark: str) -> list[tuple[int, str]]:
    """Process and command line of each of them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in environment:
            found.append((int(process.name), (process / "cmdline").read_text().replace("\0", " ")))
    return found


@pytest.mark.parametrize("how", ["--resident", "--no-resident"])
def test_the_whole_command(tmp_path: Path, how: str):
    done = subprocess.run(
        command(tmp_path, 1.5, how, "--rounds", "2", "--chunk", "256", "--set", "kv.carrier=shm"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DISAGG_TEST_MARK": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "out" / "result.json")
    rows = read_rows(tmp_path / "out" / "requests.jsonl")
    for name, arm in result.arms.items():
        assert arm.completed == arm.sent == sum(r.arm == name for r in rows) > 10
    assert {r.prefill_worker == r.decode_worker for r in rows if r.arm == "disagg"} == {False}
    assert {r.prefill_worker == r.decode_worker for r in rows if r.arm == "colocated"} == {True}
    topologies = result.environment["topologies"]
    assert topologies["colocated"]["pools"]["colocated"]["simulated"]["max_num_batched_tokens"] == 256
    assert {t["kv"]["carrier"] for t in topologies.values()} == {"shm"}
    assert result.environment["resident"] is (how == "--resident")
    assert re.search(r"verdict: (disagg|colocated|either)", done.stdout)
    assert "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 100  # paths are not cut
    assert "round 2 of 2" in done.stderr
    assert not left_behind(str(tmp_path))


@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, "--resident"), (signal.SIGTERM, "--no-resident")])
def test_an_interrupted_command_keeps_its_rows_and_leaves_nothing(tmp_path: Path, number: signal.Signals, how: str):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DISAGG_TEST_MARK": str(tmp_path)}
    log = tmp_path / "log"
    rows = tmp_path / "out" / "requests.jsonl"
    with (
        log.open("w") as output,
        subprocess.Popen(command(tmp_path, 60, how, "--chunk", "topology"), stdout=output, stderr=output, env=environment) as process,
    ):
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s and process.poll() is None and not (rows.exists() and len(read_rows(rows)) >= 3):
            time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(120) == 130, log.read_text()
    assert len(read_rows(rows)) >= 3
    assert "--resume goes on from there" in log.read_text()
    assert not (tmp_path / "out" / "result.json").exists()
    assert not left_behind(str(tmp_path))


def test_other_arms_at_two_rates_after_a_chunk_search(tmp_path: Path):
    done = subprocess.run(
        command(tmp_path, 1.0, "--arms", "colocated,adaptive", "--rates", "5,15", "--rounds", "1"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DISAGG_TEST_MARK": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    result = read_result(tmp_path / "out" / "result.json")
    assert [(p.rate_rps, list(p.arms)) for p in result.points] == [(r, ["colocated", "adaptive"]) for r in (5, 15)]
    assert result.chunk_search is not None
    assert len(result.chunk_search.trials) >= 2
    assert result.setups["colocated"].chunk_tokens == {"colocated": result.chunk_search.chosen_tokens}
    searched = read_rows(tmp_path / "out" / "chunk-search" / "requests.jsonl")
    assert len(searched) == sum(t.sent for t in result.chunk_search.trials)
    assert not left_behind(str(tmp_path))


def test_workers_that_die_in_the_middle_of_a_turn_have_it_measured_again(tmp_path: Path):
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DISAGG_TEST_MARK": str(tmp_path)}
    rows, log = tmp_path / "out" / "requests.jsonl", tmp_path / "log"
    arguments = command(tmp_path, 6, "--resident", "--chunk", "topology", "--rounds", "1")
    with log.open("w") as output, subprocess.Popen(arguments, stdout=output, stderr=output, env=environment) as process:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s and process.poll() is None and not (rows.exists() and len(read_rows(rows)) >= 3):
            time.sleep(0.1)
        killed = [os.kill(pid, signal.SIGKILL) for pid, line in marked(str(tmp_path)) if "WorkerActor" in line]
        assert process.wait(240) == 0, log.read_text()
    assert len(killed) == 4  # of both arms: whichever is being measured
    result = read_result(tmp_path / "out" / "result.json")
    first = result.rounds[0].order[0]
    assert [(r.arm, r.round) for r in result.repeated][:1] == [(first, 1)]
    assert re.search(r"-\d+ died$|, .* died$", result.repeated[0].reason)
    assert any(f"round 1, {first}" in w and "was measured again" in w for w in result.warnings)
    assert result.arms[first].completed == result.arms[first].sent == sum(r.arm == first for r in read_rows(rows))
    assert len(read_rows(tmp_path / "out" / "requests-void.jsonl")) == sum(r.requests for r in result.repeated)

    again = [*arguments[:4], "replay", str(rows), "--topology", str(tmp_path / "topology.yaml"), "--out", str(tmp_path / "again")]
    replayed = subprocess.run(again, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert replayed.returncode == 0, replayed.stderr
    arms = read_result(tmp_path / "again" / "result.json").arms
    assert arms["replay"].completed == arms["replay"].sent == result.arms[first].sent
    assert not left_behind(str(tmp_path))


def test_a_gateway_that_dies_costs_its_turn_and_no_more(tmp_path: Path):
    """Ray restarts it on another port; what was under way is measured again."""
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "DISAGG_TEST_MARK": str(tmp_path)}
    log = tmp_path / "log"
    rows = tmp_path / "out" / "requests.jsonl"
    killed: set[int] = set()
    with (
        log.open("w") as output,
        subprocess.Popen(
            command(tmp_path, 4, "--resident", "--chunk", "topology", "--rounds", "3"), stdout=output, stderr=output, env=environment
        ) as process,
    ):
        deadline_s = time.monotonic() + 240
        while time.monotonic() < deadline_s and process.poll() is None:
            gateways = [pid for pid, line in marked(str(tmp_path)) if line.startswith("ray::GatewayActor") and pid not in killed]
            if len(killed) < 2 and gateways and rows.exists() and len(read_rows(rows)) >= 10 + 40 * len(killed):
                os.kill(gateways[0], signal.SIGKILL)
                killed.add(gateways[0])
            time.sleep(0.2)
        assert process.wait(30) == 0, log.read_text()
    assert len(killed) == 2
    result = read_result(tmp_path / "out" / "result.json")
    for arm in result.arms.values():
        assert arm.completed == arm.sent > 30
    assert not left_behind(str(tmp_path))
