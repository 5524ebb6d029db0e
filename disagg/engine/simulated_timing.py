"""How long a step of a simulated engine takes. Pure; the live engine and the discrete-event simulator share it."""

from __future__ import annotations

from collections.abc import Iterable

from disagg.config import SimulatedSettings
from disagg.engine.simulated_scheduler import Scheduled
from disagg.perf.hardware import find_device
from disagg.perf.model_config import load_shape
from disagg.perf.profile import Profile, StepTimes, load_profile
from disagg.perf.roofline import PrefillChunk, StepModel
from disagg.perf.speculative import Speculation, SpeculativeSteps
from disagg.policy.step_cost import StepCost, from_profile, from_roofline
from disagg.types import StepRecord


def step_model(settings: SimulatedSettings) -> StepTimes:
    """The profile of these settings, or else the roofline.

    Raises ConfigError for an unknown shape or device, a degree that the heads do not divide by, and a profile of another model.
    """
    if settings.profile is not None:
        profile = load_profile(settings.profile)
        profile.check_model(settings.shape)
        return profile
    model = StepModel(load_shape(settings.shape), find_device(settings.gpu), settings.tp, settings.dtype, settings.kv_dtype)
    if not settings.speculative_tokens:
        return model
    return SpeculativeSteps(model, Speculation(settings.speculative_tokens, settings.speculative_acceptance))


def step_cost(settings: SimulatedSettings) -> StepCost:
    """The same in the router's form, in seconds of the engine's clock. Raises as step_model does."""
    model = step_model(settings)
    return from_profile(model, settings.speed) if isinstance(model, Profile) else from_roofline(model, settings.speed)


def plan_seconds(model: StepTimes, plan: Iterable[Scheduled]) -> float:
    """Seconds of the device for one planned step, before `num_computed` is moved on. A single token on a non-empty cache is a decode."""
    chunks, num_decodes, context_tokens = [], 0, 0
    for item in plan:
        cached = item.sequence.num_computed
        if item.num_tokens == 1 and cached:
            num_decodes += 1
            context_tokens += cached + 1
        else:
            chunks.append(PrefillChunk(item.num_tokens, cached))
    return model.step_s(chunks, num_decodes, context_tokens)


def plan_record(plan: Iterable[Scheduled], number: int, seconds: float) -> StepRecord:
    """What one planned step does, before `num_computed` is moved on; it took `seconds`."""
    return StepRecord(number, seconds, *plan_counts(plan))


def plan_counts(plan: Iterable[Scheduled]) -> tuple[int, float, int, int]:
    """A step record's prefill tokens and pairs, decoding requests and context tokens."""
    prefill_tokens, pairs, num_decodes, context_tokens = 0, 0.0, 0, 0
    for sequence, num_tokens in plan:
        cached = sequence.num_computed
        if num_tokens == 1 and cached:
            num_decodes += 1
            context_tokens += cached + 1
        else:
            prefill_tokens += num_tokens
            pairs += num_tokens * (cached + (num_tokens + 1) / 2)
    return prefill_tokens, pairs, num_decodes, context_tokens
