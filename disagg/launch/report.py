"""What actors tell about themselves: values that cross Ray."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.launch.processes import ProcessId
from disagg.types import EngineState, Role


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker that serves. `target`: host:port of its RPC. `loading_s`: from the start of its process to being ready."""

    name: str
    role: Role
    target: str
    epoch: str
    host: str
    pid: int
    loading_s: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker as the gateway sees it. `restarts`: lives after the first one. `state` is None while it is not live.

    `trouble`: why it is not live, in one sentence; empty when it is.
    """

    name: str
    role: Role
    is_live: bool
    restarts: int = 0
    report: WorkerReport | None = None
    state: EngineState | None = None
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class DeploymentStatus:
    """A whole deployment at one instant. `endpoint`: where gRPC clients connect, as host:port.

    `http_url`: where HTTP is served; OpenAI's API when `has_openai_api`, else health and metrics. None where there is none.
    """

    name: str
    model: str
    mode: str
    endpoint: str
    gateway_pid: int
    workers: tuple[WorkerStatus, ...]
    http_url: str | None = None
    has_openai_api: bool = False

    @property
    def is_healthy(self) -> bool:
        """True when every worker is live."""
        return all(worker.is_live for worker in self.workers)


@dataclass(frozen=True, slots=True)
class ActorProcesses:
    """An actor's process and its descendants, and the Ray node that they run on."""

    node_id: str
    processes: tuple[ProcessId, ...]
