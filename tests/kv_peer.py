"""A KV peer in a process of its own, to be killed. `python -m tests.kv_peer source KIND` or `... puller KIND` (address on stdin)."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from disagg.kv.box import Box
from disagg.kv.carrier import this_host_id
from disagg.kv.inbox import Inbox
from disagg.kv.outbox import Outbox
from disagg.types import KvAddress, Transfer, new_id
from tests.faulty_carrier import FaultyCarrier
from tests.kv_rig import CARRIERS, LAYOUT, Rig

NUM_TOKENS = 100


async def source(kind: str) -> None:
    """Serve one transfer of which three frames are staged, and say which; then wait for the end."""
    box = Box(1 << 20, "peer")
    outbox = Outbox(box, LAYOUT, new_id())
    carrier = CARRIERS[kind]()
    address = KvAddress("peer", outbox.epoch, this_host_id(), ((kind, await carrier.serve(outbox)),))
    peer = Rig(outbox, None, address, carrier, carrier)  # type: ignore[arg-type]
    transfer = peer.transfer(NUM_TOKENS)
    await peer.write(transfer, upto=3)
    say(dataclasses.asdict(transfer))
    await asyncio.Event().wait()


async def puller(kind: str) -> None:
    """Pull the transfer named on stdin, stall at frame 2, say so; then wait for the end."""
    carrier = FaultyCarrier(CARRIERS[kind](), "stall", at_frame=2)
    inbox = Inbox(Box(1 << 20, "peer"), LAYOUT, {kind: carrier}, this_host_id())
    fetch = asyncio.ensure_future(inbox.fetch(read_transfer(sys.stdin.readline())))
    await carrier.stalled.wait()
    say({"stalled": True})
    await fetch


def read_transfer(line: str) -> Transfer:
    fields = json.loads(line)
    source = fields.pop("source")
    endpoints = tuple((name, endpoint) for name, endpoint in source.pop("endpoints"))
    return Transfer(source=KvAddress(endpoints=endpoints, **source), **fields)


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run({"source": source, "puller": puller}[sys.argv[1]](sys.argv[2]))
