"""gRPC settings that both ends of the worker RPC share."""

from __future__ import annotations

ERROR_KEY = "disagg-error-bin"  # trailing metadata: a typed error as JSON

COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),  # the front door bounds what comes in
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.max_pings_without_data", 0),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.enable_retries", 0),  # the coordinator retries, knowingly
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a worker that comes back at an old address gets a new connection
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *COMMON_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)


def keepalive_options(timeout_s: float) -> tuple[tuple[str, int], ...]:
    """Pings that find a dead peer host (which sends no reset) within `timeout_s`."""
    half_ms = max(500, int(timeout_s * 500))
    return (("grpc.keepalive_time_ms", half_ms), ("grpc.keepalive_timeout_ms", half_ms), ("grpc.keepalive_permit_without_calls", 1))
