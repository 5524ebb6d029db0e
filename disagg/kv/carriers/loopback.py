"""Carrier `loopback`: source and puller in one process and one event loop. For tests, and for a worker that reads from itself."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.errors import TransferError
from disagg.kv.frames import HEARTBEAT_S, Frame, Sink, pull_request
from disagg.kv.outbox import Outbox
from disagg.types import Transfer

_served: dict[str, Outbox] = {}


class LoopbackCarrier:
    """Reads an outbox of this process directly."""

    name = "loopback"

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        self._heartbeat_s = heartbeat_s
        self._endpoints: list[str] = []

    async def serve(self, outbox: Outbox) -> str:
        endpoint = f"loopback-{outbox.epoch}"
        _served[endpoint] = outbox
        self._endpoints.append(endpoint)
        return endpoint

    async def pull(self, endpoint: str, transfer: Transfer, sink: Sink) -> None:
        outbox = _served.get(endpoint)
        if outbox is None:
            raise TransferError(f"worker {transfer.source.worker} does not serve {endpoint} any more")
        with outbox.reader(pull_request(transfer)) as reader:
            complete = False
            while not complete:
                header = await reader.next(self._heartbeat_s)
                payload: Sequence[memoryview] = [reader.payload(header)] if isinstance(header, Frame) else ()
                complete = await sink.receive(header, payload)
            reader.acknowledge()

    async def close(self) -> None:
        for endpoint in self._endpoints:
            _served.pop(endpoint, None)
        self._endpoints.clear()
