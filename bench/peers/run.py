"""Our arms against other people's serving: the same requests on the same cores, in turns, in one run of `disagg ab`.

    python -m bench.peers.run --workload short-chat --rates 1,3 --duration-s 15 [--peers vllm-router nixl] [--arms colocated,adaptive]

Peers: `vllm-router`, one stock vLLM server per core behind vllm-router; `nixl`, vLLM's own disaggregation with NixlConnector over TCP
behind vllm-router. Both get the topology's engine arguments and cores. vllm-router and the nixl wheels are installed on first use, by pip,
into OUT/tools: vllm-router brings a web stack of its own, and nixl must not become a dependency of ours. Versions: OUT/versions.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import signal
import subprocess
import sys
import venv
from pathlib import Path

from bench.peers.servers import Server, colocated, nixl, running
from disagg.config import load_topology

PEERS = ("vllm-router", "nixl")


def main() -> int:
    """Start the peers, run the A/B with them as external arms, end them. The exit status is `disagg ab`'s."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", type=Path, default=Path("cluster/topologies/cpu-1p1d.yaml"))
    parser.add_argument("--workload", default="short-chat")
    parser.add_argument("--rates", default="")
    parser.add_argument("--duration-s", type=float)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default="colocated,disagg,adaptive", help="ours")
    parser.add_argument("--chunk", default="topology", help="of our colocated arm and of the peers' colocated servers")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--out", type=Path, default=Path("out/peers"))
    given = parser.parse_args()
    overrides = {"pools.colocated.args.max_num_batched_tokens": int(given.chunk)} if given.chunk.isdecimal() else {}
    topology = load_topology(given.topology, overrides)
    router, packages = _tools(given.out / "tools", given.peers)
    servers: dict[str, list[Server]] = {}
    if "vllm-router" in given.peers:
        servers["vllm-router"] = colocated(topology, given.topology.parent, router)
    if "nixl" in given.peers:
        servers["nixl"] = nixl(topology, given.topology.parent, router, packages)
    folder = given.out / given.workload
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the servers are ended then, too
    with contextlib.ExitStack() as stack:
        urls = {name: stack.enter_context(running(own, folder / "logs" / name)) for name, own in servers.items()}
        arms = ",".join([given.arms, *(f"external-{name}={url}" for name, url in urls.items())])
        command = [sys.executable, "-c", "from disagg.cli import app; app()", "ab", str(given.topology), "--workload", given.workload]
        command += ["--arms", arms, "--rounds", str(given.rounds), "--chunk", given.chunk, "--out", str(folder)]
        command += ["--rates", given.rates] if given.rates else []
        command += ["--duration-s", str(given.duration_s)] if given.duration_s else []
        return subprocess.run(command, check=False).returncode


def _tools(folder: Path, peers: list[str]) -> tuple[Path, Path]:
    """vllm-router's program and the folder with nixl, installed where they are not; versions are written down."""
    router, packages = folder / "router" / "bin" / "vllm-router", folder / "nixl"
    folder.mkdir(parents=True, exist_ok=True)
    if not router.exists():
        venv.create(folder / "router", with_pip=True)
        subprocess.run([folder / "router" / "bin" / "pip", "install", "-q", "vllm-router"], check=True)
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
    return router.absolute(), packages.absolute()


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


if __name__ == "__main__":
    raise SystemExit(main())
