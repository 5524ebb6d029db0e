"""The engine that a topology asks for, by its kind. A real engine's module is imported only when one is started."""

from __future__ import annotations

import os
from collections.abc import Sequence

from disagg.config import Topology
from disagg.engine.engine import Engine
from disagg.errors import ConfigError
from disagg.kv.box import Box
from disagg.types import Role


async def start_engine(
    topology: Topology, role: Role, name: str, model: str | None, outbox: Box, inbox: Box, cores: Sequence[int] | None
) -> Engine:
    """A running engine for one worker of `role`. `model`: path or hub name (not needed when simulated). `cores`: bind to these.

    Raises ConfigError for arguments the engine does not have, ModelError for weights it cannot load. The environment that the pool asks
    for becomes this process's own: a worker's process holds one engine.
    """
    if topology.engine.kind == "simulated":
        from disagg.engine.simulated import start_simulated_engine

        return await start_simulated_engine(topology.simulated(role), name)
    if model is None:
        raise ConfigError(key="model", value=None, expected="a model's path or hub name for engine.kind vllm")
    os.environ.update(topology.engine_env(role))
    from disagg.engine.vllm_engine import start_vllm_engine

    return await start_vllm_engine(model, topology.engine_args(role), outbox, inbox, name, list(cores) if cores is not None else None)
