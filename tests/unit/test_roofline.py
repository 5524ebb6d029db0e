"""Device and model tables, step times and memory, against published sizes and against what must hold for any device."""

from __future__ import annotations

import pytest

from disagg.errors import ConfigError
from disagg.perf.hardware import DEVICES, find_device
from disagg.perf.memory import fits, kv_capacity_tokens, placement_memory
from disagg.perf.model_config import shape_from_config
from disagg.perf.roofline import PrefillChunk, StepModel
from disagg.perf.shapes import SHAPES, find_shape


def step_model(shape: str = "llama-3.1-70b", device: str = "h100", tp: int = 4, dtype: str = "bf16") -> StepModel:
    return StepModel(find_shape(shape), find_device(device), tp, dtype)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("H100-SXM", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("A100-80G", "a100"),
        ("NVIDIA H200", "h200"),
        ("b200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("h100_pcie", "h100-pcie"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("gb200_sxm", "gb200"),
        ("NVIDIA GB200 NVL72", "gb200"),
        ("Grace Hopper GH200 480GB", "gh200"),
        ("NVIDIA H800", "h800"),
        ("H100 SXM5 NVLink", "h100"),
        ("CPU", "cpu"),
    ],
)
def test_devices_are_found_by_the_names_that_people_and_drivers_use(spelling: str, name: str) -> None:
    assert find_device(spelling).name == name


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'h100'\?"):
        find_device("h1000")
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3\.1-70b'"):
        find_shape("llama-3.1-71b")


@pytest.mark.parametrize(
    ("name", "billions", "kv_kib"),
    [
        ("llama-3.1-8b", 8.03, 128),
        ("llama-3.1-70b", 70.55, 320),
        ("llama-3.1-405b", 405.85, 504),
        ("smollm2-135m", 0.1345, 22.5),
        ("qwen3-8b", 8.19, 144),
        ("qwen3-30b-a3b", 30.53, 96),
        ("mixtral-8x7b", 46.70, 128),
        ("qwen2.5-3b", 3.09, 36),
        ("qwen3-coder-480b-a35b", 480.2, 248),
        ("deepseek-v2-lite", 15.71, 30.375),
        ("kimi-k2", 1026.4, 68.625),
        ("gemma-2-27b", 27.23, 368),
    ],
)
def test_sizes_are_the_published_ones(name: str, billions: float, kv_kib: float) -> None:
    shape = find_shape(name)
    assert shape.total_params / 1e9 == pytest.approx(billions, rel=0.002)
    assert shape.kv_bytes_per_token() / 1024 == kv_kib
    assert shape.kv_bytes_per_token("fp8") * 2 == shape.kv_bytes_per_token()
    assert shape.active_params <= shape.total_params


def test_weights_of_70b() -> None:
    shape = find_shape("meta-llama/Llama-3.1-70B-Instruct")
    assert shape.weight_bytes() / 1e9 == pytest.approx(141.1, rel=0.001)
    # In fp8 the embeddings and the output projection stay bf16.
    assert 70.6e9 < shape.weight_bytes("fp8") < 73e9


def test_shape_from_a_config_file() -> None:
    smollm2 = {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "tie_word_embeddings": True, "vocab_size": 49152, "head_dim": None, "max_position_embeddings": 8192,
    }  # fmt: skip
    assert shape_from_config(smollm2, "smollm2-135m") == SHAPES["smollm2-135m"]
    mixtral = {
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32768,
    }  # fmt: skip
    assert shape_from_config(mixtral, "mixtral-8x7b") == SHAPES["mixtral-8x7b"]
    qwen = {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128, "num_experts_per_tok": 8,
        "max_position_embeddings": 40960,
    }  # fmt: skip
    assert shape_from_config(qwen, "qwen3-30b-a3b") == SHAPES["qwen3-30b-a3b"]


@pytest.mark.parametrize(("change", "key"), [({"hidden_size": None}, "hidden_size"), ({"vocab_size": "many"}, "vocab_size")])
def test_a_broken_config_file_names_the_key(change: dict[str, object], key: str) -> None:
    good = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 100}
    with pytest.raises(ConfigError, match=key):
        shape_from_config({**good, **change})


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_is_never_below_its_two_roofs(device: str) -> None:
    model = step_model("llama-3.1-8b", device, tp=1)
    hardware, shape = model.device, model.shape
    decode_bytes = shape.weight_bytes() - 2 * shape.head_params + 10_000 * shape.kv_bytes_per_token()
    assert model.decode_step_s(8, 10_000) >= decode_bytes / hardware.bandwidth
    assert model.prefill_s(4096) >= 2 * shape.active_params * 4096 / hardware.bf16_flops


def test_prefill_is_bound_by_arithmetic_and_decode_by_memory() -> None:
    model = step_model()
    assert model.prefill_s(4000) > 1.8 * model.prefill_s(2000)
    assert model.decode_step_s(8, 8 * 1000) < 1.2 * model.decode_step_s(1, 1000)
    assert model.decode_step_s(64, 64 * 8000) > model.decode_step_s(64, 64 * 1000)


def test_a_decode_in_a_prefill_step_costs_less_than_a_step_of_its_own() -> None:
    """What makes chunked prefill worth it, and the wait that it costs the decodes."""
    model = step_model()
    mixed = model.step_s([PrefillChunk(2048)], 32, 32 * 1000)
    assert mixed < model.step_s([PrefillChunk(2048)]) + model.decode_step_s(32, 32_000)
    assert mixed > 5 * model.decode_step_s(32, 32_000)
    assert model.step_s([]) == 0.0


def test_chunks_cost_more_than_one_piece_and_cached_tokens_are_saved() -> None:
    model = step_model()
    assert model.prefill_s(8192) < model.prefill_s(8192, max_num_batched_tokens=512) < 1.5 * model.prefill_s(8192)
    assert model.prefill_s(8192, num_cached_tokens=7680) < model.prefill_s(8192) / 8
    whole = PrefillChunk(1000)
    parts = [PrefillChunk(300), PrefillChunk(700, 300)]
    assert sum(p.attention_pairs for p in parts) == whole.attention_pairs == 1000 * 1001 / 2


def test_more_devices_are_faster_but_not_in_proportion() -> None:
    steps = [step_model(tp=tp).decode_step_s(8, 8000) for tp in (1, 2, 4, 8)]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] / steps[3] < 8
    assert step_model(dtype="fp8").decode_step_s(8, 8000) < step_model().decode_step_s(8, 8000)


def test_a_moe_step_reads_the_experts_it_needs() -> None:
    shape = find_shape("qwen3-30b-a3b")
    one, many = shape.touched_weight_bytes(1), shape.touched_weight_bytes(10_000)
    assert one == pytest.approx(shape.active_params * 2)
    assert many == pytest.approx((shape.dense_params + shape.routed_params) * 2)


def test_memory_of_70b_on_h100() -> None:
    shape, h100 = find_shape("llama-3.1-70b"), find_device("h100")
    report = placement_memory(shape, h100, tp=1, min_kv_tokens=32768)
    assert (report.fits, report.kv_tokens, report.needed_tp) == (False, 0, 4)
    report = placement_memory(shape, h100, tp=4, min_kv_tokens=8192)
    assert report.fits
    assert report.kv_bytes_per_token == 80 * 1024
    assert report.kv_tokens * report.kv_bytes_per_token + report.weights_bytes < report.budget_bytes
    assert placement_memory(shape, find_device("h200"), min_kv_tokens=8192, dtype="fp8").needed_tp == 1
    assert placement_memory(find_shape("llama-3.1-405b"), find_device("rtx-4090"), tp=32).fits is False


def test_capacity_grows_with_memory_and_is_what_fits_asks() -> None:
    shape, h100 = find_shape("llama-3.1-8b"), find_device("h100")
    tokens = kv_capacity_tokens(shape, h100)
    assert 0 < tokens < kv_capacity_tokens(shape, h100, utilization=0.95) < kv_capacity_tokens(shape, find_device("h200"))
    assert fits(shape, h100, min_kv_tokens=tokens)
    assert not fits(shape, h100, min_kv_tokens=tokens + 1)


def test_more_devices_than_kv_heads_replicate_them() -> None:
    shape = find_shape("llama-3.1-70b")
    assert placement_memory(shape, find_device("h100"), tp=16).kv_bytes_per_token == shape.kv_bytes_per_token() // 8


@pytest.mark.parametrize("tp", [0, 3, 5, 128])
def test_a_degree_that_does_not_divide_the_heads_is_refused(tp: int) -> None:
    with pytest.raises(ConfigError, match=r"tp: .*\[1, 2, 4, 8, 16, 32, 64\]"):
        placement_memory(find_shape("llama-3.1-70b"), find_device("h100"), tp=tp)


def test_a_cpu_core_is_as_quick_as_it_was_measured() -> None:
    """One quiet core with AMX; a decoding request costs as much as any other token, which no batch gets for nothing."""
    model = step_model("smollm2-135m", "cpu", tp=1)
    for tokens, seconds in ((512, 0.36), (2048, 2.1), (3000, 3.6)):
        assert model.prefill_s(tokens) == pytest.approx(seconds, rel=0.08)
    for batch, seconds in ((1, 19e-3), (4, 22e-3), (8, 26e-3), (16, 33e-3)):
        assert model.decode_step_s(batch, 64 * batch) == pytest.approx(seconds, rel=0.08)
