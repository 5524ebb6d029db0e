"""vLLM's configuration for the API server in the gateway: the model and what concerns text and checks; no device, no cache."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs, make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from disagg.config import Topology
from disagg.errors import ConfigError, ModelError, nearest
from disagg.types import ModelInfo

# Engine arguments that shape devices, memory and processes: the workers' business.
_WORKERS_OWN = (
    "block_size",
    "gpu_memory_utilization",
    "kv_cache_dtype",
    "max_num_batched_tokens",
    "mixed_step_tokens",
    "mixed_step_ms",
    "max_num_seqs",
    "quantization",
    "tensor_parallel_size",
    "distributed_executor_backend",
    "enable_prefix_caching",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "compilation_config",
    "scheduling_policy",
    "async_scheduling",
    "swap_space",
    "cpu_offload_gb",
    "load_format",
    "speculative_config",
    "kv_events_config",
)
# Server arguments that the topology states elsewhere.
_OURS = {
    "host": "gateway.host",
    "port": "gateway.http_port",
    "api_key": "gateway.token_file",
    "ssl_keyfile": "gateway.tls",
    "ssl_certfile": "gateway.tls",
    "ssl_ca_certs": "gateway.tls",
    "ssl_cert_reqs": "gateway.tls",
    "uds": "gateway.host",
    "lora_modules": "nothing: adapters are not served by separate workers",
}


def vllm_config(topology: Topology, model: str, info: ModelInfo) -> VllmConfig:
    """What renderer and input processor need, without a device. Raises ConfigError and ModelError."""
    role = next(iter(topology.active_pools()))
    args = {name: value for name, value in topology.engine_args(role).items() if name not in _WORKERS_OWN}
    args |= {"model": model, "served_model_name": [topology.model], "max_model_len": info.max_model_len}
    try:
        engine_args = AsyncEngineArgs(**args)
        model_config = engine_args.create_model_config()
        model_config.quantization = None  # no kernels here, so none are checked
        return VllmConfig(
            model_config=model_config,
            structured_outputs_config=engine_args.create_structured_outputs_config(),
        )
    except (TypeError, ValueError, OSError) as error:
        raise ModelError(f"model: vLLM's API server cannot read {model}: {error}", key="model", value=model) from error


def server_args(topology: Topology, model: str, config: VllmConfig) -> Namespace:
    """vLLM's server arguments: its defaults, and `gateway.http_args` over them. Raises ConfigError naming a wrong one."""
    args: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    args.model = model
    args.served_model_name = [topology.model]
    args.structured_outputs_config = config.structured_outputs_config
    args.reasoning_parser = config.structured_outputs_config.reasoning_parser
    args.disable_log_stats = True
    known = {field.name for field in dataclasses.fields(FrontendArgs)}
    for name, value in topology.gateway.http_args.items():
        key = f"gateway.http_args.{name}"
        if name in _OURS:
            raise ConfigError(f"{key} is set by {_OURS[name]}", key=key, value=value, expected="no value")
        if name not in known:
            raise _unknown(key, name, value, known)
        setattr(args, name, value)
    return args


def _unknown(key: str, name: str, value: Any, known: set[str]) -> ConfigError:
    hint = nearest(name, known) if len(nearest(name, known)) < 80 else "an argument of vLLM's API server"
    return ConfigError(f"{key}: vLLM's API server has no such argument; {hint}", key=key, value=value, expected=hint)
