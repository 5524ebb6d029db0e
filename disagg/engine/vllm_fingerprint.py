"""What tells one model's weights from another's before KV moves between two engines. Standard library only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SAMPLE_BYTES = 1 << 16
_SAMPLES_PER_FILE = 16
_OF_TRAINING = {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}


def model_fingerprint(model: str, args: Mapping[str, Any]) -> str:
    """Equal for equal weights: name, configuration, and size plus samples of each weight file; where they lie does not count.

    A model that is not here is named by its hub name and revision.
    """
    path = Path(model)
    digest = hashlib.blake2b(digest_size=12)
    relevant = {k: args.get(k) for k in ("revision", "quantization", "dtype", "hf_overrides", "load_format", "seed") if args.get(k)}
    digest.update(json.dumps(relevant, sort_keys=True, default=str).encode())
    if path.is_dir():
        config = path / "config.json"
        if config.is_file():
            fields = json.loads(config.read_text())
            digest.update(json.dumps({k: v for k, v in fields.items() if not k.startswith("_")}, sort_keys=True).encode())
        for file in _weight_files(path):
            _sample(file, digest)
    elif path.is_file():
        _sample(path, digest)
    else:
        digest.update(model.encode())
    return f"{path.name}@{digest.hexdigest()}"


def _weight_files(folder: Path) -> list[Path]:
    """What vLLM loads from a model's folder: other files than safetensors only where there are none of those."""
    others = [file for pattern in ("*.bin", "*.pt", "*.gguf") for file in folder.glob(pattern) if file.name not in _OF_TRAINING]
    return sorted(folder.glob("*.safetensors")) or sorted(others)


def _sample(file: Path, digest: Any) -> None:
    """Adds a file's name, size and evenly spaced samples: unlike weights of one architecture differ everywhere."""
    size = file.stat().st_size
    digest.update(f"{file.name}:{size}".encode())
    with file.open("rb") as weights:
        for i in range(_SAMPLES_PER_FILE):
            weights.seek(i * max(0, size - _SAMPLE_BYTES) // max(1, _SAMPLES_PER_FILE - 1))
            digest.update(weights.read(_SAMPLE_BYTES))
