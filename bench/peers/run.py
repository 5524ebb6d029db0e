"""Our arms against other people's serving: the same requests on the same cores, in turns, in one run of the A/B.

    python -m bench.peers.run --workload short-chat --rates 1,3 --duration-s 15 [--peers vllm-router nixl] [--arms colocated,adaptive]
    python -m bench.peers.run --topology out/bench/topology.yaml --workload out/bench/short-chat.yaml --rates ...     (after `make bench`)

Peers: `vllm-router`, one stock vLLM server per core behind vllm-router; `nixl`, vLLM's own disaggregation with NixlConnector over TCP
behind vllm-router. Both get the topology's engine arguments and cores, and are stopped (SIGSTOP) while another arm has its turn.
vllm-router and the nixl wheels are installed on first use, by pip, into OUT/tools: vllm-router brings a web stack of its own, and nixl must
not become a dependency of ours. Versions: OUT/versions.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from bench.peers.servers import Running, Server, colocated, nixl, router_program, running
from disagg.ab.arms import Serving, can_be_resident, deployed, parse_arms, with_chunk
from disagg.ab.environment import free_memory_bytes
from disagg.ab.out import OutFolder
from disagg.ab.progress import RunProgress
from disagg.ab.ray_arms import RayArms
from disagg.ab.result import Result
from disagg.ab.run import Comparison, compare, run_ab
from disagg.ab.table import WIDTH, render
from disagg.ab.trace_workload import load_any_workload
from disagg.ab.workload import Workload
from disagg.cli_ab_report import print_report
from disagg.config import Topology, load_topology
from disagg.launch.session import RaySession

PEERS = ("vllm-router", "nixl")


class PausingArms:
    """An ArmSource in which only the peer whose turn it is runs; our own arms are quiet when nobody asks them."""

    def __init__(self, own: RayArms, peers: Mapping[str, Running]) -> None:
        self._own = own
        self._peers = peers

    async def use(self, arm: str) -> Serving:
        """Pause all other peers, wake this one, and bring up what is ours."""
        for name, peer in self._peers.items():
            if name == arm:
                peer.go_on()
            else:
                peer.pause()
        return await self._own.use(arm)

    async def lives(self, arm: str) -> Mapping[str, str]:
        """As RayArms says; nothing is known of peers."""
        return await self._own.lives(arm)

    async def preemptions(self, arm: str) -> int | None:
        """As RayArms says; nothing is known of peers."""
        return await self._own.preemptions(arm)

    async def close(self) -> None:
        """Take our arms down; the peers end with their context."""
        await self._own.close()


def main() -> int:
    """Start the peers, run the A/B with them as external arms, end them. 1 when it is no result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", type=Path, default=Path("cluster/topologies/cpu-1p1d.yaml"))
    parser.add_argument("--workload", default="short-chat", help="a name or a file")
    parser.add_argument("--rates", default="", help="requests/s, separated by commas")
    parser.add_argument("--duration-s", type=float, help="how long each turn sends")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default="colocated,disagg,adaptive", help="ours")
    parser.add_argument("--chunk", type=int, help="tokens per step of our colocated arm and of the peers' colocated servers")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--out", type=Path, default=Path("out/peers"))
    given = parser.parse_args()
    overrides = {"pools.colocated.args.max_num_batched_tokens": given.chunk} if given.chunk else {}
    topology = load_topology(given.topology, overrides)
    workload = load_any_workload(given.workload)
    if given.duration_s and isinstance(workload, Workload):
        workload = workload.model_copy(update={"duration_s": given.duration_s})
    folder = OutFolder(given.out / workload.name)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers are ended then, too
    with contextlib.ExitStack() as stack:
        peers: dict[str, Running] = {}
        for name, servers in _servers(given, topology).items():
            for peer in peers.values():
                peer.pause()
            print(f"starting {name}", flush=True)
            peers[f"external-{name}"] = stack.enter_context(running(servers, folder.path / "logs" / name))
        text = ",".join([given.arms, *(f"{name}={peer.url}" for name, peer in peers.items())])
        arms = tuple(with_chunk(arm, given.chunk) if given.chunk else arm for arm in parse_arms(text, topology))
        rates = [float(rate) for rate in given.rates.split(",") if rate]
        resident = can_be_resident(deployed(arms), free_memory_bytes())
        comparison = compare(topology, workload, resident=resident, arms=arms, rates=rates, rounds=given.rounds)
        result = _run(comparison, peers, folder, given.topology.parent)
    console = Console(highlight=False, width=WIDTH)
    console.print(render(result))
    print_report(folder.path)
    return 1 if result.not_a_result else 0


def _run(comparison: Comparison, peers: Mapping[str, Running], folder: OutFolder, base_dir: Path) -> Result:
    async def run() -> Result:
        own = RayArms(session, comparison.arms, resident=comparison.resident, base_dir=base_dir, say=progress.say)
        try:
            return await run_ab(comparison, PausingArms(own, peers), folder, progress)
        finally:
            await own.close()

    with RaySession.start(list(comparison.topologies.values()), None) as session, RunProgress(Console(stderr=True)) as progress:
        return asyncio.run(run())


def _servers(given: argparse.Namespace, topology: Topology) -> dict[str, list[Server]]:
    router, packages = _tools(given.out / "tools", given.peers)
    found = {}
    if "vllm-router" in given.peers:
        found["vllm-router"] = colocated(topology, given.topology.parent, router)
    if "nixl" in given.peers:
        found["nixl"] = nixl(topology, given.topology.parent, router, packages)
    return found


def _tools(folder: Path, peers: list[str]) -> tuple[Path, Path]:
    """vllm-router's program and the folder with nixl, installed where they are not; versions are written down."""
    router, packages = router_program(folder), folder / "nixl"
    if "nixl" in peers and not packages.exists():
        # Without their dependencies: torch and numpy are there, and the CUDA packages they ask for are not needed over TCP.
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", packages, "nixl", "nixl-cu12"], check=True)
    found = subprocess.run([folder / "router" / "bin" / "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    versions = [line for line in found.splitlines() if line.startswith("vllm-router")]
    versions += sorted(path.name.removesuffix(".dist-info") for path in packages.glob("nixl*.dist-info"))
    versions += subprocess.run(
        [sys.executable, "-c", "import vllm; print('vllm', vllm.__version__)"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1:]
    (folder.parent / "versions.txt").write_text("\n".join(versions) + "\n")
    return router, packages.absolute()


if __name__ == "__main__":
    raise SystemExit(main())
