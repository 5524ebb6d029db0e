"""The command line's frame: one line per error, exit codes, quick help."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from disagg import __version__, cli, errors


def app_that_raises(error: Exception) -> typer.Typer:
    app = typer.Typer(cls=cli._ErrorsAsOneLine)

    @app.command()
    def fail() -> None:
        raise error

    @app.command()
    def other() -> None:
        pass

    return app


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError(key="pools.prefill.count", value=0, expected="at least 1"), 2),
        (errors.ModelError("no such model"), 2),
        (errors.InvalidRequestError(field="max_tokens", value=0, expected="1 or more"), 2),
        (errors.GatewayUnreachableError(address="127.0.0.1:1"), 1),
        (errors.DisaggError("anything [else]"), 1),
    ],
)
def test_our_errors_are_one_line_and_an_exit_code(error: errors.DisaggError, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISAGG_DEBUG", raising=False)
    result = CliRunner().invoke(app_that_raises(error), ["fail"])
    assert result.exit_code == code
    assert result.stderr == f"error: {error.message}\n"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISAGG_DEBUG", "1")
    error = errors.ModelError("no such model")
    assert CliRunner().invoke(app_that_raises(error), ["fail"]).exception is error


def test_foreign_errors_are_not_hidden() -> None:
    error = ZeroDivisionError()
    assert CliRunner().invoke(app_that_raises(error), ["fail"]).exception is error


def test_version() -> None:
    assert CliRunner().invoke(cli.app, ["--version"]).output == f"disagg {__version__}\n"


def test_model_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("DISAGG_CACHE", str(tmp_path))
    runner = CliRunner()
    assert "smollm2-135m" in runner.invoke(cli.app, ["model", "list"]).output
    for command in ("path", "verify"):
        result = runner.invoke(cli.app, ["model", command, "smollm2-135m"])
        assert result.exit_code == 2
        assert "disagg model get smollm2-135m" in result.stderr


def test_help_imports_no_heavy_library() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from disagg.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "print([name for name in ('ray', 'vllm', 'torch', 'transformers', 'grpc') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert result.stdout.strip() == "[]"
