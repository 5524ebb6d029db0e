"""The table in tests/pitfalls.py names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests import pitfalls

TESTS = Path(pitfalls.__file__).parent
NUMBERS = {1, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 16, 17, 18, 20, 21, 22, 23, 24, 26, 27, 28, 29, 30, 31, 32, 34, 35, 37, 38, 39, 40}
NUMBERS |= {43, 44, 46, 47, 48}


def table() -> dict[int, list[tuple[str, str]]]:
    """(file, test) pairs by the fault's number."""
    parts = re.split(r"(?m)^ ?(\d+) \| ", pitfalls.__doc__ or "")
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return {int(number): re.findall(r"([\w/]+\.py)::(\w+)", text) for number, text in pairs}


def test_every_kind_of_fault_has_a_test() -> None:
    found = table()
    assert found.keys() == NUMBERS
    assert all(found.values()), [number for number, tests in found.items() if not tests]


def test_every_named_test_exists() -> None:
    named = {pair for pairs in table().values() for pair in pairs}
    missing = set()
    for file in {file for file, _ in named}:
        tree = ast.parse((TESTS / file).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        missing |= {f"{file}::{test}" for where, test in named if where == file and test not in defined}
    assert not missing
