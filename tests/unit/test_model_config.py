"""Model configs of many families: published sizes come out, and what is not understood is refused rather than guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from disagg.cli import app
from disagg.errors import ConfigError
from disagg.perf.model_config import dtype_from_config, load_shape, shape_from_config

DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "hidden_size": 5120, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 60,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
LLAMA_4 = {
    "model_type": "llama4_text", "hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "num_hidden_layers": 48, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1, "vocab_size": 202048,
    "attention_chunk_size": 8192, "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "num_hidden_layers": 36, "intermediate_size": 2880, "num_local_experts": 128, "num_experts_per_tok": 4, "vocab_size": 201088,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 18, "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
}  # fmt: skip
GEMMA_3_4B = {  # as published: what is missing is its code's default
    "model_type": "gemma3", "vision_config": {"hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 27},
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024,
    },
}  # fmt: skip
QWEN2_MOE = {
    "model_type": "qwen2_moe", "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
    "intermediate_size": 18944, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480, "num_experts": 64,
    "num_experts_per_tok": 8, "vocab_size": 151936, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "sliding_window": 65536, "use_sliding_window": False, "max_window_layers": 28,
}  # fmt: skip
ERNIE = {
    "model_type": "ernie4_5_moe", "hidden_size": 2560, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
    "num_hidden_layers": 28, "intermediate_size": 12288, "moe_intermediate_size": 1536, "moe_num_experts": 64, "moe_k": 6,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "vocab_size": 103424, "tie_word_embeddings": True,
}  # fmt: skip
PHI_MOE = {
    "model_type": "phimoe", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
    "intermediate_size": 6400, "num_local_experts": 16, "num_experts_per_tok": 2, "vocab_size": 32064, "tie_word_embeddings": False,
}  # fmt: skip
GPT2_XL = {
    "model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48, "n_positions": 1024, "vocab_size": 50257,
    "n_inner": None,
}  # fmt: skip
PHI_2 = {
    "model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32,
    "intermediate_size": 10240, "vocab_size": 51200, "tie_word_embeddings": False, "max_position_embeddings": 2048,
}  # fmt: skip
STARCODER2 = {
    "model_type": "starcoder2", "hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 2, "num_hidden_layers": 30,
    "intermediate_size": 12288, "vocab_size": 49152, "sliding_window": 4096,
}  # fmt: skip
FALCON_7B = {
    "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "num_kv_heads": 71,
    "multi_query": True, "new_decoder_architecture": False, "vocab_size": 65024,
}  # fmt: skip
GLM_4 = {
    "model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "multi_query_group_num": 2, "multi_query_attention": True,
    "num_layers": 40, "ffn_hidden_size": 13696, "kv_channels": 128, "padded_vocab_size": 151552, "vocab_size": 151552,
    "seq_length": 131072, "tie_word_embeddings": False,
}  # fmt: skip
QWEN_7B = {
    "model_type": "qwen", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "intermediate_size": 22016,
    "kv_channels": 128, "vocab_size": 151936, "seq_length": 8192, "tie_word_embeddings": False,
}  # fmt: skip
MPT_7B = {
    "model_type": "mpt",
    "d_model": 4096,
    "n_heads": 32,
    "n_layers": 32,
    "vocab_size": 50432,
    "max_seq_len": 2048,
    "expansion_ratio": 4,
}


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_bytes"),
    [
        (DEEPSEEK_V2, 236, 21, 60 * 576 * 2),
        ({**LLAMA_4, "num_local_experts": 16, "interleave_moe_layer_step": 1}, 107.8, 16.1, 48 * 2 * 8 * 128 * 2),
        ({**LLAMA_4, "num_local_experts": 128, "interleave_moe_layer_step": 2}, 400.7, 16.1, 48 * 2 * 8 * 128 * 2),
        (GPT_OSS, 116.8, 5.1, 36 * 2 * 8 * 64 * 2),
        (GEMMA_3_4B, 3.88, 3.88, 34 * 2 * 4 * 256 * 2),
        (QWEN2_MOE, 57.4, 13.7, 28 * 2 * 4 * 128 * 2),
        (ERNIE, 21.8, 3.35, 28 * 2 * 4 * 128 * 2),
        (PHI_MOE, 41.9, 6.6, 32 * 2 * 8 * 128 * 2),
        (GPT2_XL, 1.558, 1.555, 48 * 2 * 1600 * 2),
        (PHI_2, 2.78, 2.65, 32 * 2 * 2560 * 2),
        (STARCODER2, 3.03, 3.03, 30 * 2 * 2 * 128 * 2),
        (FALCON_7B, 6.92, 6.92, 32 * 2 * 64 * 2),
        (GLM_4, 9.40, 8.78, 40 * 2 * 2 * 128 * 2),
        (QWEN_7B, 7.72, 7.10, 32 * 2 * 4096 * 2),
        (MPT_7B, 6.65, 6.65, 32 * 2 * 4096 * 2),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_published_sizes_come_out(config: dict[str, Any], billions: float, active: float, kv_bytes: int) -> None:
    """`active`: without the input embedding, which most published figures count (Llama 4 and Qwen2-57B: 17 and 14.2 with it)."""
    shape = shape_from_config(config)
    assert shape.total_params / 1e9 == pytest.approx(billions, rel=0.005)
    assert (shape.active_params + shape.head_params) / 1e9 == pytest.approx(active, rel=0.03)
    assert shape.kv_bytes_per_token() == kv_bytes


def test_layers_that_look_back_over_a_window_are_counted(tmp_path: Path) -> None:
    mistral = {**PHI_2, "model_type": "mistral", "sliding_window": 4096}
    configs = (GPT_OSS, GEMMA_3_4B, QWEN2_MOE, mistral, {**LLAMA_4, "num_local_experts": 16})
    windows = [(128, 18), (1024, 29), (0, 0), (4096, 32), (8192, 36)]
    assert [(s.window_tokens, s.window_layers) for s in map(shape_from_config, configs)] == windows
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    said = CliRunner().invoke(app, ["limits", str(tmp_path), "--gpu", "h100", "--context", "1024"]).stdout
    assert "18 of the 36 layers look back 128 tokens only" in said
    assert " in int4," in said


def test_a_mixture_of_experts_with_plain_layers_between() -> None:
    shape = shape_from_config({**QWEN2_MOE, "decoder_sparse_step": 2, "mlp_only_layers": [1]})
    assert (shape.dense_layers, shape.dense_intermediate) == (15, 18944)
    assert shape_from_config({**DEEPSEEK_V2, "moe_layer_freq": [0, 0] + [1] * 58}).dense_layers == 2
    assert shape_from_config({**DEEPSEEK_V2, "moe_layer_freq": 2}).dense_layers == 31  # the first, and every second one


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (["hidden_size"], "config.json: got"),
        ({"hidden_size": 64}, "num_hidden_layers, num_attention_heads, vocab_size"),
        ({**PHI_2, "layer_types": ["full_attention", "linear_attention"]}, "layer_types: got 'linear_attention'"),
        ({**PHI_2, "hybrid_override_pattern": "M-M*-"}, "hybrid_override_pattern"),
        ({**PHI_2, "is_encoder_decoder": True}, "a decoder-only transformer"),
        ({**PHI_2, "num_moe_experts": 8}, "num_moe_experts: got 8, expected the number of experts"),
        ({**MPT_7B, "ffn_config": {"moe_num_experts": 16}}, "ffn_config"),
        ({**PHI_MOE, "num_experts_per_tok": 32}, "at most 16, the experts"),
        ({**DEEPSEEK_V2, "first_k_dense_replace": 61}, "at most 60, the layers"),
        ({**PHI_2, "num_key_value_heads": 5}, "a divisor of the 32 heads"),
        ({**PHI_2, "hidden_size": 2561}, "head_dim"),
        ({**PHI_2, "num_hidden_layers": [16, 16]}, "num_hidden_layers: got"),
        ({**PHI_2, "intermediate_size": None}, "intermediate_size"),
    ],
)
def test_what_is_not_understood_is_named(config: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        shape_from_config(config)
    assert key in caught.value.message


def test_experts_that_are_none_make_a_dense_model() -> None:
    shape = shape_from_config({**PHI_2, "model_type": "granite", "num_local_experts": 0, "num_experts_per_tok": 0})
    assert (shape.num_experts, shape.mlp_matrices) == (0, 3)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "mxfp4"}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, "int8"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "int4"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "awq"}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float"}}}}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "int"}}}}, "int8"),
    ],
)
def test_quantisation_of_many_tools_is_read(quantization: dict[str, Any], dtype: str) -> None:
    assert dtype_from_config({"quantization_config": quantization}) == dtype
    assert dtype_from_config({"text_config": {"quantization_config": quantization}}) == dtype


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "aqlm"}, "fp8 or so", {"quant_method": "compressed-tensors", "config_groups": {"g": {}}}]
)
def test_an_unknown_quantisation_is_named_and_the_type_may_be_given_instead(tmp_path: Path, quantization: object) -> None:
    config = {**PHI_2, "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="quantization_config"):
        dtype_from_config(config)
    assert load_shape(str(tmp_path)) == shape_from_config(config, tmp_path.name)
    refused, given = (CliRunner().invoke(app, ["limits", str(tmp_path), "--gpu", "h100", *more]) for more in ([], ["--dtype", "int4"]))
    assert refused.exit_code == 2
    assert "--dtype" in refused.stderr
    assert given.exit_code == 0, given.stderr


def test_the_weights_type_in_a_models_name_counts() -> None:
    said = CliRunner().invoke(app, ["limits", "Qwen/Qwen2.5-72B-Instruct-AWQ", "--gpu", "h100", "--json"]).stdout
    assert json.loads(said)["dtype"] == "int4"


def test_copies_of_the_kv_are_told_apart_from_the_kv() -> None:
    """A latent is kept whole by every device."""
    said = CliRunner().invoke(app, ["limits", "deepseek-v3", "--gpu", "h200", "--dtype", "fp8", "--tp", "8", "--json"]).stdout
    found = json.loads(said)
    assert (found["kv_bytes_per_token"], found["kv_copies"]) == (61 * 576 * 2, 8)
    # Few tokens touch few experts: prompt tokens beside them would touch more, and are not free.
    free = {row["batch"]: row["limit_tokens"] for row in found["free_ride"]}
    assert free[1] == 0
    assert free[256] > 1000
