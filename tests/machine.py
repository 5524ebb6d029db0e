"""Real engines that start and answer quickly on the machine that runs the tests."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from disagg.cpu import fastest_dtype

DTYPE = {"float32": "float32", "auto": "bfloat16"}[fastest_dtype()]  # auto: the small model's own
LAYERS = os.environ.get("DISAGG_TEST_LAYERS", "6")


# Without torch.compile, which costs each new set of arguments a minute and more of a core. test_ray_real.py runs the compiled engines.
QUICK_ARGS: dict[str, Any] = {"dtype": DTYPE, "enforce_eager": True}


def first_layers(model: Path, into: Path, layers: str = LAYERS) -> Path:
    """A copy of the model with its first layers alone, or the model itself (DISAGG_TEST_LAYERS=all).

    What it says makes no sense, at a fifth of the time; whether two ways to compute it agree, it shows as well.
    """
    if layers == "all":
        return model
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    kept = range(min(int(layers), config["num_hidden_layers"]))
    beginnings = tuple(f"model.layers.{i}." for i in kept)
    weights = {
        n: w for n, w in load_file(model / "model.safetensors").items() if not n.startswith("model.layers.") or n.startswith(beginnings)
    }
    into.mkdir(parents=True)
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    (into / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(kept)}))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(model / name, into / name)
    return into
