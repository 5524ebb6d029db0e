"""The checked-in generated code is what proto/ says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from disagg.pb import inference_pb2, worker_pb2

REPOSITORY = Path(__file__).resolve().parents[2]


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_proto", REPOSITORY / "scripts" / "gen_proto.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_code_is_current(tmp_path: Path) -> None:
    pytest.importorskip("grpc_tools")
    fresh = generator().generate(tmp_path)
    assert len(fresh) == 9
    for path in fresh:
        checked_in = REPOSITORY / path.relative_to(tmp_path)
        assert checked_in.read_bytes() == path.read_bytes(), f"{checked_in.name} differs from proto/; run `make proto`"


def test_every_proto_has_its_code_checked_in() -> None:
    sources = {path.stem for path in (REPOSITORY / "proto" / "disagg" / "v1").glob("*.proto")}
    assert sources == {path.name.removesuffix("_pb2.py") for path in (REPOSITORY / "disagg" / "pb").glob("*_pb2.py")}


def test_service_names_are_the_public_ones() -> None:
    assert inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name == "disagg.v1.Inference"
    assert worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name == "disagg.v1.Worker"
