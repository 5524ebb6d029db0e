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
)


def keepalive_options(timeout_s: float) -> tuple[tuple[str, int], ...]:
    """Pings by which a worker finds that a gateway's host died without a reset. (A gateway finds a worker's by missing heartbeats.)"""
    return (
        ("grpc.keepalive_time_ms", int(timeout_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeout_s * 2000)),  # without a byte; bytes that are no answer are bytes, too
        ("grpc.http2.ping_timeout_ms", int(timeout_s * 2000)),  # without the answer
        ("grpc.keepalive_permit_without_calls", 1),
    )
