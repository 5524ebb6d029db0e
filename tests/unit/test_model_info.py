"""The model's facts from the files beside its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.config import parse_topology
from disagg.errors import ConfigError, ModelError
from disagg.front.model_info import read_served

CONFIG = {
    "vocab_size": 1000,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def served(folder: Path, config: dict[str, Any], args: dict[str, Any] | None = None, **pools: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    raw = {"model": "m", "engine": {"args": args or {}}, "pools": {"prefill": {"count": 1}, "decode": {"count": 1}, **pools}}
    return read_served(parse_topology(raw), str(folder))


def test_facts_come_from_the_config(tmp_path: Path) -> None:
    info = served(tmp_path, CONFIG).info
    assert (info.name, info.max_model_len, info.vocab_size, info.eos_token_ids) == ("m", 2048, 1000, (2,))
    # 4 layers x 2 x 2 heads x 8 x 2 bytes
    assert info.kv_bytes_per_token == 256


@pytest.mark.parametrize(
    ("changes", "args", "expected"),
    [
        ({}, {"dtype": "float32"}, 512),
        ({}, {"kv_cache_dtype": "fp8"}, 128),
        ({}, {"kv_cache_dtype": "auto", "dtype": "auto"}, 256),
        ({"torch_dtype": "float32"}, {}, 256),
        ({"head_dim": 32}, {}, 1024),
        ({"num_key_value_heads": None}, {}, 1024),
    ],
)
def test_kv_bytes_follow_dtype_and_heads(tmp_path: Path, changes: dict[str, Any], args: dict[str, Any], expected: int) -> None:
    assert served(tmp_path, {**CONFIG, **changes}, args).info.kv_bytes_per_token == expected


def test_the_smallest_context_of_all_pools_counts(tmp_path: Path) -> None:
    assert served(tmp_path, CONFIG, {"max_model_len": 512}).info.max_model_len == 512
    assert served(tmp_path, CONFIG, decode={"count": 1, "args": {"max_model_len": 256}}).info.max_model_len == 256
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    assert served(tmp_path, CONFIG).info.max_model_len == 1024
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert served(tmp_path, CONFIG).info.max_model_len == 2048


def test_text_models_inside_others_and_more_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    info = served(tmp_path, {"text_config": CONFIG, "eos_token_id": 5}).info
    assert (info.vocab_size, info.eos_token_ids) == (1000, (2, 5, 7))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({k: v for k, v in CONFIG.items() if k != "vocab_size"}, "vocab_size"),
        ({k: v for k, v in CONFIG.items() if k != "max_position_embeddings"}, "max_model_len"),
        ({**CONFIG, "num_hidden_layers": "four"}, "num_hidden_layers"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, config: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        served(tmp_path, config)


def test_a_folder_without_config_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        served(tmp_path, {})
    topology = parse_topology({"model": "m", "pools": {"prefill": {"count": 1}, "decode": {"count": 1}}})
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=r"config\.json"):
            read_served(topology, str(tmp_path))


@pytest.mark.real
def test_the_bundled_model(smollm2: Path) -> None:
    """Facts measured with the real engine: 22.5 KiB of KV per token; the prompt gets no extra tokens."""
    topology = parse_topology({"model": "smollm2-135m", "pools": {"prefill": {"count": 1}, "decode": {"count": 1}}})
    found = read_served(topology, str(smollm2))
    assert found.info.kv_bytes_per_token == 23040
    assert (found.info.max_model_len, found.info.vocab_size, found.info.eos_token_ids) == (8192, 49152, (2,))
    assert found.tokenizer is not None
    assert found.tokenizer.encode("hello") == [28120]
    assert found.tokenizer.decode([28120, 2]) == "hello"
    assert found.tokenizer.max_token_bytes == 81
