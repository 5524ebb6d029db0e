"""The page of limits: published figures, what must not be promised, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from disagg.cli import app
from disagg.errors import ConfigError
from disagg.perf.hardware import find_device
from disagg.perf.limits import Bytes, find_limits, sizes_of
from disagg.perf.links import find_link
from disagg.perf.model_config import dtype_from_config, shape_from_config
from disagg.perf.shapes import SHAPES, find_shape

DEEPSEEK = {
    "hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "max_position_embeddings": 163840, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
OPT = {
    "model_type": "opt", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40, "ffn_dim": 20480, "vocab_size": 50272,
    "max_position_embeddings": 2048,
}  # fmt: skip


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["limits", *args])
    return result.exit_code, result.stdout, result.stderr


def page(*args: str) -> dict[str, object]:
    code, text, error = run(*args, "--json")
    assert code == 0, error
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_the_batch_table_of_a_70b_model_on_an_h100() -> None:
    found = page("--gpu", "h100", "--weights-gb", "140", "--kv-mib-per-token", "0.5", "--context", "2048")
    assert found["min_token_s"] == pytest.approx(41.8e-3, abs=0.05e-3)
    steps = {row["batch"]: row for row in found["steps"]}  # type: ignore[attr-defined]
    tpots = {1: 42.1, 4: 43.0, 8: 44.2, 16: 46.6, 32: 51.3, 64: 60.9, 128: 80.0}
    rates = {1: 23.8, 4: 93.1, 8: 181, 16: 344, 32: 623, 64: 1051, 128: 1600}
    for batch in tpots:
        assert steps[batch]["limit_tpot_s"] * 1e3 == pytest.approx(tpots[batch], abs=0.05)
        assert steps[batch]["limit_tokens_per_s"] == pytest.approx(rates[batch], rel=0.0025)
    assert page("--gpu", "h100", "--weights-gb", "35")["min_token_s"] == pytest.approx(10.4e-3, abs=0.05e-3)


def test_70b_does_not_fit_one_80_gb_gpu_and_says_so() -> None:
    found = page("llama-3.1-70b", "--gpu", "h100", "--context", "32768")
    assert found["kv_bytes_per_token"] == 320 * 1024
    assert (found["fits"], found["needed_tp"]) == (False, 4)
    code, text, _ = run("llama-3.1-70b", "--gpu", "h100", "--context", "32768")
    assert code == 0
    assert "DOES NOT FIT" in text
    assert "smallest tensor-parallel degree that does is 4" in text


@pytest.mark.parametrize(("model", "gpu", "tp"), [("llama-3.1-8b", "h100", 1), ("deepseek-v3", "h200", 8), ("qwen3-30b-a3b", "a100", 2)])
def test_nothing_is_expected_to_beat_its_limit(model: str, gpu: str, tp: int) -> None:
    shape, device = find_shape(model), find_device(gpu)
    found = find_limits(device, sizes_of(shape, "bf16", "bf16", tp), model=model, shape=shape, tp=tp)
    assert all(row.expected_tpot_s is not None and row.expected_tpot_s > 0.95 * row.limit_tpot_s for row in found.rows)
    assert found.expected_prefill_s is not None
    assert found.expected_prefill_s > found.limit_prefill_s
    limits = [row.limit_tpot_s for row in found.rows]
    assert limits == sorted(limits)


def test_the_largest_batch_is_the_last_that_keeps_the_target() -> None:
    sizes = Bytes(weights=140e9, kv_per_token=1e9 / 2048, params=70e9)
    found = find_limits(find_device("h100"), sizes, model="m", shape=None, tpot_s=0.05)
    assert found.largest_batch_limit == int((0.05 * 3.35e12 - 140e9) / 1e9)


def test_a_prompt_moves_as_long_as_it_prefills_at_the_break_even_bandwidth() -> None:
    shape, device = find_shape("llama-3.1-8b"), find_device("h100")
    sizes = sizes_of(shape, "bf16", "bf16")
    first = find_limits(device, sizes, model="m", shape=shape)
    link = find_link(f"{first.break_even_bandwidth / 1e9}")
    again = find_limits(device, sizes, model="m", shape=shape, links=[link])
    assert again.links[0].transfer_s == pytest.approx(again.expected_prefill_s)
    assert again.links[0].share_of_prefill == pytest.approx(1)


def test_other_architectures_are_read_from_their_config(tmp_path: Path) -> None:
    assert shape_from_config(DEEPSEEK, "deepseek-v3") == SHAPES["deepseek-v3"]
    assert shape_from_config(OPT, "opt-13b") == SHAPES["opt-13b"]
    assert SHAPES["deepseek-v3"].total_params == pytest.approx(671e9, rel=0.002)
    assert SHAPES["opt-13b"].total_params == pytest.approx(12.85e9, rel=0.002)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK))
    found = page(str(tmp_path), "--gpu", "h200", "--tp", "8")
    assert (found["dtype"], found["fits"]) == ("fp8", True)
    # One token reads the experts that it picks, not all of them.
    assert found["min_token_s"] < 0.1 * float(found["weights_bytes"]) / float(found["bandwidth"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("LLAMA3.1_70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-quantized.w8a8", "llama-3.1-70b"),
        ("MOE_Mixtral8x7B", "mixtral-8x7b"),
        ("QWEN3_235B", "qwen3-235b-a22b"),
    ],
)
def test_models_are_found_by_the_names_that_hubs_and_tables_use(spelling: str, name: str) -> None:
    assert find_shape(spelling).name == name


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        (None, "bf16"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}, "int4"),
    ],
)
def test_quantisation_is_read_from_the_config(quantization: object, dtype: str) -> None:
    assert dtype_from_config({"quantization_config": quantization}) == dtype


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, error = run("llama-3.1-8b", "--gpu", "h100", "--plot", str(tmp_path / "limits.svg"))
    assert code == 0, error
    assert (tmp_path / "limits.svg").stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("llama-3.1-71b", "--gpu", "h100"), "did you mean 'llama-3.1-70b'"),
        (("llama-3.1-70b", "--gpu", "h1000"), "did you mean 'h100'"),
        (("llama-3.1-70b", "--gpu", "h100", "--tp", "3"), "degree that divides 64 heads"),
        (("llama-3.1-8b", "--gpu", "h100", "--dtype", "int3"), "one of bf16, fp8, int4, int8"),
        (("llama-3.1-8b", "--gpu", "h100", "--tpot-ms", "0"), "above 0"),
        (("llama-3.1-8b", "--gpu", "h100", "--tpot-ms", "inf"), "above 0"),
        (("--weights-gb", "inf", "--gpu", "h100"), "above 0"),
        (("--weights-gb", "140", "--kv-mib-per-token", "nan", "--gpu", "h100"), "0 or more"),
        (("", "--gpu", "h100"), "a bundled model"),
        (("llama-3.1-8b", "--gpu", "h100", "--kv-dtype", "int4"), "bf16, fp8 or int8"),
        (("./no/config.json", "--gpu", "h100"), "nothing is there"),
        (("llama-3.1-8b", "--gpu", "h100", "--tpot-ms", "1"), "below the physical limit of 4.9 ms"),
        (("llama-3.1-8b", "--gpu", "h100", "--context", "200000"), "at most 131,072 tokens"),
        (("llama-3.1-8b", "--gpu", "h100", "--link", "carrier-pigeon"), "GB/s, or one of these"),
        (("llama-3.1-8b", "--gpu", "h100", "--weights-gb", "3"), "one of the two"),
        (("--gpu", "h100"), "one of the two"),
    ],
)
def test_bad_input_is_named(args: tuple[str, ...], text: str) -> None:
    code, _, error = run(*args)
    assert code == 2
    assert text in " ".join(error.split())


def test_a_hybrid_model_is_refused_by_the_key_that_shows_it() -> None:
    with pytest.raises(ConfigError, match="linear_num_key_heads"):
        shape_from_config({**OPT, "linear_num_key_heads": 16})
