"""What the simulator must be told beside the topology. Pure values."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SimSettings:
    """The world around engines and router. Assumptions, all of them: measure and set them where they matter.

    `network_s`: one message one way, client to gateway and gateway to worker. `link_bandwidth`: bytes/s of one worker's link, each way
    (50e9: 400 Gb/s); `link_latency_s`: from the last byte sent to the transfer complete. `kv_bytes_per_token`: on the wire; None takes the
    model's own. `report_interval_s`: how old a worker's state may get at the gateway. `timeout_s`: each request's deadline.
    `prefix_block_tokens`: tokens per prefix identity of the trace; 0 turns prefix caches off. `max_tokens`: what every request asks for at
    most, while its answer ends where the trace says: the router has to guess; None tells it each answer's length, as `ignore_eos` does.
    `keep_tokens`: remember when each token came; without it memory does not grow with tokens, and outcomes know first and last only.
    """

    network_s: float = 0.5e-3
    link_bandwidth: float = 50e9
    link_latency_s: float = 1e-3
    kv_bytes_per_token: int | None = None
    report_interval_s: float = 0.1
    timeout_s: float = 120.0
    prefix_block_tokens: int = 0
    max_tokens: int | None = None
    keep_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("link_bandwidth", "report_interval_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(key=name, value=getattr(self, name), expected="a number above 0")
        for name in ("network_s", "link_latency_s", "prefix_block_tokens"):
            if not getattr(self, name) >= 0:
                raise ConfigError(key=name, value=getattr(self, name), expected="0 or more")
