"""What the gateway must know of the served model, read from the files beside its weights. No transformers, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from disagg.config import Topology
from disagg.engine.simulated_settings import simulated_model_info
from disagg.errors import ConfigError, ModelError
from disagg.front.chat import ChatTemplate
from disagg.front.text import SyntheticTokenizer, Tokenizer, load_tokenizer
from disagg.types import ModelInfo

# Keys under which models state how many positions they know, as vLLM reads them.
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_BYTES_PER_DTYPE = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True, slots=True)
class Served:
    """The model's facts and, when it has them, its tokenizer and its chat template."""

    info: ModelInfo
    tokenizer: Tokenizer | None
    chat: ChatTemplate | None = None


def read_served(topology: Topology, model: str | None) -> Served:
    """Facts and tokenizer of what `topology` serves; `model` is the folder or hub name of the weights (unused when simulated).

    May read files and a hub: not for an event loop. Raises ModelError and ConfigError.
    """
    if topology.engine.kind == "simulated":
        return Served(_simulated_info(topology), SyntheticTokenizer())
    if model is None:
        raise ConfigError(key="model", value=model, expected="a folder or hub name when engine.kind is vllm")
    folder = Path(model) if Path(model).is_dir() else _hub_folder(model)
    tokenizer = load_tokenizer(folder)
    return Served(_info(topology, folder), tokenizer, ChatTemplate.beside(folder) if tokenizer is not None else None)


def _simulated_info(topology: Topology) -> ModelInfo:
    """The facts of the narrowest pool."""
    infos = [simulated_model_info(topology.simulated(role), topology.model) for role in topology.active_pools()]
    return replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        vocab_size=min(info.vocab_size for info in infos),
        kv_bytes_per_token=max(info.kv_bytes_per_token for info in infos),
    )


def _hub_folder(name: str) -> Path:
    """The local folder with a hub model's small files, fetched when they are not cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, ValueError, OSError) as error:
        raise ModelError(f"model: {name}: its config cannot be read from the hub: {error}", key="model", value=name) from error


def _info(topology: Topology, folder: Path) -> ModelInfo:
    config = _read_json(folder / "config.json")
    if not config:
        raise ModelError(f"model: {folder} has no config.json", key="model", value=str(folder), expected="a folder with config.json")
    # Models of several modalities keep the language model's numbers in a sub-tree.
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(text, dict)
    generation = _read_json(folder / "generation_config.json")
    arguments = [topology.engine_args(role) for role in topology.active_pools()]
    return ModelInfo(
        name=topology.model,
        max_model_len=_max_model_len(arguments, text, _read_json(folder / "tokenizer_config.json")),
        vocab_size=_number(text, "vocab_size", folder),
        kv_bytes_per_token=max(_kv_bytes_per_token(text, args, folder) for args in arguments),
        eos_token_ids=tuple(sorted({*_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))})),
    )


def _max_model_len(arguments: list[dict[str, Any]], config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> int:
    """The smallest context of all pools: the argument max_model_len, else what the model's files say."""
    known = [config[key] for key in _LENGTH_KEYS if isinstance(config.get(key), int)]
    stated = tokenizer.get("model_max_length")
    if isinstance(stated, int) and 0 < stated < 1 << 40:  # files without a limit hold a huge number
        known.append(stated)
    lengths = []
    for args in arguments:
        length = args.get("max_model_len", min(known, default=None))
        if not isinstance(length, int) or length < 2:
            raise ConfigError(key="engine.args.max_model_len", value=length, expected="an integer above 1, as the model's config has none")
        lengths.append(length)
    return min(lengths)


def _kv_bytes_per_token(config: Mapping[str, Any], args: Mapping[str, Any], folder: Path) -> int:
    """layers x 2 x kv heads x head size x bytes per value."""
    heads = _number(config, "num_attention_heads", folder)
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or _number(config, "hidden_size", folder) // heads
    dtype = args.get("kv_cache_dtype", "auto")
    if dtype == "auto":
        dtype = args.get("dtype", "auto")
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    # "auto" turns a float32 model into 16 bits in vLLM.
    num_bytes = 2 if dtype == "float32" and args.get("dtype", "auto") == "auto" else _BYTES_PER_DTYPE.get(str(dtype), 2)
    return _number(config, "num_hidden_layers", folder) * 2 * int(kv_heads) * int(head_dim) * num_bytes


def _number(config: Mapping[str, Any], key: str, folder: Path) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ModelError(f"model: {folder / 'config.json'}: {key}: got {value!r}, expected a positive integer", key="model", value=value)
    return value


def _ids(value: Any) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, int) else ()


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is no such file."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"model: {file} cannot be read: {error}", key="model", value=str(file), expected="a JSON object") from error
    if not isinstance(found, dict):
        raise ModelError(f"model: {file} holds no JSON object", key="model", value=str(file), expected="a JSON object")
    return found
