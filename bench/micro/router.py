"""What the router and the gateway cost.

    python -m bench.micro.router [--json] [--requests 3000]

decision_us_p50      one decision (a grant) of the dispatcher: 64 workers, 1,000 requests waiting
routes_per_s         whole lives of requests through the dispatcher, in one process: submit, decide, first token, arrived, decoding, end
added_ttft_ms_*      what clients see as TTFT through gRPC door, coordinator and worker RPC, over simulated workers of zero step time, with
                     `clients` requests at a time. All of it is overhead: the engines take none
gateway_tokens_per_s tokens streamed to those clients, answers of 32 tokens

Workers, gateway and clients are processes of their own, as in a deployment; on few cores they compete, so the machine must be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from bench.micro.gateway_load import PROMPT, measure, topology
from disagg.policy.dispatch import Dispatcher
from disagg.policy.priors import priors_of
from disagg.slo import percentile
from disagg.types import EngineState, Mode, ModelInfo, Request, Role, Sampling

STATE = EngineState("e", free_kv_tokens=1 << 20, total_kv_tokens=1 << 20, outbox_total_bytes=1 << 30, inbox_total_bytes=1 << 30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=3000, help="requests through the gateway")
    parser.add_argument("--gateways", type=int, default=1, help="gateways over the same workers, each a process of its own")
    parser.add_argument("--client-processes", type=int, default=2, help="processes that the clients are spread over")
    given = parser.parse_args()
    alone = {"decision_us_p50": decision_us(), "routes_per_s": routes_per_s()}
    load = asyncio.run(measure(given.requests, given.gateways, given.client_processes))
    result = {**alone, **load.row()}
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24s} {value:10.1f}")
    print(f"\n{load.requests_per_s:.0f} requests/s, {load.messages_per_request:.1f} messages each; CPU milliseconds per request:")
    for kind, cpu_ms in load.cpu_ms_per_request.items():
        print(f"  {kind:22s} {cpu_ms:10.2f}")


# ---- the dispatcher alone


def dispatcher(workers: int) -> Dispatcher:
    t = topology(workers // 2, workers // 2, 1.0)
    model = ModelInfo("m", 32_768, 32_000, 64)
    d = Dispatcher(Mode.DISAGG, model, t.slo_classes, t.admission, priors_of(t))
    for index in range(workers):
        d.join(f"w{index}", Role.PREFILL if index % 2 else Role.DECODE, "host", STATE, 0.0)
    return d


def request(number: int, now_s: float) -> Request:
    return Request(f"r{number}", PROMPT * 16, Sampling(max_tokens=300), "default", arrival_s=now_s)


def decision_us(workers: int = 64, waiting: int = 1000, decisions: int = 500) -> float:
    """Median microseconds of `decide` when one worker has just become free."""
    d, now_s = dispatcher(workers), 10.0
    running = []
    for number in range(waiting + workers):
        d.submit(request(number, now_s), now_s)
        running += [grant.key for grant in d.decide(now_s).grants] if number < workers else []
    running += [grant.key for grant in d.decide(now_s).grants]
    taken_us = []
    for number in range(decisions):
        now_s += 1e-3
        key = running.pop(0)
        d.first_token(key, now_s)
        d.end(key, now_s, is_whole=True)
        d.submit(request(10_000 + number, now_s), now_s)
        began = time.perf_counter()
        grants = d.decide(now_s).grants
        if len(grants) == 1:
            taken_us.append((time.perf_counter() - began) * 1e6)
        running += [grant.key for grant in grants]
    return percentile(taken_us, 50) or 0.0


def routes_per_s(workers: int = 64, routes: int = 3000) -> float:
    """Requests per second of one process's dispatcher."""
    d, now_s = dispatcher(workers), 10.0
    began = time.perf_counter()
    for number in range(routes):
        now_s += 1e-3
        d.submit(request(number, now_s), now_s)
        for grant in d.decide(now_s).grants:
            d.first_token(grant.key, now_s)
            d.arrived(grant.key, now_s)
            d.decoding(grant.key, now_s)
            d.end(grant.key, now_s, is_whole=True)
    return routes / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
