"""Faults of vLLM 0.32 that are mended from outside. Applied inside engine processes only, idempotent.

Two faults of the V1 model runner concern requests with a seed, which have their own random generator:

- A request prefilled in several chunks is sampled after every chunk and the result thrown away; the runner then turns the generator
  back by its offset. CPU generators have no offset: the exception ends the engine. Here such a row is sampled without its generator: what
  is thrown away needs no draw of its own, and there is nothing to turn back.
- A request that continues an answer (decode after prefill, fail-over) starts a fresh generator, which would draw the first numbers
  again. Here it first skips one draw per token that was sampled elsewhere (`extra_args[SKIP_DRAWS]`).

The V2 runner (the default on GPUs) draws by seed and position and needs neither.

One concerns the start on CPUs: vLLM saves the compiled model, and fails to load it again because it takes torch's compiled function
for one of its own kind; so every start compiles anew, which is most of its time.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput

SKIP_DRAWS = "disagg_skip_draws"
_CUDA_OFFSET_PER_DRAW = 4  # what vLLM itself assumes when it takes a draw back


def skip_draws(generator: torch.Generator, count: int) -> None:
    """Leaves `generator` as if vLLM's sampler had drawn `count` tokens with it."""
    if generator.device.type == "cpu":
        for _ in range(count):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
    else:
        generator.set_offset(generator.get_offset() + _CUDA_OFFSET_PER_DRAW * count)


def patch_runner(vllm_config: VllmConfig) -> None:
    """Mends the V1 runner class in this process. Idempotent; the V2 runner is left alone."""
    if vllm_config.use_v2_model_runner:
        return
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    if getattr(GPUModelRunner, "_disagg_patched", False):
        return
    GPUModelRunner._disagg_patched = True
    GPUModelRunner.sample_tokens = _without_discarded_generators(GPUModelRunner.sample_tokens)
    GPUModelRunner._update_states = _with_skipped_draws(GPUModelRunner._update_states)


def _without_discarded_generators(sample_tokens: Any) -> Any:
    @functools.wraps(sample_tokens)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        generators: dict[int, torch.Generator] = self.input_batch.generators
        if not generators or self.device.type != "cpu":
            return sample_tokens(self, *args, **kwargs)
        discarded = self.discard_request_mask.np
        num_reqs = self.input_batch.num_reqs
        parked = {row: generators.pop(row) for row in list(generators) if row < num_reqs and discarded[row]}
        try:
            return sample_tokens(self, *args, **kwargs)
        finally:
            generators.update(parked)

    return wrapped


def _with_skipped_draws(update_states: Any) -> Any:
    @functools.wraps(update_states)
    def wrapped(self: Any, scheduler_output: SchedulerOutput) -> Any:
        result = update_states(self, scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            generator = self.requests[new.req_id].generator
            if generator is not None and extra.get(SKIP_DRAWS):
                skip_draws(generator, extra[SKIP_DRAWS])
        return result

    return wrapped


def patch_compiled_model_loading() -> None:
    """Lets a CPU engine use the compiled model that an earlier start has saved: torch's own kind has nothing to finalize."""
    from vllm.platforms import current_platform

    load = torch.compiler.load_compiled_function
    if not current_platform.is_cpu() or hasattr(load, "_disagg_patched"):
        return

    @functools.wraps(load)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        function = getattr(getattr(loaded, "_artifacts", None), "compiled_fn", None)
        if function is not None and not hasattr(function, "finalize_loading"):
            function.finalize_loading = lambda vllm_config: None
        return loaded

    wrapped._disagg_patched = True  # type: ignore[attr-defined]
    torch.compiler.load_compiled_function = wrapped
