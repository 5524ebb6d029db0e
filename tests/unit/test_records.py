"""Deployments found again by name, and processes told apart by more than their pid."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.launch.processes import MARK, ProcessId, descendants, end, find_marked, me, wait_gone
from disagg.launch.records import Record, all_records, read_record, state_dir


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_a_record_is_claimed_once_read_back_and_removed() -> None:
    record = Record.claim("a", "local").update(endpoint="127.0.0.1:1", mark="m")
    assert read_record("a") == record
    assert all_records() == [record]
    assert record.owner == me()
    with pytest.raises(ConfigError, match=r"'a' is up already at 127\.0\.0\.1:1; run `disagg down --name a`"):
        Record.claim("a", "cluster")
    record.remove()
    record.remove()
    assert read_record("a") is None


def test_a_record_is_its_users_only() -> None:
    Record.claim("a", "local")
    file = state_dir() / "deployments" / "a.json"
    assert file.stat().st_mode & 0o077 == 0
    assert list(file.parent.iterdir()) == [file]


def test_garbage_is_no_record() -> None:
    (state_dir() / "deployments").mkdir(parents=True)
    for text in ("", "[]", '{"name": "a"}', '{"owner": 3}'):
        (state_dir() / "deployments" / "a.json").write_text(text)
        assert all_records() == []


def test_a_killed_owner_leaves_an_abandoned_record(sleeper: subprocess.Popen[bytes]) -> None:
    record = Record.claim("a", "local").update(owner=ProcessId.of(sleeper.pid))
    assert not record.is_abandoned
    sleeper.kill()
    sleeper.wait()
    assert record.is_abandoned
    assert Record("b", "cluster", None).is_abandoned is False


def test_a_pid_with_another_start_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    real = ProcessId.of(sleeper.pid)
    assert real is not None
    impostor = ProcessId(real.pid, real.start_ticks - 1)
    impostor.send(signal.SIGKILL)
    assert not impostor.is_alive
    assert real.is_alive
    assert end([impostor]) == ()
    assert real.is_alive


def test_ending_and_waiting(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(sleeper.pid)
    assert process is not None
    assert process in descendants(os.getpid())
    assert wait_gone([process], 0.05) == (process,)
    assert end([process]) == ()
    assert wait_gone([process], 0.05) == ()


def test_ending_one_that_ignores_sigterm() -> None:
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = ProcessId.of(child.pid)
        assert process is not None
        assert end([process], grace_s=0.2) == ()
        assert child.wait() == -signal.SIGKILL


def test_marked_processes_are_found_with_their_children() -> None:
    mark = secrets.token_hex(16)
    code = "import subprocess, sys; subprocess.run(['env', '-i', 'sleep', '60'])"
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: mark}) as child:
        while len(found := find_marked(mark)) < 2 and child.poll() is None:
            pass
        assert child.pid in {process.pid for process in found}
        assert end(found) == ()
    assert find_marked(mark) == ()
