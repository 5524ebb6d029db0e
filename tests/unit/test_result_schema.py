"""docs/result-schema.md says what the model of result.json says: every key, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from disagg.ab.result import Result
from disagg.ab.rows import Row

DOC = Path(__file__).parents[2] / "docs" / "result-schema.md"


def models(found: dict[str, type[BaseModel]], annotation: Any) -> dict[str, type[BaseModel]]:
    """Every model that an annotation leads to, by name."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation.__name__ not in found:
            found |= {c.__name__: c for c in annotation.__mro__ if c is not BaseModel and issubclass(c, BaseModel) and c.model_fields}
            for field in annotation.model_fields.values():
                models(found, field.annotation)
        return found
    for inner in get_args(annotation):
        models(found, inner)
    return found


def documented(text: str) -> dict[str, set[str]]:
    """Keys by section: `## Name` headings, and the first cell of each table row below."""
    sections: dict[str, set[str]] = {}
    name = ""
    for line in text.splitlines():
        if heading := re.match(r"## (\w+)", line):
            name = heading.group(1)
            sections[name] = set()
        elif name and (cell := re.match(r"\| `([a-z0-9_]+)` \|", line)):
            sections[name].add(cell.group(1))
    return sections


def test_every_key_of_the_model_is_documented_and_no_other():
    told = documented(DOC.read_text())
    found = models({}, Result)
    known = {name: {f.alias or key for key, f in model.model_fields.items()} for name, model in found.items()}
    for name, model in found.items():
        known[name] -= {key for parent in model.__mro__[1:] for key in known.get(parent.__name__, ())}  # inherited keys stand once
    known["Row"] = {f.name for f in dataclasses.fields(Row)}
    assert told == known


def test_the_schema_number_is_documented():
    assert f"schema {Result.model_fields['schema_version'].default}" in DOC.read_text().splitlines()[0]
