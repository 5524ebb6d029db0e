"""What is known of the workers' speed before the first step: from the roofline of the model's shape on the device. Pure."""

from __future__ import annotations

from disagg.config import Topology
from disagg.engine.simulated_timing import step_cost
from disagg.errors import ConfigError
from disagg.perf.hardware import find_device
from disagg.perf.profile import load_profile
from disagg.perf.roofline import StepModel
from disagg.perf.shapes import ModelShape
from disagg.policy.step_cost import GENERIC, StepCost, from_profile, from_roofline
from disagg.types import Role


def priors_of(topology: Topology, shape: ModelShape | None = None) -> dict[Role, StepCost]:
    """Step costs per role. `shape`: of the model that a real engine loads, where it is known.

    `engine.profile` comes first, where the topology has one; ConfigError when it is another model's. Otherwise a real engine's device is a
    CPU core, or the GPU that the pool's `gpu`, else `ray.gpu`, names (an H100 when neither does). The first steps correct it.
    """
    if topology.engine.kind == "simulated":
        return {role: step_cost(topology.simulated(role)) for role in topology.active_pools()}
    return {role: _real(topology, role, shape) for role in topology.active_pools()}


def pass_tokens_of(topology: Topology) -> dict[Role, int]:
    """Tokens of a step that a long prompt leaves to others: vLLM's max_num_batched_tokens less its long_prefill_token_threshold."""
    found = {}
    for role in topology.active_pools():
        limit, most = _step_limits(topology, role)
        if isinstance(limit, int) and isinstance(most, int) and 0 < most < limit:
            found[role] = limit - most
    return found


def _step_limits(topology: Topology, role: Role) -> tuple[object, object]:
    """Tokens of a step, and of one long prompt in it, as the topology sets them."""
    if topology.engine.kind == "simulated":
        simulated = topology.simulated(role)
        return simulated.max_num_batched_tokens, simulated.long_prefill_tokens
    args = topology.engine_args(role)
    return args.get("max_num_batched_tokens"), args.get("long_prefill_token_threshold")


def _real(topology: Topology, role: Role, shape: ModelShape | None) -> StepCost:
    if topology.engine.profile is not None:
        profile = load_profile(topology.engine.profile)
        profile.check_model(topology.model)
        return from_profile(profile)
    if shape is None:
        return GENERIC
    pool = topology.active_pools()[role]
    device = find_device("cpu" if not pool.gpus else topology.gpu_name(role) or "h100")
    degree = topology.engine_args(role).get("tensor_parallel_size", 1)
    try:
        return from_roofline(StepModel(shape, device, degree if isinstance(degree, int) else 1))
    except ConfigError:
        return GENERIC  # a degree that the heads do not divide by: the engine will say so
