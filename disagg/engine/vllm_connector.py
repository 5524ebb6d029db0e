"""The KV connector that vLLM loads in its engine process: block arithmetic beside the scheduler, copies beside the model.

Named by `kv_connector_module_path`. All copies are made by the worker side in step order, so vLLM frees blocks as it always does:
what a step stages is copied before any later step can write those blocks, and a load is over before the step that needs it computes.
Beside requests that decode, a load is spread over steps (vllm_loads.py).
Layer hooks do nothing, so full CUDA graphs stay on. Nothing here raises for the fault of one request: a load that cannot be done
reports its blocks as invalid, and vLLM fails that request alone.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec

from disagg.engine.load_room import STEP_SHARE, LoadRoom
from disagg.engine.vllm_args import MIXED_STEP_MS, MIXED_STEP_TOKENS
from disagg.engine.vllm_channel import ADDRESS_ENV, RankChannel, answer_lookups, hold_lifeline, report_step
from disagg.engine.vllm_loads import RankLoads
from disagg.engine.vllm_memory import CacheBlocks, RankBoxes
from disagg.engine.vllm_patches import patch_runner
from disagg.engine.vllm_plan import Copy, Planner, StepPlan
from disagg.engine.vllm_prefix import PrefixLookup
from disagg.engine.vllm_stats import StepClock
from disagg.engine.vllm_steps import MixedSteps, limit_mixed_steps
from disagg.engine.vllm_structure import patch_structured_output
from disagg.errors import ConfigError
from disagg.kv.form import FLOATS
from disagg.kv.layout import KvLayout, Packing

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler side hands to the worker side, once per step. `load_s`: seconds that loads may add to the step."""

    plan: StepPlan
    load_s: float


class DisaggConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM makes one in the scheduler's process and one beside each rank's model."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        hold_lifeline()
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._planner = Planner(self._block_tokens)
        self._block_bytes = _block_bytes(kv_cache_config)
        self._boxes: RankBoxes | None = None
        self._loads: RankLoads | None = None
        self._loaded: list[tuple[str, Copy]] = []  # sliced loads that ended in this step
        self._channel: RankChannel | None = None
        self._clock = StepClock()
        self._room = LoadRoom(on_host=vllm_config.device_config.device_type == "cpu")
        self._mixed_steps: MixedSteps | None = None
        self._num_resumed = 0
        self._num_running = 0  # requests in the latest step
        self._load_s = 0.0
        if role == KVConnectorRole.WORKER:
            patch_runner(vllm_config)
        else:
            patch_structured_output()
            own = vllm_config.kv_transfer_config.get_from_extra_config
            tokens, seconds = own(MIXED_STEP_TOKENS, None) or 0, (own(MIXED_STEP_MS, None) or 0.0) / 1e3
            if tokens or seconds:
                self._mixed_steps = MixedSteps(tokens, seconds)
                limit_mixed_steps(self._mixed_steps)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what a finished step staged is in the box already, so a preemption takes nothing away."""
        return False

    # Scheduler side

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._vllm_config.cache_config.enable_prefix_caching:
            answer_lookups(PrefixLookup(kv_cache_manager.block_pool, self._vllm_config.cache_config))

    def on_new_request(self, request: Request) -> None:
        self._planner.add(request.request_id, request.kv_transfer_params)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        num_tokens = self._planner.matched_tokens(request.request_id, num_computed_tokens)
        return num_tokens, self._is_sliced(num_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        is_sliced = self._is_sliced(num_external_tokens)
        if not is_sliced:
            self._room.take(self._num_bytes(num_external_tokens))
        self._planner.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens, is_sliced)

    def _is_sliced(self, num_tokens: int) -> bool:
        """Whether to load so many tokens over several steps. The same answer until another request's load takes room of the step."""
        return self._num_running > 0 and not self._room.fits(self._num_bytes(num_tokens), self._clock.decode_s)

    def _num_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._block_bytes // self._block_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        state, scheduled = scheduler_output.kv_connector_block_state, scheduler_output.num_scheduled_tokens
        assert state is not None
        work = ((end - scheduled[i], scheduled[i]) for i, end in _computed_tokens(scheduler_output))
        step_s = self._clock.start(time.monotonic(), work)
        self._num_resumed += len(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        self._num_running = len(scheduled)
        self._room.clear()
        plan = self._planner.step(_computed_tokens(scheduler_output), lambda request_id: state.resolve_block_ids(request_id)[0])
        return _Metadata(plan, STEP_SHARE * step_s if self._num_running else math.inf)

    def take_events(self) -> tuple[()]:
        """No events. vLLM asks once per step, also an empty one, when it has freed what the step's output let it free."""
        assert self._kv_cache_manager is not None
        now_s = time.monotonic()
        work = self._clock.end(now_s)
        if self._mixed_steps is not None:
            self._mixed_steps.note(work, now_s)
        report_step((work, float(self._kv_cache_manager.usage), self._num_resumed))
        self._num_resumed = 0
        return ()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.finished(request.request_id)
        return False, None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        rank = int(get_tensor_model_parallel_rank())
        channel = self._channel = RankChannel(rank, os.environ[ADDRESS_ENV])
        try:
            cache, layout = _describe(self._vllm_config, self._kv_cache_config, kv_caches)
        except ConfigError as error:
            channel.refuse(error.message)
            raise
        self._boxes = RankBoxes(cache, layout, rank, channel.outbox, channel.inbox, channel.send_events)
        self._loads = RankLoads(self._boxes, cache.slab_bytes)
        channel.hello(dataclasses.asdict(layout))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads that this step's requests need before it computes; of others, what the step has time for."""
        metadata, loads = self._metadata(), self._loads
        if loads is None:
            return
        began_s = time.perf_counter()
        loads.load(metadata.plan.loads)
        loads.begin(metadata.plan.begun_loads)
        loads.give_up(metadata.plan.given_up)
        loads.advance(metadata.load_s)
        self._load_s += time.perf_counter() - began_s

    def wait_for_save(self) -> None:
        plan, boxes, loads = self._metadata().plan, self._boxes, self._loads
        if boxes is None or loads is None:
            return
        loaded = self._loaded = loads.take_ended()
        if not (plan.loads or plan.stages or plan.ended_writes or plan.ended_reads or loaded):
            return
        load_s, self._load_s, began_s = self._load_s, 0.0, time.perf_counter()
        placed = boxes.stage([copy for copy in plan.stages if boxes.can_stage(copy)])
        boxes.finish_step(
            lambda: [
                *(("staged", *frame) for frame in boxes.frames(placed)),
                *(("write_ended", transfer_id) for transfer_id in plan.ended_writes),
                *(("read_ended", copy.transfer_id) for copy in plan.loads),
                *(("read_ended", copy.transfer_id) for _, copy in loaded),
                *(("read_ended", transfer_id) for transfer_id in plan.ended_reads),
                ("copied", "", load_s, time.perf_counter() - began_s),
            ]
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose sliced loads have ended in this step, also those that were given up: vLLM frees their blocks on this."""
        loaded, self._loaded = self._loaded, []
        return None, {request_id for request_id, _ in loaded} or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._loads.take_failed_blocks() if self._loads is not None else set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are over, or ordered on the stream, before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: a step's blocks are staged once, after it."""

    def _metadata(self) -> _Metadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        return metadata


def _computed_tokens(output: SchedulerOutput) -> Iterator[tuple[str, int]]:
    """(request id, tokens computed once this step has run) of every request in it."""
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_computed + scheduled[request_id]


def _block_bytes(kv_cache_config: KVCacheConfig | None) -> int:
    """Bytes of one block over all layers of a rank; 0 where there is no cache of ours."""
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else []
    return sum(len(group.layer_names) * int(group.kv_cache_spec.page_size_bytes) for group in groups)


def _describe(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> tuple[CacheBlocks, KvLayout]:
    """The rank's cache and its layout. Raises ConfigError for models whose cache is not one group of full attention."""
    groups = kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    windowed = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    if not isinstance(spec, FullAttentionSpec) or windowed or vllm_config.parallel_config.pipeline_parallel_size > 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ConfigError(
            f"the KV cache has {len(groups)} group(s) of {', '.join(kinds)}; KV hand-over needs one group of full attention",
            key="model",
            value=vllm_config.model_config.model,
            expected="a decoder model with full attention in every layer, without pipeline parallelism",
        )
    cache = CacheBlocks.of(kv_caches, kv_cache_config.num_blocks)
    tensor = next(iter(kv_caches.values()))
    layer = vllm_config.compilation_config.static_forward_context[groups[0].layer_names[0]]
    attention = layer.get_attn_backend().get_name()
    packing = _packing(attention, spec, tensor)
    is_known = packing is not Packing.OPAQUE
    layout = KvLayout(
        model=str(vllm_config.kv_transfer_config.get_from_extra_config("model_fingerprint", "")),
        backend=f"{attention}/{_cache_layout_name(vllm_config)}",
        dtype=f"{str(tensor.dtype).removeprefix('torch.')}/{vllm_config.cache_config.cache_dtype}",
        block_tokens=int(spec.block_size),
        num_layers=len(cache.layers),
        block_bytes=cache.block_bytes,
        num_ranks=int(vllm_config.parallel_config.tensor_parallel_size),
        kv_heads=int(vllm_config.model_config.get_total_num_kv_heads()) if is_known else 0,
        head_dim=int(spec.head_size) if is_known else 0,
        packing=packing,
    )
    return cache, layout


_ADDRESSABLE = {"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"}  # each token's keys and values of one head are one run


def _packing(attention: str, spec: FullAttentionSpec, cache: torch.Tensor) -> Packing:
    """What is known of the inside of a block, by the backend's name and the shape [blocks, heads, block_tokens, 2 x head_dim].

    The CPU backend keeps a head's keys in an order of its own, then its values. Caches of one-byte numbers have scales of their own.
    """
    shape = (int(spec.num_kv_heads), int(spec.block_size), 2 * int(spec.head_size))
    if tuple(cache.shape[1:]) != shape or str(cache.dtype).removeprefix("torch.") not in FLOATS:
        return Packing.OPAQUE
    if attention == "CPU_ATTN":
        return Packing.HEADS
    return Packing.TOKENS if attention in _ADDRESSABLE and cache.stride(3) == 1 else Packing.OPAQUE


def _cache_layout_name(vllm_config: VllmConfig) -> str:
    """vLLM's name of the physical order of dimensions, part of what must be equal on both sides."""
    return str(getattr(vllm_config.cache_config.get_resolved_kv_cache_layout(), "name", "unnamed"))
