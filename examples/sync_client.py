"""Ask a running gateway (`disagg up cluster/topologies/cpu-1p1d.yaml`), the simplest way.

python examples/sync_client.py [HOST:PORT]
"""

import sys

from disagg.client import Client
from disagg.errors import InvalidRequestError


def main(address: str = "127.0.0.1:8500") -> None:
    with Client(address) as client:
        info = client.model_info()
        print(f"{info.model}: {info.mode}, up to {info.max_model_len} tokens")

        # A whole answer.
        answer = client.generate("The capital of France is", max_tokens=16, temperature=0.0)
        print(answer.text)
        print(f"prefill on {answer.usage.prefill_worker}, decode on {answer.usage.decode_worker}, first token after {answer.ttft_s:.3f} s")

        # Token by token. Leaving the loop early and closing the iterator would cancel the request.
        for part in client.stream("Once upon a time", max_tokens=32, temperature=0.8, seed=7):
            print(part.text, end="", flush=True)
        print()

        # Errors are typed, and say what would be right.
        try:
            client.generate("Hello", max_tokens=0)
        except InvalidRequestError as error:
            print(f"{error.field}: {error.expected}")


if __name__ == "__main__":
    main(*sys.argv[1:])
