"""Imports point down (DESIGN section 5), few modules touch vllm, ray, grpc or torch, and the rest runs without them."""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import disagg

ROOT = Path(disagg.__file__).parent

# First match wins. A new top-level module or package needs a line here.
RANKS: tuple[tuple[str, int], ...] = (
    ("disagg", 0),
    ("disagg.types", 0),
    ("disagg.errors", 0),
    ("disagg.cpu", 0),
    ("disagg.config", 1),
    ("disagg.slo", 1),
    ("disagg.trac*", 1),
    ("disagg.prefix", 1),
    ("disagg.pb*", 1),
    ("disagg.models*", 1),
    ("disagg.perf*", 2),
    ("disagg.kv*", 2),
    ("disagg.policy*", 3),
    ("disagg.engine*", 3),
    ("disagg.sim*", 4),
    ("disagg.serving.worker_rpc*", 5),
    ("disagg.serving.coordinator*", 5),
    ("disagg.serving.pool*", 5),
    ("disagg.serving.start*", 5),
    ("disagg.serving*", 4),
    ("disagg.plan*", 5),
    ("disagg.front*", 6),
    ("disagg.client*", 6),
    ("disagg.launch*", 7),
    ("disagg.ab*", 7),
    ("disagg.cli*", 8),
)

# Third-party package -> the only modules that may import it, even inside a function.
ONLY_IN: dict[str, tuple[str, ...]] = {
    "vllm": ("disagg.engine.vllm_*", "disagg.front.openai*"),
    "ray": ("disagg.launch*",),
    "grpc": ("disagg.pb*", "disagg.kv*", "disagg.serving.worker_rpc*", "disagg.front*", "disagg.client*"),
    "torch": ("disagg.engine.vllm_*", "disagg.kv*", "disagg.models*"),
    "transformers": ("disagg.engine.vllm_*", "disagg.front.openai*", "disagg.models*"),
}
ALIASES = {"grpc_health": "grpc", "grpc_reflection": "grpc", "safetensors": "torch"}

PURE = ("disagg.policy*", "disagg.perf*", "disagg.sim*", "disagg.plan*")
IMPURE = {"asyncio", "torch", "grpc", "ray", "vllm"}


def rank(module: str) -> int | None:
    return next((number for pattern, number in RANKS if fnmatchcase(module, pattern)), None)


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def sources() -> dict[str, str]:
    """Module name -> source text, for every module of the package."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("disagg", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return found


@functools.cache  # a planted fault changes one source of hundreds
def nodes_that_may_import(text: str) -> tuple[ast.AST, ...]:
    return tuple(node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)))


def imported(nodes: Iterable[ast.AST], known: Mapping[str, str]) -> Iterator[str]:
    """Names of the modules that these nodes import, also by `importlib.import_module("literal")`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                yield submodule if submodule in known else node.module or "."
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in ("import_module", "__import__"):
                yield str(node.args[0].value)


def violations(modules: Mapping[str, str]) -> list[str]:
    found = []
    for module, text in modules.items():
        own = rank(module)
        if own is None:
            found.append(f"{module} has no rank in tests/unit/test_layers.py")
            continue
        for target in imported(nodes_that_may_import(text), modules):
            package = target.split(".")[0]
            package = ALIASES.get(package, package)
            if package == "disagg":
                other = rank(target)
                if other is None or other > own:
                    found.append(f"{module} (rank {own}) imports {target} (rank {other})")
            if package in ONLY_IN and not matches(module, ONLY_IN[package]):
                found.append(f"{module} imports {package}, which only {', '.join(ONLY_IN[package])} may")
            if package in IMPURE and matches(module, PURE):
                found.append(f"{module} is pure and imports {package}")
    return found


def import_graph(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> modules of ours that importing it imports: top-level statements, without TYPE_CHECKING blocks."""
    graph: dict[str, set[str]] = {}
    for module, text in modules.items():
        top = [node for node in ast.parse(text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
        graph[module] = {name for name in imported(top, modules) if name in modules and name != module}
    return graph


def test_imports_point_down() -> None:
    assert violations(sources()) == []


def test_no_import_cycle() -> None:
    graphlib.TopologicalSorter(import_graph(sources())).prepare()


@pytest.mark.parametrize(
    ("module", "text", "complaint"),
    [
        ("disagg.types", "from disagg.config import Topology", "imports disagg.config"),
        ("disagg.policy.router", "def pick():\n    import asyncio", "is pure and imports asyncio"),
        ("disagg.policy.router", "from disagg.serving import coordinator", "imports disagg.serving.coordinator (rank 5)"),
        ("disagg.serving.worker", "import grpc_health.v1", "imports grpc"),
        ("disagg.kv.api", "import importlib\nimportlib.import_module('ray.util')", "imports ray"),
        ("disagg.front.door", "if True:\n    from vllm import LLM", "imports vllm"),
        ("disagg.novelty", "", "has no rank"),
    ],
)
def test_checker_finds_a_planted_fault(module: str, text: str, complaint: str) -> None:
    planted = {**sources(), "disagg.serving.coordinator": "", module: text}
    assert any(line.startswith(module) and complaint in line for line in violations(planted))


def test_cycle_finder_finds_a_planted_cycle() -> None:
    planted = {"disagg.kv.a": "from disagg.kv import b", "disagg.kv.b": "from disagg.kv.a import X"}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph(planted)).prepare()


BLOCKED = ("vllm", "torch", "ray", "transformers", "safetensors")
IMPORT_ALL = f"""
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked by this test", name=name)
sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def run_import_all(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_ALL, *modules]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_the_rest_imports_without_vllm_torch_and_ray() -> None:
    """launch/ may need ray at import time, except the doctor, whose job is to say that ray is missing."""
    may_fail = ("disagg.engine.vllm_*", "disagg.front.openai*", "disagg.launch.*", "disagg.kv.tensors.*")
    names = [name for name in sources() if name == "disagg.launch.doctor" or not matches(name, may_fail)]
    assert len(names) > 10
    result = run_import_all(*names)
    assert result.returncode == 0, result.stderr


def test_blocked_packages_are_really_blocked() -> None:
    result = run_import_all("ray")
    assert result.returncode != 0
    assert "ray is blocked" in result.stderr
