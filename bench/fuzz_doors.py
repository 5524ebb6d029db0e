"""Requests that nobody planned, many of them, to both doors over simulated workers: no status from 500 on, no hang, an alive server.

    pipx install schemathesis
    python -m bench.fuzz_doors [--phases coverage] [--examples 5000] [--path /v1/completions ...]

Over HTTP: schemathesis, from the schema that vLLM's server publishes, one run for each path. Over gRPC: what tests/flow/test_grpc_fuzz.py
draws, more of it. Prints a line for each; exit status 1 when anything was not as it must be. Needs vLLM and the small model.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
import sys
import time
from pathlib import Path

from disagg.models import get_model
from tests.flow import test_grpc_fuzz
from tests.openai_rig import COMPLETIONS, Door, ask, door

CONTEXT_TOKENS = 512  # valid requests shall have short answers
REQUEST_TIMEOUT_S = 60
PATH_TIMEOUT_S = 300.0
LINES_SHOWN = 40  # of a run that found something


async def fuzz_http(schemathesis: str, phases: str, only: list[str], model: Path) -> bool:
    """Every path of the door's schema, or `only` these. True when nothing was found."""
    is_right = True
    async with door(model, check_empty=False, max_model_len=CONTEXT_TOKENS) as d:
        for path in only or sorted((await d.http.get("/openapi.json")).json()["paths"]):
            began_s = time.perf_counter()
            end, said = await _run(schemathesis, phases, path, d)
            cases = re.search(r"(\d+) generated", said)
            print(f"{path}: {cases[1] if cases else 'no'} cases, {end}, {time.perf_counter() - began_s:.0f} s", flush=True)
            if end == "FOUND SOMETHING":
                is_right = False
                print("\n".join(said.splitlines()[-LINES_SHOWN:]), flush=True)
        answer = await d.http.post(COMPLETIONS, json=ask([5, 6]))
        is_alive = answer.status_code == 200 and answer.json()["choices"][0]["token_ids"] == d.expected([5, 6], 8)
        print(f"after all: {'answers as before' if is_alive else answer.text}")
    return is_right and is_alive


async def _run(schemathesis: str, phases: str, path: str, d: Door) -> tuple[str, str]:
    """How one run ended, and what it printed."""
    options = ["--include-path", path, "--phases", phases, "--checks", "not_a_server_error", "--request-timeout", str(REQUEST_TIMEOUT_S)]
    command = [schemathesis, "run", f"http://127.0.0.1:{d.port}/openapi.json", "--no-color", *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    end = "stopped"
    try:
        said, _ = await asyncio.wait_for(asyncio.shield(reading := asyncio.ensure_future(process.communicate())), PATH_TIMEOUT_S)
        end = "nothing found" if process.returncode == 0 else "FOUND SOMETHING"
    except TimeoutError:
        process.terminate()
        said, _ = await reading
    return end, said.decode(errors="replace")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemathesis", default=shutil.which("schemathesis"), help="its command (default: from PATH)")
    parser.add_argument("--phases", default="coverage", help="schemathesis' phases: examples, coverage, fuzzing, stateful")
    parser.add_argument("--path", action="append", default=[], help="only this path of the HTTP door; may be repeated")
    parser.add_argument("--examples", type=int, default=5000, help="requests over gRPC; 0: none")
    args = parser.parse_args()
    if args.schemathesis is None:
        parser.error("no schemathesis in PATH: `pipx install schemathesis`, or say where it is with --schemathesis")
    if args.examples:
        test_grpc_fuzz.EXAMPLES = args.examples
        test_grpc_fuzz.test_anything()  # raises
        print(f"gRPC: {args.examples} requests, each answered or refused by a sentence", flush=True)
    return 0 if asyncio.run(fuzz_http(args.schemathesis, args.phases, args.path, get_model("smollm2-135m"))) else 1


if __name__ == "__main__":
    sys.exit(main())
