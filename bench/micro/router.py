"""What the router and the gateway cost.

    python -m bench.micro.router [--json] [--requests 3000]

decision_us_p50      one decision (a grant) of the dispatcher: 64 workers, 1,000 requests waiting
routes_per_s         whole lives of requests through the dispatcher, in one process: submit, decide, first token, arrived, decoding, end
added_ttft_ms_*      TTFT of gRPC clients through door, coordinator, worker RPC and back, `clients` requests at a time and nobody saturated:
                     prefill takes no time, so all of it is overhead; decode steps take about 26 ms (a 70B model on H100s at half speed)
gateway_tokens_per_s tokens streamed to those clients flat out, no step takes any time; answers of 32 tokens

Without --json, the TTFT flat out too (then mostly the wait for a busy core), and where the CPU time goes. Workers, gateway and clients are
processes of their own, as in a deployment; on few cores they compete, so the machine must be quiet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time

from bench.micro.gateway_load import CLIENTS, OUTPUT_TOKENS, PROMPT, Load, measure, topology
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
    if given.gateways < 1 or given.client_processes not in (1, 2, 4, 8, 16, 32):
        parser.error(f"--gateways: at least 1; --client-processes: a number that divides {CLIENTS}")
    if given.requests < 5 * given.client_processes:
        parser.error("--requests: at least 5 for each client process")
    alone = {"decision_us_p50": decision_us(), "routes_per_s": routes_per_s()}
    paced, flat_out = asyncio.run(both(given.requests, given.gateways, given.client_processes))
    streamed = {"gateway_tokens_per_s": flat_out.requests_per_s * OUTPUT_TOKENS, "clients": CLIENTS}
    result = {**alone, **paced.ttft(), **streamed}
    if given.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24s} {value:10.1f}")
    for name, load in (("paced", paced), ("flat out", flat_out)):
        ttft = ", ".join(f"{key.rpartition('_')[2]} {value:.1f}" for key, value in load.ttft().items())
        cpu = ", ".join(f"{kind} {cpu_ms:.2f}" for kind, cpu_ms in load.cpu_ms_per_request.items())
        pace = f"{load.requests_per_s:.0f} requests/s of {load.messages_per_request:.1f} messages"
        print(f"{name}: {pace}; TTFT ms {ttft}; CPU ms per request: {cpu}")


async def both(requests: int, gateways: int, client_processes: int) -> tuple[Load, Load]:
    """Paced, with a fifth of the requests, and flat out."""
    paced = await measure(requests // 5, gateways, client_processes, decode_speed=0.5)
    return paced, await measure(requests, gateways, client_processes)


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
