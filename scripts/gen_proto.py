"""Generate disagg/pb from proto/disagg/v1. `python scripts/gen_proto.py [OUT]` writes below OUT (default: this repository).

The generated code is checked in, and tests/unit/test_pb.py compares it with a fresh run; grpcio-tools is pinned in pyproject.toml
because its output changes between releases.
"""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SOURCES = REPOSITORY / "proto" / "disagg" / "v1"


def generate(out: Path) -> list[Path]:
    """Write disagg/pb/*_pb2.py, *.pyi and *_pb2_grpc.py below `out`, and return the files written."""
    from grpc_tools import protoc

    well_known = resources.files("grpc_tools") / "_proto"
    names = sorted(file.name for file in SOURCES.glob("*.proto"))
    # The virtual folder disagg/pb makes the generated modules import each other as `from disagg.pb import ...`.
    arguments = [f"-Idisagg/pb={SOURCES}", f"-I{well_known}", f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    status = protoc.main(["protoc", *arguments, *(f"disagg/pb/{name}" for name in names)])
    if status != 0:
        raise SystemExit(f"protoc failed with status {status}")
    endings = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")
    return [out / "disagg" / "pb" / f"{Path(name).stem}{ending}" for name in names for ending in endings]


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else REPOSITORY
    target.mkdir(parents=True, exist_ok=True)
    for path in generate(target):
        sys.stdout.write(f"{path}\n")
