"""What the `model:` of a topology means: a bundled name, a folder, or a name on a model hub, in this order."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

from disagg.errors import ModelError, nearest
from disagg.models.catalog import BUNDLED
from disagg.models.store import model_path

HUB_TIMEOUT_S = 3.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(ref: str, base_dir: Path, *, check_hub: bool = True) -> Path | str:
    """A Path for weights on this machine, a str for a hub name that the engine loads by itself.

    A relative path counts from `base_dir` (the topology file's folder), then from the working directory. A hub name must
    be in the local hub cache, or the hub must answer; `check_hub=False` skips that, for checks on another machine. Raises
    ModelError: a bundled model that is not stored, a folder without config or weights, a hub out of reach, an unknown name.
    """
    if ref in BUNDLED:
        return model_path(ref)
    written = Path(ref).expanduser()
    for path in (base_dir / written, written):
        if ref and path.exists():
            return _checked_folder(ref, path.absolute())
    if ref.startswith(("/", "./", "../", "~")):
        raise _error(ref, f"{base_dir / written} does not exist", "a folder with config.json and *.safetensors")
    if _HUB_NAME.fullmatch(ref):
        if check_hub:
            _check_hub(ref)
        return ref
    raise _error(
        ref,
        f"is neither a bundled model, nor a folder, nor a hub name; {nearest(ref, BUNDLED)}",
        f"a bundled name ({', '.join(sorted(BUNDLED))}), a folder, or ORGANISATION/NAME on a model hub",
    )


def _checked_folder(ref: str, path: Path) -> Path:
    if not path.is_dir():
        raise _error(ref, f"{path} is a file", "a folder with config.json and *.safetensors")
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    weights = [*path.glob("*.safetensors"), *path.glob("*.bin")]
    if not any(file.stat().st_size > 0 for file in weights):
        missing.append("weights (*.safetensors or *.bin)")
    if missing:
        raise _error(ref, f"{path} has no {' and no '.join(missing)}", "a folder with config.json and *.safetensors")
    return path


def _check_hub(ref: str) -> None:
    """Raise unless the model is cached, or something answers at the hub's address (a proxy is taken to reach it)."""
    # Imported here: reading the environment at import time, it would ignore what a caller sets later.
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(ref, "config.json"), str):
        return
    how = f"copy the weights to this machine and give their folder, or use a bundled model ({', '.join(sorted(BUNDLED))})"
    if constants.HF_HUB_OFFLINE:
        raise _error(ref, f"is not in the hub cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set", how)
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=HUB_TIMEOUT_S).close()
    except OSError as error:
        raise _error(
            ref, f"is not in the hub cache {constants.HF_HUB_CACHE}, and the hub {address.hostname} cannot be reached ({error})", how
        ) from error


def _error(ref: str, what: str, expected: str) -> ModelError:
    return ModelError(f"model: {ref!r}: {what}; expected: {expected}", key="model", value=ref, expected=expected)
