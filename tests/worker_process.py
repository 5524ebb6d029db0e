"""A worker in a process of its own: `python -m tests.worker_process TOPOLOGY_JSON ROLE NAME`. Prints its target, serves until killed."""

from __future__ import annotations

import asyncio
import sys

from disagg.config import Topology
from disagg.serving.start import start_worker
from disagg.types import Role


async def main(topology_json: str, role: str, name: str) -> None:
    server = await start_worker(Topology.model_validate_json(topology_json), Role(role), name)
    print(server.target, flush=True)  # noqa: T201
    await server.wait_dead()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
